"""Whether a machine is fit for ranks: its devices answer and compute, there is memory and disk, its clock is right.

Every check reports what it found and, where that is not good enough, what to do about it. How fast the machine is can
only be judged by comparison, so the time of a small computation is reported too (core/jobs/node_health.py compares).

`NodeCheckService` checks on request: of the weaver, which reads the result in beats, or of a client that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import nats.errors
import psutil
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.agent.monitor.gpu_readings import Gpus, GpuState
from torchloom.agent.node import Node
from torchloom.agent.node_check import trials
from torchloom.bus.tasks import TaskSet
from torchloom.protocol.codec import decode_answer, decode_node_look, encode
from torchloom.protocol.node import Check, Fitness
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.subjects import CHECK, CLOCK
from torchloom.protocol.views import Answer, BandwidthView, ClockView, NodeChecksView, QueryBandwidth
from torchloom.views.answers import rendered
from torchloom.views.wording.phrases import render

_MB = 1024 * 1024
MEMORY_MB = 512
"""Free memory, disk and shared memory below which a rank is likely to fail at once."""
DISK_MB = 512
SHARED_MB = 16
SKEW_SECONDS = 5.0
READ_SECONDS = 5.0
"""In which every device has to have answered."""
SHARED = Path("/dev/shm")
CLOCK_SECONDS = 2.0
PAUSE_SECONDS = 15.0
"""Between two looks for the weaver: jobs that save elsewhere, and are not fit here, would take turns without end."""


@dataclass(frozen=True)
class Subject:
    """What is looked at."""

    devices: tuple[str, ...] = ()
    state: Path | None = None
    checkpoints: Path | None = None
    skew: float | Phrase | None = None
    """Seconds by which its clock is ahead of the weaver's, or why that is not known; absent: not asked for."""


def examine(subject: Subject, look: Callable[[], Sequence[GpuState]] | None = None) -> NodeChecksView:
    """All checks. Takes seconds; call it in a thread. `look` tells what devices said last."""
    checks = [*_devices(subject.devices, look), memory(), *_disks(subject)]
    if subject.skew is not None:
        checks.append(clock(subject.skew))
    computed, pace, on = computing(subject.devices)
    return NodeChecksView(checks=(*checks, *computed), pace=pace, on=on)


def reasons(view: NodeChecksView) -> tuple[Phrase, ...]:
    """Why a node is not fit, if it is not."""
    bad = [check for check in view.checks if not check.fit]
    return tuple(phrase("check_not_passed", what=check.what, found=check.found) for check in bad[:64])


# ── devices ──


def _devices(devices: tuple[str, ...], look: Callable[[], Sequence[GpuState]] | None) -> Iterator[Check]:
    if look is None:
        with contextlib.closing(Gpus(devices)) as gpus:
            gpus.start()
            yield from _devices(devices, gpus.look)
        return
    end = time.monotonic() + READ_SECONDS
    while True:
        states = {state.device: state for state in look()}
        answers = {state.device for state in states.values() if state.reading is not None or state.lost}
        if answers.issuperset(devices) or time.monotonic() > end:
            break
        time.sleep(0.05)
    for device in devices:
        yield answering(device, states.get(device))


def answering(device: str, state: GpuState | None) -> Check:
    if state is not None and state.lost:
        return Check(what=device, found=state.lost, fit=False, remedy=phrase("reset_device"))
    if state is None or state.reading is None:
        return Check(what=device, found=phrase("device_unread"), fit=False, remedy=phrase("see_device"))
    reading = state.reading
    memory: Prose = ""
    if reading.memory_mb is not None and reading.memory_total_mb:
        memory = phrase("device_memory_used", used=reading.memory_mb, total=reading.memory_total_mb)
    celsius = None if reading.temperature is None else round(reading.temperature)
    return Check(what=device, found=phrase("device_answers", name=reading.name, celsius=celsius, memory=memory))


# ── memory and disk ──


def memory() -> Check:
    free, total = psutil.virtual_memory().available // _MB, psutil.virtual_memory().total // _MB
    fit = free >= MEMORY_MB
    found = phrase("memory_free", free=free, total=total)
    return Check(what="memory", found=found, fit=fit, remedy="" if fit else phrase("see_memory"))


def _disks(subject: Subject) -> Iterator[Check]:
    wanted = [
        ("state folder", subject.state, DISK_MB),
        ("checkpoint folder", subject.checkpoints, DISK_MB),
        ("temporary files", Path(tempfile.gettempdir()), DISK_MB),
        ("shared memory", SHARED if SHARED.is_dir() else None, SHARED_MB),
    ]
    for what, folder, least in wanted:
        if folder is not None:
            yield disk(what, folder, least, ours=folder is not subject.checkpoints)


def disk(what: str, folder: Path, least_mb: int, ours: bool = True) -> Check:
    """Room in a folder, and whether it can be written to. One that is still to be made is where it will be.

    One that others make is fit then, but has a remedy: perhaps what should be mounted there is not.
    """
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        free = shutil.disk_usage(there).free // _MB
        error: Prose = "" if os.access(there, os.W_OK | os.X_OK) else phrase("not_writable")
    except OSError as failure:
        error = failure.strerror or str(failure)
    at = str(there)
    if error:
        found = phrase("folder_unusable", folder=str(folder), error=error)
        return Check(what=what, found=found, fit=False, remedy=phrase("mount_or_permit", there=at))
    missing, fit = there != folder, free >= least_mb
    found = phrase("folder_missing" if missing else "folder_free", folder=str(folder), there=at, free=free)
    remedy: Prose = ""
    if not fit:
        remedy = phrase("enlarge_shared_memory" if there == SHARED else "make_room", least=least_mb, there=at)
    elif missing and not ours:
        remedy = phrase("mount_or_wait", parent=str(folder.parent) if there != folder.parent else "")
    return Check(what=what, found=found, fit=fit, remedy=remedy)


# ── clock ──


def clock(skew: float | Phrase) -> Check:
    """Nothing is decided by it; but what people read in logs of two machines has to fit together."""
    if isinstance(skew, Phrase):
        return Check(what="clock", found=skew)
    fit, seconds = abs(skew) <= SKEW_SECONDS, abs(skew)
    found = phrase("clock_right") if seconds < 0.1 else phrase("clock_off", seconds=seconds, ahead=skew > 0)
    return Check(what="clock", found=found, fit=fit, remedy="" if fit else phrase("set_clock"))


# ── computing ──


def computing(devices: tuple[str, ...]) -> tuple[list[Check], float | None, str]:
    """The same product of matrices on each device, or on a core where there are none: is it right, and how long?"""
    checks: list[Check] = []
    slowest: float | None = None
    on = ""
    for device in devices or ("",):
        env = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        result = trials.run(("compute",), trials.COMPUTE_SECONDS, env)
        check, seconds = computed(device, result)
        checks.append(check)
        if seconds is not None and (slowest is None or seconds > slowest):
            slowest, on = seconds, str(result["on"])[:100]
    return checks, slowest, on


def computed(device: str, result: dict[str, object]) -> tuple[Check, float | None]:
    what = f"computing on {device}"[:64] if device else "computing"
    remedy = phrase("see_device_log" if device else "see_machine_log")
    trouble = result.get("trouble")
    if isinstance(trouble, Phrase):
        return Check(what=what, found=trouble, fit=False, remedy=remedy), None
    seconds = result.get("seconds")
    if not result.get("on") or not isinstance(seconds, float):
        return Check(what=what, found=phrase("no_torch_or_numpy")), None
    if device and not result.get("cuda"):
        return Check(what=what, found=phrase("torch_without_device")), None
    if not result.get("right"):
        return Check(what=what, found=phrase("computed_wrong"), fit=False, remedy=remedy), None
    return Check(what=what, found=phrase("computed", ms=seconds * 1000, on=str(result["on"]))), seconds


# ── on request ──


@dataclass(eq=False)
class NodeCheckService:
    client: Client
    node: Node
    state: Path
    look_at_gpus: Callable[[], Sequence[GpuState]]
    news: Callable[[], None]
    fitness: Fitness | None = None
    """For beats; absent until the weaver has asked."""
    _ended: float = float("-inf")
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Two at a time would make each other slow."""
    _tasks: TaskSet = field(default_factory=TaskSet)

    async def listen(self) -> None:
        """Answer people."""
        await self.client.subscribe(CHECK.to(node=self.node.name), cb=self._on_look)

    def begin(self, folder: str) -> None:
        """Check the node for the weaver. A request during a check, or right after one, has no effect."""
        fitness = self.fitness or Fitness(number=0)
        if fitness.running or time.monotonic() - self._ended < PAUSE_SECONDS:
            return
        self.fitness = msgspec.structs.replace(fitness, running=True)
        self.news()
        self._tasks.start(self._answer_weaver(fitness.number + 1, folder))

    async def _answer_weaver(self, number: int, folder: str) -> None:
        try:
            view = await self.look(folder)
            self.fitness = Fitness(number=number, unfit=reasons(view), pace=view.pace, on=view.on, folder=folder)
        except Exception as error:  # noqa: BLE001  the weaver must learn that the check is over
            why = phrase("node_unchecked", why=str(error))
            self.fitness = Fitness(number=number, unfit=(why,), folder=folder)
        self._ended = time.monotonic()
        self.news()

    async def look(self, folder: str) -> NodeChecksView:
        async with self._one:
            checkpoints = Path(folder) if folder else None
            subject = Subject(self.node.devices, self.state, checkpoints, await self.skew())
            return await asyncio.to_thread(examine, subject, self.look_at_gpus)

    async def skew(self) -> float | Phrase:
        """How far this clock is ahead of the weaver's: its answer was given half way between asking and hearing."""
        asked, began = time.time(), time.monotonic()
        try:
            reply = await self.client.request(CLOCK.to(), b"", timeout=CLOCK_SECONDS)
            answer = decode_answer(reply.data)
        except (nats.errors.Error, OSError, msgspec.MsgspecError) as error:
            return phrase("clock_not_compared", error=type(error).__name__)
        if not isinstance(answer, ClockView):
            return phrase("clock_not_compared", error="")
        return asked + (time.monotonic() - began) / 2 - answer.now

    async def _on_look(self, message: Msg) -> None:
        self._tasks.start(self._answer(message))  # it takes its time, and others ask too

    async def _answer(self, message: Msg) -> None:
        answer: Answer
        try:
            query = decode_node_look(message.data)
            answer = await (self._exchange(query) if isinstance(query, QueryBandwidth) else self.look(query.folder))
        except msgspec.MsgspecError as error:
            answer = rendered(No(why=phrase("not_understood", why=str(error))))
        except Exception as error:  # noqa: BLE001  the client waits for an answer
            answer = rendered(No(why=phrase("node_unchecked", why=str(error))))
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.publish(message.reply, encode(answer))

    async def _exchange(self, look: QueryBandwidth) -> BandwidthView:
        words = ("exchange", look.host, str(look.port), str(look.rank))
        env = {"GLOO_SOCKET_IFNAME": self.node.interface} if self.node.interface else {}
        result = await asyncio.to_thread(trials.run, words, trials.EXCHANGE_SECONDS, env)
        if not result.get("right"):
            wrong = phrase("exchanged_wrong" if result.get("torch", True) else "no_torch")
            return BandwidthView(trouble=render(result.get("trouble") or wrong)[:2000])
        return BandwidthView(mb_per_second=float(result["mb_per_second"]))

    async def close(self) -> None:
        await self._tasks.end()
