"""Checkpoints as people read them: a row each, what a resume takes, and what a pruning did."""

from __future__ import annotations

from typing import Any

import pytest

from tests.views.samples import LIFE, NOW
from torchloom.checkpoints.store.inventory import Entry, Inventory
from torchloom.checkpoints.store.retention import Pruned
from torchloom.protocol.ids import RankId
from torchloom.protocol.views import CheckpointsView, FailedStep
from torchloom.views import checkpoints as view
from torchloom.views.format.tables import Screen, columns_of


def entry(step: int, **more: Any) -> Entry:
    known: dict[str, Any] = {
        "name": f"step-{step}", "step": step, "kind": "torchloom", "size": 1_240_000_000, "created": NOW - 3723,
        "seconds": 12.3,
    }  # fmt: skip
    return Entry(**known | more)


def found(*entries: Entry, verified: bool = False) -> Inventory:
    return Inventory(folder="/runs/a", entries=entries, verified=verified)


def test_a_row_has_step_size_age_duration_kind_and_state() -> None:
    lines = view.checkpoints(found(entry(12_000), entry(900, seconds=None, kind="dcp", size=64)), NOW, Screen())
    assert lines == [
        "  STEP    SIZE        AGE  TOOK  KIND       STATE",
        "12,000  1.2 GB  1 h 2 min  12 s  torchloom  complete",
        "   900    64 B  1 h 2 min     -  dcp        complete",
    ]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ({"status": "valid"}, "valid"),
        ({"status": "damaged", "why": "state.pt is missing"}, "state.pt is missing"),
        ({"status": "writing", "size": 120_000_000}, "being written, 120 MB so far"),
        ({"status": "abandoned"}, "left by a process that is gone"),
        ({"status": "reported", "node": "n7"}, "reported by n7"),
    ],
)
def test_a_state_is_a_word_or_the_reason(made: dict[str, Any], text: str) -> None:
    assert view.state(entry(5, **made)).text == text


def test_what_is_being_written_has_no_size_yet() -> None:
    draft, left = entry(7, status="writing", size=64), entry(6, status="abandoned", size=64)
    lines = view.checkpoints(found(draft, left), NOW, Screen())
    assert [line.split()[1:2] for line in lines[1:]] == [["-"], ["64"]]


def test_names_are_shown_where_the_step_does_not_tell_them() -> None:
    draft = entry(7, name=".saving-step-7-0123abcd", status="writing")
    assert "NAME" not in view.checkpoints(found(draft, entry(5)), NOW, Screen())[0]
    lines = view.checkpoints(found(entry(5), entry(4, name="model_4.pt")), NOW, Screen())
    assert "NAME" in lines[0]
    assert "step-5" in lines[1]
    assert "model_4.pt" in lines[2]


def test_no_line_is_wider_than_the_terminal_and_nothing_commands_it() -> None:
    bad = entry(5, name="\x1b[2J_5.pt", status="damaged", why="\x1b[2J" * 40)
    good = entry(4, name="\x1b[2J_4.pt")
    lines = view.answer(found(bad, good), None, NOW, Screen(width=70))
    assert all(columns_of(line) <= 70 for line in lines)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("survey", "text"),
    [
        (found(entry(5), entry(4)), "a resume would take step-5; with --verify this is certain"),
        (found(entry(5, status="valid"), verified=True), "a resume takes step-5"),
        (
            found(entry(9, status="writing"), entry(5, status="damaged"), entry(4, status="valid"), verified=True),
            "a resume takes step-4: 1 newer is damaged",
        ),
        (found(entry(5, status="damaged")), "none of them is whole: a resume would find nothing"),
        (found(entry(5, status="writing")), "nothing to resume from yet"),
    ],
)
def test_what_a_resume_takes_is_said(survey: Inventory, text: str) -> None:
    assert view.resume(survey) == text


def test_an_empty_folder_is_said_in_a_sentence() -> None:
    assert view.answer(found(), None, NOW, Screen()) == ["no checkpoints in /runs/a"]
    told = CheckpointsView(job="mnist")
    assert view.answer(Inventory(folder="", entries=()), told, NOW, Screen()) == [
        "job mnist has reported no checkpoints"
    ]


def test_a_job_says_where_it_saves_and_what_failed() -> None:
    rank = RankId("mnist", "main", 0)
    failed = FailedStep(rank=rank, incarnation=LIFE, step=600, folder="/runs/a", why="no space", at=NOW - 42)
    told = CheckpointsView(job="mnist", folder="/runs/a", node="n7", failures=2, failed=failed)
    first, *_, last = view.answer(found(entry(5)), told, NOW, Screen())
    assert first == "mnist saves into /runs/a"
    assert last == "saving failed 2 times, the last at step 600, 42 s ago: no space"
    far = view.answer(found(entry(5, status="reported", node="n7")), told, NOW, Screen(), here=False)
    assert "the folder is on n7: run `loom checkpoints --verify /runs/a` there" in far


def test_a_document_has_every_key() -> None:
    document = view.surveyed(found(entry(5), entry(4)), None)
    assert (document["job"], document["resume"], document["failed"]) == (None, "step-5", None)
    assert document["checkpoints"][0] == {
        "name": "step-5", "step": 5, "kind": "torchloom", "size": 1_240_000_000, "created": NOW - 3723, "seconds": 12.3,
        "status": "complete", "why": "", "node": "",
    }  # fmt: skip


def test_a_pruning_says_what_it_will_delete_and_what_it_did() -> None:
    done = Pruned([f"step-{n}" for n in range(8)], {"step-9": "it is being read"}, 2_000_000)
    question = "this will delete 8 checkpoints in /runs/a and free 2.0 MB: "
    assert view.question(done, "/runs/a") == question + "step-0, step-1, step-2, step-3, step-4, step-5 and 2 more"
    lines = view.pruned(done, "/runs/a", dry_run=False)
    assert lines[0] == "deleted 8 checkpoints in /runs/a and freed 2.0 MB"
    assert lines[1:9] == [f"  step-{n}" for n in range(8)]
    assert lines[9:] == ["spared step-9: it is being read"]
    assert (
        view.pruned(Pruned(["step-1"], {}, 5), "/x", dry_run=True)[0] == "would delete 1 checkpoint in /x and free 5 B"
    )
    assert view.pruned(Pruned(), "/x", dry_run=False) == ["nothing to delete in /x"]
