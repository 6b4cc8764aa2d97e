"""The checkpoints of a folder, newest first, and which one a resume takes; and the result of a pruning."""

from __future__ import annotations

from typing import Any

from torchloom.checkpoints.store.inventory import Entry, Inventory, text
from torchloom.checkpoints.store.manifest import folder_name
from torchloom.checkpoints.store.retention import Pruned
from torchloom.protocol.views import CheckpointsView
from torchloom.views.format.json_document import plain
from torchloom.views.format.numbers import ago, duration, size
from torchloom.views.format.tables import Cell, Column, Screen, clean, table
from torchloom.views.wording.phrases import names

_STYLES = {"valid": "green", "damaged": "red", "writing": "cyan", "abandoned": "yellow", "rolled back": "yellow"}
_NAMED = 6
"""Checkpoints named in a sentence before the rest is only counted."""


def answer(
    inventory: Inventory, report: CheckpointsView | None, now: float, screen: Screen, *, here: bool = True
) -> list[str]:
    """Where they are, the table, what a resume takes, and what went wrong."""
    folder = clean(inventory.folder)
    lines = [f"{report.job} saves into {folder}", ""] if report and folder else []
    if inventory.entries:
        lines += [*checkpoints(inventory, now, screen), "", resume(inventory)]
    elif report and not folder:
        lines += [f"job {report.job} has reported no checkpoints"]
    else:
        lines += [f"no checkpoints in {folder}"]
    if report and folder and not here:
        where = f"on {clean(report.node)}:" if report.node else "not here; if another machine has it,"
        lines += [f"the folder is {where} run `loom checkpoints --verify {folder}` there"]
    if report and report.failed is not None:
        last, times = report.failed, f"{report.failures:,} time{'' if report.failures == 1 else 's'}"
        lines += [f"saving failed {times}, the last at step {last.step:,}, {ago(last.at, now)}: {clean(last.why)}"]
    return lines


def checkpoints(inventory: Inventory, now: float, screen: Screen) -> list[str]:
    """Names are shown where the step does not tell them."""
    columns: list[Column[Entry]] = [
        Column("STEP", lambda entry: f"{entry.step:,}", right=True),
        Column("SIZE", lambda entry: None if entry.status == "writing" else size(entry.size), right=True),
        Column("AGE", lambda entry: duration(now - entry.created), right=True),
        Column("TOOK", lambda entry: None if entry.seconds is None else duration(entry.seconds), right=True),
        Column("KIND", lambda entry: entry.kind),
        Column("STATE", state, shrinks=True),
    ]
    shown = [entry for entry in inventory.entries if entry.status not in {"writing", "abandoned"}]
    if any(entry.name != folder_name(entry.step) for entry in shown):
        columns.insert(1, Column("NAME", lambda entry: entry.name, shrinks=True))
    return table(columns, inventory.entries, screen)


def state(entry: Entry) -> Cell:
    texts = {
        "damaged": entry.why,
        "writing": f"being written, {size(entry.size)} so far",
        "abandoned": "left by a process that is gone",
        "rolled back": f"rolled back{f' ({entry.why})' if entry.why else ''}",
        "reported": f"reported by {entry.node or 'a rank'}",
    }
    return Cell(texts.get(entry.status, entry.status), _STYLES.get(entry.status, ""))


def resume(inventory: Inventory) -> str:
    """Which one would be taken, in a sentence."""
    chosen = inventory.resume
    if chosen is None:
        none_whole = "none of them is whole: a resume would find nothing"
        return none_whole if inventory.finished else "nothing to resume from yet"
    name = clean(chosen.name)
    if not inventory.verified:
        return f"a resume would take {name}; with --verify this is certain"
    newer = inventory.finished.index(chosen)
    return f"a resume takes {name}" + (f": {newer:,} newer {'is' if newer == 1 else 'are'} damaged" if newer else "")


def surveyed(inventory: Inventory, report: CheckpointsView | None) -> dict[str, Any]:
    """The same for a program; what only a job knows is empty for a folder."""
    return {
        "job": report.job if report else None,
        "node": report.node if report else None,
        "folder": inventory.folder,
        "verified": inventory.verified,
        "resume": inventory.resume.name if inventory.resume else None,
        "checkpoints": plain(inventory.entries),
        "failures": report.failures if report else 0,
        "failed": plain(report.failed) if report else None,
    }


def question(pruned: Pruned, folder: str) -> str:
    deleted = names(map(clean, pruned.deleted), _NAMED)
    return f"this will delete {_count(pruned)} in {clean(folder)} and free {size(pruned.bytes)}: {deleted}"


def pruned(done: Pruned, folder: str, dry_run: bool) -> list[str]:
    if done.deleted:
        delete, free = ("would delete", "free") if dry_run else ("deleted", "freed")
        lines = [f"{delete} {_count(done)} in {clean(folder)} and {free} {size(done.bytes)}"]
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
