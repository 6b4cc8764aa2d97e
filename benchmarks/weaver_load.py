"""What one weaver takes: how many beats a second at most, and how it fares with ten thousand ranks at one a second.

Throughput: a thousand ranks that have joined send bursts, in turn to a freshly started weaver and to a freshly started
bare nats-py subscriber, on the same server, the same messages from the same process. A burst stays below every limit
at which server or client would drop something, so the receiver sets the pace and nothing may be missing.

Fleet: every rank has a connection of its own. Lost are ranks that were ever called so, and beats sent but not applied.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from nats.aio.msg import Msg

from benchmarks.plane import environment, server
from benchmarks.puppet import Answer, Puppet, puppet
from benchmarks.receivers import LagProbe
from benchmarks.report import finish, quantile, table
from torchloom.bus.connection import connect, find
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.records import IncidentOpened, RankLost
from torchloom.protocol.subjects import LOG, Role
from torchloom.settings import Settings

FLOOD_RANKS = 1000
BURST = 50
"""Beats of each rank in one burst: 50,000 in all, 20 MB. The server cuts a receiver off at 64 MB behind."""
BURSTS = 3
"""Measured per life of a receiver."""
WARM_BURST = 5
PATIENCE = 60.0
CUTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weaver_load", description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000, help="in the fleet (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="the fleet beats (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of weaver and bare (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    ranks, seconds, rounds = (500, 5.0, 1) if args.quick else (args.ranks, args.seconds, args.rounds)
    with server() as (settings, _):
        figures = throughput(settings, rounds)
    with server() as (settings, embedded):
        assert embedded.process is not None
        figures |= asyncio.run(fleet(settings, embedded.process.pid, ranks, seconds))
    finish("weaver_load", figures)


# ── throughput ───────────────────────────────────────────────────────────────────────────────────────────────────────


def throughput(settings: Settings, rounds: int) -> dict[str, object]:
    rates: dict[str, list[float]] = {"weaver": [], "bare": []}
    cpu: dict[str, list[float]] = {"weaver": [], "bare": []}
    with puppet("benchmarks.fleet", str(FLOOD_RANKS), env=environment(settings)) as crowd:
        with _receiver("weaver", settings):
            crowd.ask("join")
            step = int(crowd.ask("pause")["step"])
        for _ in range(rounds):
            for kind, found in rates.items():
                with _receiver(kind, settings) as receiver:
                    if kind == "weaver":
                        _until_settled(receiver, FLOOD_RANKS)
                    for beats in (WARM_BURST, *[BURST] * BURSTS):
                        per_second, microseconds = _burst(crowd, receiver, step, beats)
                        step += beats
                        if beats == BURST:
                            found.append(per_second)
                            cpu[kind].append(microseconds)
    rate = {kind: statistics.median(v) for kind, v in rates.items()}
    used = {kind: statistics.median(v) for kind, v in cpu.items()}
    bursts = len(rates["bare"])
    table(
        f"bursts of {BURST * FLOOD_RANKS:,} beats from {FLOOD_RANKS:,} ranks, {bursts} each, none lost",
        [
            ("", "beats/s p50", "min", "max", "CPU µs/beat"),
            *((kind, rate[kind], min(v), max(v), used[kind]) for kind, v in rates.items()),
            ("weaver to bare", rate["weaver"] / rate["bare"], "", "", used["bare"] / used["weaver"]),
        ],
    )
    return {
        "ratio_to_bare": rate["weaver"] / rate["bare"],
        "beats_per_s": rate["weaver"],
        "bare_per_s": rate["bare"],
        "ratio_by_cpu": used["bare"] / used["weaver"],
        "cpu_us_per_beat": used["weaver"],
        "bare_cpu_us_per_beat": used["bare"],
        "bursts": bursts,
    }


@contextlib.contextmanager
def _receiver(kind: str, settings: Settings) -> Iterator[Puppet]:
    # A new weaver waits for ranks to reconnect before it calls the roll. Here all are there, so not for long.
    env = environment(settings, **({"TORCHLOOM_REUNION_SECONDS": "0.3"} if kind != "counted-weaver" else {}))
    log = Path(settings.state) / "logs" / "weaver.log"
    with log.open("ab") as stderr, puppet("benchmarks.receivers", kind, env=env, stderr=stderr) as found:
        try:
            yield found
        except RuntimeError:
            said = [line for line in log.read_text(errors="replace").splitlines() if " joined from " not in line]
            print(f"exit code {found.process.poll()}; {log} ends with", *said[-20:], sep="\n  ", file=sys.stderr)
            if found.process.poll() is None:
                print("its tasks wait in", *found.ask("where")["tasks"], sep="\n  ", file=sys.stderr)
            raise


def _until_settled(receiver: Puppet, ranks: int) -> Answer:
    """The roll has been called and everyone was there."""
    deadline = time.monotonic() + PATIENCE
    while (state := receiver.ask("fare"))["reunion"] or state["live"] != ranks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the weaver does not see {ranks} ranks: {state}")
        time.sleep(0.05)
    return state


def _burst(crowd: Puppet, receiver: Puppet, step: int, beats: int) -> tuple[float, float]:
    """Beats a second from the first byte sent to the last beat taken in, and the receiver's CPU µs for each."""
    receiver.tell("until", step=step + beats, count=beats * FLOOD_RANKS, patience=PATIENCE)
    time.sleep(0.05)  # it listens
    began = crowd.ask("flood", step=step + beats)["began"]
    end = receiver.hear()
    if end["at"] is None or end.get("dropped") or end.get("refused"):
        raise RuntimeError(f"{receiver.name}: beats were lost: {end}")
    time.sleep(0.05)
    count = beats * FLOOD_RANKS
    return count / float(end["at"] - began), 1e6 * float(end["cpu"]) / count


# ── fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class LogReader:
    """What a viewer hears of losses."""

    def __init__(self) -> None:
        self.lost = 0
        self.incidents: dict[str, float] = {}
        """By the rank that each is about: when it was heard of."""

    async def hear(self, message: Msg) -> None:
        at = time.perf_counter()
        for record in decode_entry(message.data).records:
            if isinstance(record, RankLost):
                self.lost += 1
            elif isinstance(record, IncidentOpened):
                self.incidents.setdefault(str(record.about.rank), at)


async def fleet(settings: Settings, server_pid: int, ranks: int, seconds: float) -> dict[str, object]:
    log = LogReader()
    with _receiver("counted-weaver", settings) as weaver, _crowd(settings, ranks) as crowd:
        viewer = await connect(find(settings, Role.VIEWER), name="benchmark")
        await viewer.subscribe(LOG.template, cb=log.hear)
        await viewer.flush()
        await asyncio.to_thread(weaver.ask, "begin")
        joined = await asyncio.to_thread(crowd.ask, "join")
        joining = await asyncio.to_thread(_until_settled, weaver, ranks)
        print(f"\n{ranks:,} ranks joined in {joined['seconds']:.1f} s; beating for {seconds:g} s", flush=True)
        others = [psutil.Process(server_pid), psutil.Process(crowd.process.pid)]
        await asyncio.sleep(1)
        await asyncio.to_thread(weaver.ask, "begin")
        before = [sum(process.cpu_times()[:2]) for process in others]
        idle = LagProbe()  # what this machine does to a loop that has nothing to do
        probing = asyncio.create_task(idle.run())
        await asyncio.sleep(seconds)
        probing.cancel()
        fared = await asyncio.to_thread(weaver.ask, "fare")
        shares = [(sum(p.cpu_times()[:2]) - b) / seconds for p, b in zip(others, before, strict=True)]
        sent = await asyncio.to_thread(crowd.ask, "pause")
        await asyncio.sleep(1)  # what is under way arrives; nobody is missed for so short a silence
        final = await asyncio.to_thread(weaver.ask, "fare")
        unapplied = max(sent["sent"] - final["applied"], sent["sent"] - final["steps"])
        lost = log.lost
        await asyncio.to_thread(crowd.ask, "resume")
        detected = await _cut_some(crowd, log, ranks)
        await viewer.close()
    return _fleet_figures(ranks, joined, joining, fared, final, sent, lost, unapplied, detected, shares, idle.lags)


@contextlib.contextmanager
def _crowd(settings: Settings, ranks: int) -> Iterator[Puppet]:
    with puppet("benchmarks.fleet", str(ranks), env=environment(settings)) as crowd:
        yield crowd


async def _cut_some(crowd: Puppet, log: LogReader, ranks: int) -> list[float]:
    """Milliseconds from a connection's sudden end to the incident, while all others go on beating."""
    await asyncio.sleep(2)
    detected = []
    for number in range(CUTS):
        cut = await asyncio.to_thread(crowd.ask, "cut", number=(number * 997) % ranks)
        deadline = time.monotonic() + 10
        while cut["rank"] not in log.incidents and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        detected.append((log.incidents.get(cut["rank"], float("nan")) - cut["began"]) * 1000)
        await asyncio.sleep(0.13)
    return detected


def _fleet_figures(
    ranks: int, joined: Answer, joining: Answer, fared: Answer, final: Answer, sent: Answer, lost: int,
    unapplied: int, detected: list[float], shares: list[float], idle: list[float],
) -> dict[str, object]:  # fmt: skip
    figures: dict[str, object] = {
        "ranks": final["live"],
        "lost": lost + unapplied + sent["closed"] + sum(final["refused"].values()),
        "loop_lag_ms_p99": fared["lag_ms"]["p99"],
        "loop_lag_ms_p50": fared["lag_ms"]["p50"],
        "loop_lag_ms_max": fared["lag_ms"]["max"],
        "idle_loop_lag_ms_p99": quantile(idle, 0.99) * 1000,
        "cpu_share": fared["cpu_share"],
        "rss_mb": fared["rss_mb"],
        "detect_under_load_ms_p50": statistics.median(detected),
        "detect_under_load_ms_max": max(detected),
        "beats": sent["sent"],
        "join_seconds": joined["seconds"],
        "join_lag_ms_p99": joining["lag_ms"]["p99"],
        "join_lag_ms_max": joining["lag_ms"]["max"],
        "server_cpu_share": shares[0],
        "generator_cpu_share": shares[1],
        "generator_late_ms": sent["late_ms"],
    }
    table(
        f"{ranks:,} ranks, a connection each, one beat a second",
        [
            ("live, as the weaver sees it", figures["ranks"]),
            ("ranks called lost / beats not applied / refused", f"{lost} / {unapplied} / {final['refused'] or 0}"),
            ("beats sent", figures["beats"]),
            ("loop lag p50 / p99 / max, ms", " / ".join(f"{fared['lag_ms'][k]:.1f}" for k in ("p50", "p99", "max"))),
            ("  of an idle loop at the same time, p99, ms", figures["idle_loop_lag_ms_p99"]),
            ("  while they joined, p99 / max, ms", f"{joining['lag_ms']['p99']:.1f} / {joining['lag_ms']['max']:.1f}"),
            ("CPU of weaver / server / generator", " / ".join(f"{s:.0%}" for s in (fared["cpu_share"], *shares))),
            ("memory of the weaver, MB", fared["rss_mb"]),
            ("a cut connection → incident, p50 / max, ms", f"{statistics.median(detected):.1f} / {max(detected):.1f}"),
        ],
    )
    return figures


if __name__ == "__main__":
    main()
