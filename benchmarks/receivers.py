"""Who receives the beats: the real weaver in a process that can be asked how it fares, or a bare nats-py subscriber.

The weaver is the product's, begun and run as `loom weaver` does, with nothing changed in it. What is asked for is read
from its fabric, and from a probe on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

import psutil
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.puppet import Answer, obey
from benchmarks.report import quantile
from torchloom.bus.connection import connect, find
from torchloom.core.detect.detector import Finding
from torchloom.core.state.rank_states import Presence
from torchloom.core.state.runtime import RuntimeState
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat
from torchloom.protocol.subjects import BEAT, Role
from torchloom.settings import Settings
from torchloom.weaver.main import begin
from torchloom.weaver.service import Weaver

LOOK_SECONDS = 0.002
"""How often it is looked whether the last beat has come: the same for both receivers."""


class LagProbe:
    """How late the event loop wakes a sleeper."""

    INTERVAL = 0.005

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(self.INTERVAL)
            lag = max(0.0, time.perf_counter() - began - self.INTERVAL)
            # Whoever would have come while the loop was held up waited too, a little less each.
            while lag > self.INTERVAL:
                self.lags.append(lag)
                lag -= self.INTERVAL
            self.lags.append(lag)


class Applied:
    """Beats that the watch took in. The product keeps no such count, as nobody reads it there."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        hear = RuntimeState.hear

        def counting(runtime: RuntimeState, rank: RankId, beat: Beat, now: float) -> tuple[Finding, ...] | None:
            findings = hear(runtime, rank, beat, now)
            self.count += findings is None
            return findings

        RuntimeState.hear = counting  # type: ignore[method-assign, assignment]


class WeaverHost:
    def __init__(self, weaver: Weaver, applied: Applied | None) -> None:
        self._weaver = weaver
        self._applied = applied
        self._probe = LagProbe()
        self._probing: asyncio.Task[None] | None = None
        self._process = psutil.Process()
        self._since = (time.perf_counter(), time.process_time())

    async def until(self, order: Answer) -> Answer:
        """When every live rank's beat of this step has been applied."""
        step = int(order["step"])
        waiting = [
            rank_runtime
            for rank_runtime in self._weaver.cluster.runtime.ranks.values()
            if not rank_runtime.missing and not rank_runtime.over
        ]
        ranks = len(waiting)

        def done() -> bool:
            while waiting and (beat := waiting[-1].beat) is not None and beat.step >= step:
                waiting.pop()
            return not waiting

        return await _when(done, order) | {"ranks": ranks, "refused": dict(self._weaver.health.refused)}

    async def where(self, _: Answer) -> Answer:
        """Where each of its tasks waits: for when it does not do what was expected of it."""
        return {"tasks": [" > ".join(_chain(task.get_coro())) for task in asyncio.all_tasks()]}

    async def begin(self, _: Answer) -> Answer:
        """Measure from here on."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe.run())
        self._probe.lags.clear()
        self._since = (time.perf_counter(), time.process_time())
        return {}

    async def fare(self, _: Answer) -> Answer:
        """How it has fared since `begin`, and how things stand."""
        now, used = time.perf_counter(), time.process_time()
        lags = sorted(self._probe.lags)
        cluster = self._weaver.cluster
        return {
            "cpu_share": (used - self._since[1]) / (now - self._since[0]),
            "rss_mb": self._process.memory_info().rss / 2**20,
            "lag_ms": {name: quantile(lags, share) * 1000 for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))},
            "live": sum(rank.presence is Presence.LIVE for rank in cluster.ranks.values()),
            "applied": self._applied.count if self._applied else 0,
            "steps": sum(
                rank_runtime.beat.step
                for rank_runtime in cluster.runtime.ranks.values()
                if rank_runtime.beat is not None
            ),
            "refused": dict(self._weaver.health.refused),
            "reunion": cluster.runtime.reunion,
        }


class BareHost:
    """The least that a Python process can do with the same messages: count them."""

    def __init__(self) -> None:
        self.count = 0
        self.dropped = 0

    async def listen(self, client: Client) -> None:
        await client.subscribe(BEAT.pattern(), cb=self._on_beat)
        await client.flush()

    async def _on_beat(self, _message: Msg) -> None:
        self.count += 1

    async def until(self, order: Answer) -> Answer:
        """When this many have been counted, from zero."""
        expected = self.count + int(order["count"])
        return await _when(lambda: self.count >= expected, order) | {"dropped": self.dropped}

    async def on_error(self, _error: Exception) -> None:
        self.dropped += 1


def _chain(waiting: object) -> Iterator[str]:
    """What a coroutine waits for, and what that waits for, and so on."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        yield f"{getattr(waiting, '__qualname__', waiting)}:{frame.f_lineno if frame else ''}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)


async def _when(done: Callable[[], bool], order: Answer) -> Answer:
    """The moment, and the CPU time it took this process to get there."""
    deadline = time.perf_counter() + float(order["patience"])
    used = time.process_time()
    while not done():
        if time.perf_counter() > deadline:
            return {"at": None}
        await asyncio.sleep(LOOK_SECONDS)
    return {"at": time.perf_counter(), "cpu": time.process_time() - used}


async def host_weaver(settings: Settings, applied: Applied | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        weaver = await begin(settings, stack, takeover=False)
        service = asyncio.create_task(weaver.run())
        host = WeaverHost(weaver, applied)
        known = (host.until, host.begin, host.fare, host.where)
        orders = asyncio.create_task(obey({order.__name__: order for order in known}))
        await asyncio.wait({service, orders}, return_when=asyncio.FIRST_COMPLETED)
        service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await service


async def host_bare(settings: Settings) -> None:
    host = BareHost()
    client = await connect(find(settings, Role.WEAVER), name="bare", keep_trying=True, on_error=host.on_error)
    await host.listen(client)
    await obey({"until": host.until})
    await client.close()


def main() -> None:
    kind = sys.argv[1]
    settings = Settings.from_env()
    # As in torchloom.weaver.main.run: what it says costs time too.
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    if kind == "bare":
        asyncio.run(host_bare(settings))
        return
    applied = Applied() if kind == "counted-weaver" else None
    if applied:
        applied.install()
    asyncio.run(host_weaver(settings, applied))


if __name__ == "__main__":
    main()
