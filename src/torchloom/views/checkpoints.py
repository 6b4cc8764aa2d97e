"""The checkpoints of a folder, newest first, and which one a resume takes; and the result of a pruning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchloom.checkpoints.store.inventory import Entry, Inventory, text
from torchloom.checkpoints.store.manifest import folder_name
from torchloom.checkpoints.store.retention import Pruned
from torchloom.protocol.views import CheckpointsView
from torchloom.views.format.json_document import plain
from torchloom.views.format.numbers import ABSENT, size
from torchloom.views.format.tables import Cell, Column, Row, Screen, clean, table
from torchloom.views.format.times import ago, duration

_NAMED = 6
"""Checkpoints named in a sentence before the rest is only counted."""


def answer(
    found: Inventory, told: CheckpointsView | None, now: float, screen: Screen, *, here: bool = True
) -> list[str]:
    """Where they are, the table, what a resume takes, and what went wrong."""
    folder = clean(found.folder)
    lines = [f"{told.job} saves into {folder}", ""] if told and folder else []
    if found.entries:
        lines += [*checkpoints(found, now, screen), "", resume(found)]
    elif told and not folder:
        lines += [f"job {told.job} has reported no checkpoints"]
    else:
        lines += [f"no checkpoints in {folder}"]
    if told and folder and not here:
        lines += [f"the folder is on {clean(told.node)}: run `loom checkpoints --verify {folder}` there"]
    return lines + (failures(told, now) if told else [])


def checkpoints(found: Inventory, now: float, screen: Screen) -> list[str]:
    """Names are shown where the step does not tell them."""
    shown = [entry for entry in found.entries if entry.status not in {"writing", "abandoned"}]
    named = any(entry.name != folder_name(entry.step) for entry in shown)
    columns = [
        Column("STEP", right=True), *([Column("NAME", shrinks=True)] if named else []), Column("SIZE", right=True),
        Column("AGE", right=True), Column("TOOK", right=True), Column("KIND"), Column("STATE", shrinks=True),
    ]  # fmt: skip
    rows: list[Row] = [
        [
            f"{entry.step:,}",
            *([entry.name] if named else []),
            ABSENT if entry.status == "writing" else size(entry.size),
            duration(now - entry.created),
            ABSENT if entry.seconds is None else duration(entry.seconds),
            entry.kind or ABSENT,
            state(entry),
        ]
        for entry in found.entries
    ]
    return table(columns, rows, screen)


def state(entry: Entry) -> Cell:
    match entry.status:
        case "valid":
            return Cell("valid", "green")
        case "damaged":
            return Cell(entry.why, "red")
        case "writing":
            return Cell(f"being written, {size(entry.size)} so far", "cyan")
        case "abandoned":
            return Cell("left by a process that is gone", "yellow")
        case "rolled back":
            return Cell(f"rolled back{f' ({entry.why})' if entry.why else ''}", "yellow")
        case "reported":
            return Cell(f"reported by {entry.node or 'a rank'}")
    return Cell(entry.status)


def resume(found: Inventory) -> str:
    """Which one would be taken, in a sentence."""
    chosen = found.resume
    if chosen is None:
        return "none of them is whole: a resume would find nothing" if found.finished else "nothing to resume from yet"
    name = clean(chosen.name)
    if not found.verified:
        return f"a resume would take {name}; with --verify this is certain"
    newer = found.finished.index(chosen)
    return f"a resume takes {name}" + (f": {newer:,} newer {'is' if newer == 1 else 'are'} damaged" if newer else "")


def failures(told: CheckpointsView, now: float) -> list[str]:
    """What could not be written."""
    if told.failed is None:
        return []
    last = told.failed
    times = f"{told.failures:,} time{'' if told.failures == 1 else 's'}"
    return [f"saving failed {times}, the last at step {last.step:,}, {ago(last.at, now)}: {clean(last.why)}"]


def surveyed(found: Inventory, told: CheckpointsView | None) -> dict[str, Any]:
    """The same for a program; what only a job knows is empty for a folder."""
    return {
        "job": told.job if told else None,
        "node": told.node if told else None,
        "folder": found.folder,
        "verified": found.verified,
        "resume": found.resume.name if found.resume else None,
        "checkpoints": plain(found.entries),
        "failures": told.failures if told else 0,
        "failed": plain(told.failed) if told else None,
    }


def question(pruned: Pruned, folder: str) -> str:
    return (
        f"this will delete {_count(pruned)} in {clean(folder)} and free {size(pruned.bytes)}: {_names(pruned.deleted)}"
    )


def pruned(done: Pruned, folder: str, dry_run: bool) -> list[str]:
    if done.deleted:
        did = ("would delete", "free") if dry_run else ("deleted", "freed")
        lines = [f"{did[0]} {_count(done)} in {clean(folder)} and {did[1]} {size(done.bytes)}"]
    else:
        lines = [f"nothing to delete in {clean(folder)}"]
    lines += [f"  {clean(name)}" for name in done.deleted]
    return lines + [f"spared {clean(name)}: {clean(why)}" for name, why in done.spared.items()]


def pruned_document(done: Pruned, folder: str, dry_run: bool) -> dict[str, Any]:
    return {
        "folder": text(folder),
        "dry_run": dry_run,
        "deleted": done.deleted,
        "freed": done.bytes,
        "spared": done.spared,
    }


def _count(pruned: Pruned) -> str:
    return f"{len(pruned.deleted):,} checkpoint{'' if len(pruned.deleted) == 1 else 's'}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(clean, names[:_NAMED]))
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED:,} more"
