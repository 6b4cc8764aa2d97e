"""Readings and events of the GPUs of a machine, through NVML.

A driver in trouble answers late or never, so nothing here is called from the agent's own loop. One thread reads all
GPUs in turn. Another waits for events, so that an error is seen even if it makes a reading hang. Both are daemons: an
agent that leaves does not wait for a driver. What they find out is replaced whole, so that no lock is needed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pynvml

from torchloom.protocol.node import Reading, ThrottleReason
from torchloom.protocol.phrase import Prose, phrase
from torchloom.shared.nvml import ERRORS, nvml
from torchloom.threadlet.process.identity import sanitised

logger = logging.getLogger("torchloom.agent")
T = TypeVar("T")

READ_SECONDS = 1.0
"""Between two rounds of readings."""
STALE_SECONDS = 10.0
"""Age after which a reading no longer counts."""
WAIT_MS = 1000
"""Longest wait for events, after which the thread checks whether it should end."""
MOST_EVENTS = 1000
_MB = 1024 * 1024

HARDWARE: Final[dict[int, ThrottleReason]] = {
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
"""Reasons to run slower that the hardware has; a GPU at work should have none of them."""
SOFTWARE: Final[dict[int, ThrottleReason]] = {
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "thermal slowdown",
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
}
"""Those of the driver, which are part of ordinary life under load."""
LOST: Final[dict[int, Prose]] = {
    pynvml.NVML_ERROR_GPU_IS_LOST: phrase("device_off_bus"),
    pynvml.NVML_ERROR_NOT_FOUND: phrase("device_forgotten"),
    pynvml.NVML_ERROR_GPU_NOT_FOUND: phrase("device_not_found"),
    pynvml.NVML_ERROR_RESET_REQUIRED: phrase("device_needs_reset"),
}
"""Answers after which a device cannot be used."""
EVENTS: Final = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError


@dataclass(frozen=True)
class GpuState:
    """What is known of one GPU at a moment."""

    device: str
    reading: Reading | None = None
    """Absent where there is none, or none that is fresh."""
    lost: Prose = ""
    """Why it cannot be used at all, as the driver says."""
    silent: float = 0.0
    """Seconds for which the driver has not answered what it was asked about this device."""


@dataclass(frozen=True)
class GpuEvent:
    """An event that the driver reported."""

    device: str
    xid: int | None = None
    """Absent: an uncorrected ECC error."""


class Gpus:
    """Those of the machine that are named. Without a driver there is nothing to see, and nothing fails."""

    def __init__(self, devices: Collection[str], news: Callable[[], None] = lambda: None) -> None:
        self._devices = frozenset(devices)
        self._news = news
        """Called, in a thread of ours, when there is an event."""
        self.listening = threading.Event()
        """Set once no event is missed any more."""
        self._seen: dict[str, tuple[float, GpuState]] = {}
        self._asked: tuple[str, float] | None = None
        """What the reading thread wants to know just now, and since when."""
        self._events: deque[GpuEvent] = deque(maxlen=MOST_EVENTS)
        self._over = threading.Event()
        self.threads = [
            threading.Thread(target=self._work, args=(work,), name=name, daemon=True)
            for name, work in (("torchloom gpus", self._read_on), ("torchloom gpu events", self._listen))
        ]

    # ── from outside ──

    def start(self) -> None:
        if self._devices:
            for thread in self.threads:
                thread.start()

    def close(self) -> None:
        """Stop both threads, without waiting for them: one may hang in the driver."""
        self._over.set()

    def look(self) -> tuple[GpuState, ...]:
        """What is known now, of each device that was ever found."""
        now = time.monotonic()
        asked, since = self._asked or ("", now)
        states = []
        for device, (at, state) in sorted(self._seen.items()):
            if device == asked and now - since > STALE_SECONDS:
                states.append(GpuState(device, silent=now - since))
            else:
                states.append(state if now - at <= STALE_SECONDS else GpuState(device))
        return tuple(states)

    def events(self) -> tuple[GpuEvent, ...]:
        """What happened since this was last asked."""
        return tuple(self._events.popleft() for _ in range(len(self._events)))

    # ── threads ──

    def _work(self, work: Callable[[], None]) -> None:
        try:
            with nvml():
                try:
                    work()
                except ERRORS as error:
                    logger.warning("%s ends: %s", threading.current_thread().name, error)
        except ERRORS as error:
            logger.debug("no GPUs can be read: %s", error)

    def _read_on(self) -> None:
        names = self._names()
        self._seen = {device: (time.monotonic(), GpuState(device)) for device in names}
        while not self._over.is_set():
            for device, uuid in names.items():
                self._asked = (device, time.monotonic())
                state = _read(device, uuid)
                self._seen[device] = (time.monotonic(), state)
            self._asked = None
            self._over.wait(READ_SECONDS)

    def _listen(self) -> None:
        events = pynvml.nvmlEventSetCreate()
        names = self._register(events)
        self.listening.set()
        while names and not self._over.is_set():
            try:
                event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise  # a driver that cannot
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    logger.warning("waiting for GPU events: %s", error)
                    self._over.wait(WAIT_MS / 1000)  # a device is lost; the thread that reads it will see that
                continue
            # The driver may use another handle here than before, and does not tell the name of a lost device.
            device = names.get(_address(event.device), "")
            with suppress(pynvml.NVMLError):
                device = device or sanitised(pynvml.nvmlDeviceGetUUID(event.device))
            if device not in self._devices:
                logger.warning("an event of a GPU that is not ours: %s", event)
            elif event.eventType & EVENTS:
                xid = event.eventType & pynvml.nvmlEventTypeXidCriticalError
                self._events.append(GpuEvent(device, int(event.eventData) if xid else None))
                self._news()

    def _register(self, events: Any) -> dict[int | None, str]:
        """Ask for the events of our devices. Returns the device of each handle, which the driver keeps forever."""
        names = {}
        for device, uuid in self._names().items():
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                types = EVENTS & pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                if types:
                    pynvml.nvmlDeviceRegisterEvents(handle, types, events)
                    names[_address(handle)] = device
            except pynvml.NVMLError as error:
                logger.info("%s reports no events: %s", device, error)
        return names

    def _names(self) -> dict[str, str]:
        """Our devices, and what the driver calls them."""
        names = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # lost already
                uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
                names[sanitised(uuid)] = uuid
        return {device: uuid for device, uuid in names.items() if device in self._devices}


def _read(device: str, uuid: str) -> GpuState:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        use = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        temperature = _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        errors = _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected)
        name = _ask(pynvml.nvmlDeviceGetName, handle) or ""
        reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    except pynvml.NVMLError as error:
        return GpuState(device, lost=LOST.get(error.value, ""))
    reading = Reading(
        device=device,
        name=name[:100],
        utilisation=None if use is None else float(use.gpu),
        memory_mb=None if memory is None else round(memory.used / _MB, 1),
        memory_total_mb=None if memory is None else round(memory.total / _MB, 1),
        temperature=None if temperature is None else float(temperature),
        power_watts=None if power is None else power / 1000,
        ecc_errors=errors,
        throttled=throttling(reasons),
    )
    return GpuState(device, reading)


def throttling(reasons: int) -> tuple[ThrottleReason, ...]:
    """The reasons to run slower, those of the hardware first."""
    return tuple(reason for bit, reason in {**HARDWARE, **SOFTWARE}.items() if reasons & bit)


def _ask(ask: Callable[..., T], *about: Any) -> T | None:
    """The answer; None where this device, or this driver, has none. Raises an error that is in `LOST`."""
    try:
        return ask(*about)
    except pynvml.NVMLError as error:
        if error.value in LOST:
            raise
        return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
