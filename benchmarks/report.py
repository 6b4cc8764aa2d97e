"""How a benchmark says what it found: a table for people, a JSON object as the last line for machines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Figures = Mapping[str, object]


@dataclass(frozen=True)
class Target:
    """What a figure has to be for the promise to hold."""

    key: str
    sign: str
    """"<=" or ">="."""
    bound: float

    def met(self, figures: Figures) -> bool:
        value = figures.get(self.key)
        if not isinstance(value, (int, float)) or math.isnan(value):
            return False
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.sign == '<=' else '≥'} {self.bound:g}"


TARGETS: Mapping[str, tuple[Target, ...]] = {
    "step_overhead": (Target("p50_us", "<=", 5), Target("p99_us", "<=", 50), Target("slowdown", "<=", 1.01)),
    "detect": (Target("kills", ">=", 15), Target("over_pidfd_ms_p50", "<=", 5), Target("ratio", ">=", 2)),
    "detectors": (
        Target("events_per_s", ">=", 150_000),
        Target("precision", ">=", 0.98),
        Target("recall", ">=", 0.98),
        Target("acted_wrongly", "<=", 0),
    ),
    "weaver_load": (
        Target("ratio_to_bare", ">=", 0.6),
        Target("ranks", ">=", 10_000),
        Target("lost", "<=", 0),
        Target("loop_lag_ms_p99", "<=", 50),
    ),
    "control": (
        Target("changes", ">=", 200),
        Target("apply_ms_p50", "<=", 60),
        Target("steps_waited_p50", "<=", 2),
        Target("aborted_share", "<=", 0.01),
        Target("mismatches", "<=", 0),
        Target("fanout_1000_s", "<=", 0.5),
        Target("knob_read_ns", "<=", 200),
    ),
    "recover": (Target("kills", ">=", 5), Target("ratio_warm", ">=", 15), Target("ratio_cold", ">=", 0.95)),
    "hang": (
        Target("faults", ">=", 3),
        Target("sigstop_detect_s", "<=", 2),
        Target("gil_detect_s", "<=", 2),
        Target("resumed_s", "<=", 4),
        Target("false_kills", "<=", 0),
    ),
    "torchft_evict": (
        Target("kills", ">=", 10),
        Target("loom_s_p95", "<=", 0.5),
        Target("ratio", ">=", 10),
        Target("loom3_s_p95", "<=", 0.5),
        Target("rejoin_s_p50", "<=", 1.0),
        Target("step_ratio", "<=", 1.1),
    ),
    "checkpoint": (
        Target("ratio_to_torch_save", "<=", 0.15),
        Target("ratio_to_dcp_async", "<=", 0.9),
        Target("ratio_to_memcpy", "<=", 1.5),
        Target("durable_ratio_to_torch_save", "<=", 1.5),
        Target("flips_caught", ">=", 200),
        Target("verify_ratio", "<=", 0.5),
    ),
    "loader": (
        Target("images_ratio", ">=", 1.15),
        Target("tiny_ratio", ">=", 3),
        Target("nested_ratio", ">=", 3),
        Target("cpu_ratio", "<=", 0.85),
        Target("first_batch_ratio", "<=", 1.0),
        Target("next_epoch_ratio", "<=", 0.5),
        Target("next_epoch_fresh_ratio", "<=", 1.0),
        Target("resize_stall_batches", "<=", 1),
        Target("resizes", ">=", 87),
        Target("kills", ">=", 59),
        Target("lost", "<=", 0),
        Target("repeated", "<=", 0),
    ),
    "allocation": (
        Target("oracle_fraction_mean", ">=", 0.995),
        Target("oracle_fraction_min", ">=", 0.97),
        Target("decide_ms_1000_jobs", "<=", 150),
        Target("incremental_ms", "<=", 5),
    ),
    "sharing": (
        Target("throughput_gain", ">=", 0.29),
        Target("makespan_gain", ">=", 0.10),
        Target("paper_fraction_of_best", ">=", 0.9),
        Target("gain_over_torchloader", ">=", 0.001),
        Target("lost", "<=", 0),
        Target("repeated", "<=", 0),
        Target("tpm_mape", "<=", 0.10),
    ),
    "cluster_sim": (
        Target("gain_over_even", ">=", 0),
        Target("gain_over_torchloader", ">=", 0),
        Target("oracle_gap", "<=", 0.02),
        Target("seconds", "<=", 60),
    ),
}


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(title: str, rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they need; the first left, the others right."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts if i < len(row)) for i in range(max(map(len, texts)))]
    print(f"\n{title}")
    for row in texts:
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        print("  " + "  ".join([row[0].ljust(widths[0]), *others]).rstrip())


def verdicts(name: str, figures: Figures) -> list[tuple[str, object, str, str]]:
    """(key, value, target, met or MISSED) for each target of a benchmark."""
    return [(t.key, figures.get(t.key), str(t), "met" if t.met(figures) else "MISSED") for t in TARGETS[name]]


def finish(name: str, figures: dict[str, object]) -> None:
    """Judge, tell on what machine, and print the last line."""
    table("against the targets", verdicts(name, figures))
    load = os.getloadavg()
    figures |= {"benchmark": name, "cores": os.cpu_count(), "load_1m": round(load[0], 2)}
    print(f"\n  {os.cpu_count()} cores, load {load[0]:.1f} (1 min), {load[1]:.1f} (5 min)\n")
    print(json.dumps({key: _rounded(value) for key, value in figures.items()}), flush=True)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    return value


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return "-" if math.isnan(cell) else f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return "-" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)
