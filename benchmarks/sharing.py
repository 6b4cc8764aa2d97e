"""Jobs that share the loaders of a node: real processes, live resizes, and what each rule of sharing makes of them.

An agent with a loader budget starts jobs that arrive one after the other. Loading a sample takes time, 20 ms for
example, and so does a step. Compared in the same run: an even split fixed by the number of jobs in the file (`static`),
an even split among the jobs that run (`even`), the numbers in the file (`requested`), torchloader's rule with its
restarts, and ours. Throughput is Σ samples / (finish − arrival); a job arrives when it is submitted, so the start of
its processes counts.

What is emulated: loading and training sleep, so loaders do not compete for cores. torchloader's rule is our reading of
it, and knows the true curves. To resize a job, this process stops it cleanly and starts it again from its position.
That costs a stop, a start, and a first batch, without CUDA, a model or lost steps. The start is short if the agent has
a process ready, and takes seconds if a job that arrived has just taken it: `restart_seconds_p50` and `_max`.

`paper_fraction_of_best`: the mean T/G of a running job in the mix of three architectures, compared with a simulation in
which all allocations are tried at each arrival and departure, with the true curves, resizes that take no time, and the
starts of processes as they were measured. `tpm_mape`: two numbers of loaders are tried, then others are predicted, and
only then measured. `resize_seconds_lost`: after each live resize, compared with the slower of both paces.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plane import plane
from benchmarks.report import finish, table
from benchmarks.sharing_mixes import ARCHITECTURES, HUNGRY, Mix, simulate_best
from benchmarks.sharing_prediction import Prediction, predict_held_out
from benchmarks.sharing_runs import RULES, Run, run_mix, shared_node
from torchloom.settings import Settings

QUICK = 0.04
LIVE = ("even", "requested", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    with plane() as settings, tempfile.TemporaryDirectory() as folder:
        runs, predictions = asyncio.run(measure(settings, Path(folder), args.quick))
    finish("sharing", figures(runs, predictions))


async def measure(settings: Settings, folder: Path, quick: bool) -> tuple[dict[Mix, list[Run]], list[Prediction]]:
    """The mix of three architectures without `static`: its file requests the even split."""
    plans = {HUNGRY.scaled(QUICK): ("even", "ours")} if quick else {HUNGRY: RULES, ARCHITECTURES: RULES[1:]}
    runs: dict[Mix, list[Run]] = {mix: [] for mix in plans}
    async with shared_node(settings, folder, HUNGRY.budget) as node:
        for mix, rules in plans.items():
            print(f"\n{mix.title}, {mix.budget} loaders", flush=True)
            for rule in rules:
                runs[mix].append(await run_mix(node, mix, rule))
                _show(runs[mix][-1])
        return runs, [] if quick else await predict_held_out(node)


def _show(run: Run) -> None:
    starts = ", ".join(f"{each.start_seconds:.1f}" for each in run.jobs)
    print(f"  {run.rule:12}{run.throughput:7.1f} samples/s{run.makespan:7.1f} s  (starts {starts} s)", flush=True)
    first = min(each.arrived for each in run.jobs)
    for each in run.jobs:
        moves = " ".join(f"{at - first:.1f}:{after}" for at, _, after in each.resizes())
        print(f"    {each.job.name:10} {each.arrived - first:5.1f} to {each.finished - first:5.1f} s, loaders "
              f"{each.batches[0].loaders} {moves}", flush=True)  # fmt: skip


def figures(runs: dict[Mix, list[Run]], predictions: Sequence[Prediction]) -> dict[str, object]:
    for mix, each in runs.items():
        _table(mix, each)
    hungry, *others = runs.values()
    of = {run.rule: run for run in hungry}
    ours, even = of["ours"], of["even"]
    found: dict[str, object] = {
        "throughput_gain": ours.throughput / even.throughput - 1,
        "makespan_gain": 1 - ours.makespan / even.makespan,
        **{f"throughput_gain_over_{rule}": ours.throughput / of[rule].throughput - 1 for rule in of if rule != "ours"},
    }
    if others:
        found |= _of_architectures({run.rule: run for run in others[0]})
    records = [record for each in runs.values() for run in each for record in run.jobs]
    counts = [record.lost_and_repeated() for record in records]
    live = [record for each in runs.values() for run in each if run.rule in LIVE for record in run.jobs]
    restarts = [seconds for record in records for seconds in record.restarts]
    found |= {
        "lost": sum(lost for lost, _ in counts),
        "repeated": sum(repeated for _, repeated in counts),
        "resizes": sum(len(record.resizes()) for record in live),
        "resize_seconds_lost": sum(record.resize_seconds_lost() for record in live),
        "restarts": len(restarts),
        "restart_seconds_p50": statistics.median(restarts) if restarts else math.nan,
        "restart_seconds_max": max(restarts, default=math.nan),
        "start_seconds_p50": statistics.median(record.start_seconds for record in records),
    }
    if predictions:
        rows = [(p.job, p.loaders, p.predicted, p.measured, f"{p.error:.1%}") for p in predictions]
        table("predictions, samples/s", [("", "loaders", "predicted", "measured", "error"), *rows])
        found["tpm_mape"] = statistics.fmean(p.error for p in predictions)
    return found


def _of_architectures(of: dict[str, Run]) -> dict[str, object]:
    ours = of["ours"]
    best = simulate_best(ARCHITECTURES, {each.job.name: each.start_seconds for each in ours.jobs})
    spans = {job.name: best.finished[job.name] - job.arrival for job in ARCHITECTURES.jobs}
    share = sum(job.samples / job.ceiling for job in ARCHITECTURES.jobs) / sum(spans.values())
    throughput = sum(job.samples / spans[job.name] for job in ARCHITECTURES.jobs)
    table(
        "compared with all allocations tried",
        [("", "mean T/G", "samples/s"), ("best, simulated", share, throughput)]
        + [(rule, run.mean_share, run.throughput) for rule, run in of.items()],
    )
    return {
        "paper_fraction_of_best": ours.mean_share / share,
        "paper_throughput_of_best": ours.throughput / throughput,
        **{f"paper_{rule}_of_best": run.mean_share / share for rule, run in of.items() if rule != "ours"},
        "gain_over_torchloader": ours.throughput / of["torchloader"].throughput - 1,
        "paper_gain_over_even": ours.throughput / of["even"].throughput - 1,
    }


def _table(mix: Mix, runs: Sequence[Run]) -> None:
    head = ("", "samples/s", "makespan s", "mean T/G", "resizes", "lost in them s", "restarts s", "over budget")
    rows = [
        (
            run.rule, run.throughput, run.makespan, run.mean_share, sum(len(each.resizes()) for each in run.jobs),
            sum(each.resize_seconds_lost() for each in run.jobs) if run.rule in LIVE else math.nan,
            sum(sum(each.restarts) for each in run.jobs), run.excess(mix.budget),
        )
        for run in runs
    ]  # fmt: skip
    table(f"{mix.title}, {mix.budget} loaders; over budget in loaders × s", [head, *rows])


if __name__ == "__main__":
    main()
