"""GPUs as they are read through the real pynvml, from a library that says what the test wants."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from tests.agent.nvml.fake import DOUBLE_BIT_ECC, A, B, FakeDriver
from torchloom.agent.monitor import gpu_readings as module
from torchloom.agent.monitor.gpu_readings import GpuEvent, Gpus, GpuState, throttling
from torchloom.protocol.phrase import phrase
from torchloom.threadlet.process.hardware import gpu_uuids


class Watched:
    """GPUs under watch, and a way to wait for what is seen of them."""

    def __init__(self) -> None:
        self.rang = threading.Event()
        self.gpus = Gpus((A, B, "MIG-1"), self.rang.set)
        self.happened: list[GpuEvent] = []

    def seen(self, device: str = A) -> GpuState:
        return {seen.device: seen for seen in self.gpus.look()}.get(device, GpuState(device))

    def until(self, what: Callable[[], Any]) -> Any:
        end = time.monotonic() + 60
        while not (found := what()):
            assert time.monotonic() < end, f"{self.gpus.look()} {self.happened}"
            time.sleep(0.005)
        return found

    def events(self, count: int) -> list[GpuEvent]:
        def enough() -> bool:
            self.happened += self.gpus.events()
            return len(self.happened) >= count

        self.until(enough)
        return self.happened


def stop(gpus: Gpus) -> None:
    gpus.close()
    for thread in gpus.threads:
        thread.join(10)


@pytest.fixture
def watched(driver: FakeDriver) -> Iterator[Watched]:
    one = Watched()
    one.gpus.start()
    one.until(lambda: one.seen(A).reading and one.seen(B).reading and one.gpus.listening.is_set())
    yield one
    for device in driver.gpus:
        driver.set(device, hang=None)
    stop(one.gpus)


def test_everything_a_gpu_tells_is_read(driver: FakeDriver, watched: Watched) -> None:
    assert gpu_uuids() == (A, B)
    driver.set(A, reasons=0x8 | 0x40 | 0x4)
    reading = watched.until(lambda: (r := watched.seen(A).reading) and r.throttled and r)
    assert (reading.device, reading.name, reading.utilisation) == (A, "Fake-A100", 97.0)
    assert (reading.memory_mb, reading.memory_total_mb) == (40960.0, 81920.0)
    assert (reading.temperature, reading.power_watts, reading.ecc_errors) == (65.0, 312.5, 0)
    assert reading.throttled == ("hardware slowdown", "hardware thermal slowdown", "power cap")
    assert [seen.device for seen in watched.gpus.look()] == [A, B]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("use", "utilisation"),
        ("used", "memory_mb"),
        ("temperature", "temperature"),
        ("power", "power_watts"),
        ("ecc", "ecc_errors"),
    ],
)
def test_what_a_gpu_does_not_tell_is_absent_and_the_rest_is_read(
    driver: FakeDriver, watched: Watched, value: str, field: str
) -> None:
    driver.set(A, **{value: None})
    watched.until(lambda: (r := watched.seen(A).reading) and getattr(r, field) is None)
    told = ["utilisation", "memory_mb", "temperature", "power_watts", "ecc_errors"]
    missing = [name for name in told if getattr(watched.seen(A).reading, name) is None]
    assert missing == [field]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "device_off_bus"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, "device_needs_reset"),
    ],
)
def test_a_gpu_that_fell_off_the_bus_is_lost_and_the_other_is_not(
    driver: FakeDriver, watched: Watched, error: int, why: str
) -> None:
    driver.set(A, error=error)
    lost = watched.until(lambda: (seen := watched.seen(A)).lost and seen)
    assert (lost.lost, lost.reading) == (phrase(why), None)
    assert watched.seen(B).reading is not None
    driver.set(A, error=None)
    assert watched.until(lambda: watched.seen(A).reading)
    assert not watched.seen(A).lost


def test_a_gpu_whose_handle_is_gone_is_lost(driver: FakeDriver, watched: Watched) -> None:
    driver.lose(A)
    assert watched.until(lambda: watched.seen(A).lost) == phrase("device_forgotten")


def test_events_are_told_as_they_happen_each_once(driver: FakeDriver, watched: Watched) -> None:
    driver.xid(B, 79)
    driver.event(A, DOUBLE_BIT_ECC)
    driver.xid(A, 31)
    assert watched.events(3) == [GpuEvent(B, 79), GpuEvent(A), GpuEvent(A, 31)]
    assert watched.rang.wait(60)
    assert watched.gpus.events() == ()


def test_an_event_of_a_lost_gpu_is_still_known_to_be_its(driver: FakeDriver, watched: Watched) -> None:
    driver.set(A, error=pynvml.NVML_ERROR_GPU_IS_LOST)
    driver.xid(A, 79)
    assert watched.events(1) == [GpuEvent(A, 79)]


def test_an_event_with_another_handle_is_known_by_the_name_of_its_gpu(driver: FakeDriver, watched: Watched) -> None:
    driver.set(B, another=1)
    driver.xid(B, 31)
    assert watched.events(1) == [GpuEvent(B, 31)]


def test_what_hangs_is_left_out_and_named_and_events_are_heard_meanwhile(
    driver: FakeDriver, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.set(A, hang=1)
    watched.until(driver.hangs)
    monkeypatch.setattr(module, "STALE_SECONDS", 0.1)
    hung = watched.until(lambda: (seen := watched.seen(A)).silent and seen)
    assert hung.reading is None
    watched.until(lambda: watched.seen(B).reading is None)
    assert not watched.seen(B).silent
    driver.xid(A, 119)
    assert watched.events(1) == [GpuEvent(A, 119)]
    monkeypatch.setattr(module, "STALE_SECONDS", 10.0)
    driver.set(A, hang=None, temperature=50)
    watched.until(lambda: (r := watched.seen(A).reading) and r.temperature == 50.0)


def test_only_the_gpus_of_the_node_are_watched(driver: FakeDriver) -> None:
    mine = Gpus((B,))
    mine.start()
    end = time.monotonic() + 60
    while not mine.look() and time.monotonic() < end:
        time.sleep(0.005)
    assert [seen.device for seen in mine.look()] == [B]
    stop(mine)


def test_a_gpu_without_events_is_read_all_the_same(driver: FakeDriver) -> None:
    for device in (A, B):
        driver.set(device, events=None)
    one = Watched()
    one.gpus.start()
    one.until(lambda: one.seen(A).reading)
    stop(one.gpus)


def test_without_a_driver_there_is_nothing_and_nothing_fails() -> None:
    """In a process whose loader finds no library, as on most machines: a driver that is there would be found."""
    code = (
        "import time, threading; from torchloom.agent.monitor.gpu_readings import Gpus\n"
        "before = threading.active_count(); gpus = Gpus(('GPU-1',)); gpus.start()\n"
        "end = time.monotonic() + 60\n"
        "while threading.active_count() > before and time.monotonic() < end: time.sleep(0.01)\n"
        "print(threading.active_count() - before, gpus.look(), gpus.events()); gpus.close()\n"
        "Gpus(()).start(); print(threading.active_count() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0 () ()\n0\n", "")


def test_reasons_to_run_slower() -> None:
    assert throttling(0) == ()
    assert throttling(0x1 | 0x2) == ()
    assert throttling(0x80 | 0x20) == ("power brake", "thermal slowdown")
