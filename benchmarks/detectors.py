"""How many events a second the core takes with all detectors on, and how often these are right.

Events: beats of many ranks through `Engine.hear`, where each rank's senses hear it, and `Engine.handle` where that is
news.

Right: jobs of four ranks are played from steps of a real training loop recorded in this run, on the machine as it is
and with all cores busy (traces.py). Into each job one thing is put, at a place and of a size by seed. Faults:

    hang        one rank makes no step for 5 to 60 s                       found within 6 beats, that rank singled out
    straggler   one rank needs 1.65 to 5 times as long                     16 beats, that rank
    slowdown    all need 1.65 to 4 times as long                           16 beats, all ranks
    not_finite  the loss of one rank is NaN                                1 beat, that rank
    loss_spike  the loss is 2 to 10 times as high (and 12 of its spreads)  4 beats, that rank
    memory      grows so that the machine is full in 100 to 500 s          80 beats, that rank
    starved     60 to 95 % of each step is waiting for data                16 beats, all ranks
    plateau     the loss stays where it is, with up to 3 % of noise        3,900 beats, all ranks

or something harmless: an evaluation of 5 to 120 s, announced or not, garbage collections of up to 1.6 s, stray losses,
a one-time growth of memory, a loss that falls by only 2 to 10 % in a thousand beats, nothing at all. The first step is
always slow. Smaller faults are not counted as such: the thresholds are 1.5 (straggler, slowdown) and 50 % (starved),
and right at them it is a matter of luck.

A finding of another kind, of another rank, or before the fault is false; except that a straggler and starvation slow
all ranks down, and that an unannounced evaluation may be taken for a hang, but only the first two times and only to be
told: that it would have been acted on is always false. A fault is missed if it is not found in time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from benchmarks.plane import die_tidily
from benchmarks.report import finish, quantile, table
from benchmarks.traces import BENIGN, FAULTS, LIFE, RANKS, Step, Trace, record, stretched
from torchloom.core.detect.hang import HangDiagnosis, HangTracker, RankProgress
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.detect.straggler import StragglerDetector
from torchloom.core.engine import Engine
from torchloom.core.events import ReportReceived
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat, Hello, StepTimes
from torchloom.settings import Settings

BOUND = {
    "hang": 6, "straggler": 16, "slowdown": 16, "not_finite": 1, "loss_spike": 4, "memory": 80, "starved": 16,
    "plateau": 3900,
}  # fmt: skip
"""Beats after the fault began within which it must be found."""
NEW_HABIT = 2
"""Times that an unannounced evaluation may be told of."""
STRETCHES = 8
SETTINGS = Settings()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detectors", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of places and sizes (default: %(default)s)")
    parser.add_argument("--traces", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="of each recording (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1000, help="that beat for the rate (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    die_tidily()
    traces, seconds = (2, 3.0) if args.quick else (args.traces, args.seconds)
    figures = rate(args.ranks, 10 if args.quick else 60, args.seed)
    records = {"idle": record(seconds, loaded=False), "loaded": record(seconds, loaded=True)}
    figures |= judged(records, traces, args.seed)
    finish("detectors", figures)


# ── how many ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rate(ranks: int, rounds: int, seed: int) -> dict[str, object]:
    """Events through the core in a second of one process."""
    engine = Engine(ClusterState(SETTINGS))
    names = [RankId(f"job{n // 64}", "r", n % 64) for n in range(ranks)]
    for name in names:
        hello = Hello(incarnation=LIFE, node="node", pid=1, devices=("GPU-1",))
        engine.handle(ReportReceived(name, hello), 0.0)
    chance = random.Random(seed)
    beats = [[_usual(chance, n) for n in range(STRETCHES * rounds)] for _ in range(16)]
    rates, by_cpu, news = [], [], 0
    for stretch in range(STRETCHES):
        began, used = time.perf_counter(), time.process_time()
        for n in range(stretch * rounds, (stretch + 1) * rounds):
            for number, name in enumerate(names):
                if (event := engine.hear(name, beats[number % 16][n], float(n))) is not None:
                    news += 1
                    engine.handle(event, float(n))
        rates.append(ranks * rounds / (time.perf_counter() - began))
        by_cpu.append(ranks * rounds / (time.process_time() - used))
    table(
        f"events through the core: beats of {ranks:,} ranks with loss, gradient norm, own and data times",
        [
            ("", "p50", "min", "max"),
            ("events/s", statistics.median(rates), min(rates), max(rates)),
            ("events per second of CPU", statistics.median(by_cpu), min(by_cpu), max(by_cpu)),
        ],
    )
    return {
        "events_per_s": statistics.median(rates),
        "events_per_s_max": max(rates),
        "events_per_cpu_s": statistics.median(by_cpu),
        "news": news,
    }


def _usual(chance: random.Random, number: int) -> Beat:
    """Of a rank in which everything that can be watched is."""
    p50 = 0.1 * chance.lognormvariate(0.0, 0.03)
    p99 = p50 * chance.uniform(1.1, 1.5)
    return Beat(
        incarnation=LIFE,
        step=10 * number,
        times=StepTimes(count=10, p50=p50, p99=p99, longest=p99, own=0.9 * p50, data=0.05 * p50),
        loss=2.0 * chance.lognormvariate(0.0, 0.05),
        samples_per_second=320.0,
        metrics={"grad_norm": chance.lognormvariate(0.0, 0.3), "lr": 0.1},
        rss_mb=20_000.0 + chance.gauss(0.0, 20.0),
        device_mb=40_000.0,
        free_mb=40_000.0,
        device_free_mb=20_000.0,
        collectives=20 * number,
    )


# ── how right ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Tally:
    right: int = 0
    missed: int = 0
    false: Counter[str] = field(default_factory=Counter)
    delays: list[int] = field(default_factory=list)

    def take(self, trace: Trace) -> None:
        found = play(trace)
        expected = trace.expected
        first = {key: beat for beat, *key_parts in reversed(found) if (key := (key_parts[0], key_parts[1])) in expected}
        late = [beat - trace.at for beat in first.values()]
        if expected:
            if first.keys() == expected and all(0 <= delay <= BOUND[trace.kind] for delay in late):
                self.right += 1
                self.delays.append(max(late))
            else:
                self.missed += 1
        habits = 0
        for beat, kind, rank in found:
            if (kind, rank) in expected and beat >= trace.at:
                continue
            if trace.follows(kind, rank) and beat >= trace.at:
                continue
            if trace.kind == "evaluation" and kind == "hang" and habits < NEW_HABIT:
                habits += 1
                continue
            self.false[kind] += 1


def play(trace: Trace) -> list[tuple[int, str, int]]:
    """(beat, kind, rank) of all that is found to begin; rank -1: nobody was singled out."""
    detectors = [RankDetectors(SETTINGS) for _ in range(RANKS)]
    case, race, found = HangTracker(), StragglerDetector[int](), list[tuple[int, str, int]]()
    hanging: HangDiagnosis | None = None
    for now, said in trace.beats():
        beat = int(now)
        for rank, (sense, one) in enumerate(zip(detectors, said, strict=True)):
            found += [(beat, finding.kind, rank) for finding in sense.hear(one, now) if not finding.over]
        own = {rank: sense.own for rank, sense in enumerate(detectors)}
        found += [(beat, finding.kind, rank) for rank, finding in race.look(own, SETTINGS) if not finding.over]
        verdict = case.look([_stand(*each) for each in enumerate(zip(said, detectors, strict=True))], SETTINGS, now)
        if verdict is not None and (hanging is None or verdict.culprits != hanging.culprits):
            found += [(beat, verdict.kind, rank) for rank in verdict.culprits or (-1,)]
        if verdict is not None and trace.kind != "hang" and verdict.seconds >= verdict.act_after:
            found.append((beat, "acted", -1))
        hanging = verdict
    return found


def _stand(rank: int, heard: tuple[Beat, RankDetectors]) -> RankProgress:
    said, detectors = heard
    pace = detectors.pace
    return RankProgress(
        rank, said.step, said.idle_seconds, phase=said.phase, collectives=said.collectives,
        limit=pace.limit(SETTINGS), started=pace.started, pause=pace.pause,
    )  # fmt: skip


def judged(records: dict[str, list[Step]], count: int, seed: int) -> dict[str, object]:
    tallies: dict[str, Tally] = defaultdict(Tally)
    played = {load: stretched(steps) for load, steps in records.items()}
    for number in range(count):
        for kind in (*FAULTS, *BENIGN):
            for load, steps in played.items():
                place = f"{seed} {number} {load}"
                tallies[kind].take(Trace(kind, random.Random(place).randrange(2**32), steps))
    right = sum(tally.right for tally in tallies.values())
    missed = sum(tally.missed for tally in tallies.values())
    false = sum((tally.false for tally in tallies.values()), Counter[str]())
    _tell(records, tallies, false)
    return {
        "precision": right / (right + false.total()) if right else 0.0,
        "recall": right / (right + missed),
        "faults": right + missed,
        "false": false.total(),
        "harmless": 2 * count * len(BENIGN),
        "acted_wrongly": false["acted"],
    }


def _tell(records: dict[str, list[Step]], tallies: dict[str, Tally], false: Counter[str]) -> None:
    rows: list[tuple[object, ...]] = [("recorded", "steps", "p50 ms", "p99 ms", "longest ms")]
    for load, steps in records.items():
        whole = [1000 * (data + own) for data, own in steps]
        rows.append((load, len(whole), statistics.median(whole), quantile(whole, 0.99), max(whole)))
    table("steps of a real training loop", rows)
    rows = [("fault", "put in", "found", "beats p50", "max", "other findings in these jobs")]
    for kind in FAULTS:
        tally = tallies[kind]
        late = tally.delays or [-1]
        put = tally.right + tally.missed
        rows.append((kind, put, tally.right, int(statistics.median(late)), max(late), _named(tally.false)))
    table("faults", rows)
    rows = [("what happened", "false findings")]
    table("harmless", [*rows, *((kind, _named(tallies[kind].false)) for kind in BENIGN), ("all jobs", _named(false))])


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "none"


if __name__ == "__main__":
    main()
