"""`loom checkpoints`: folders from the disk, jobs from the weaver; and nothing is deleted before it was named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints.store.test_inventory import flip
from tests.checkpoints.store.test_search import make
from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.cli.test_main import on_terminal
from torchloom.checkpoints.store.locks import reading
from torchloom.cli.verbs.shell import offered
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Task
from torchloom.protocol.views import CheckpointsView, QueryCheckpoints, RunsView, RunView, SavedStep


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three checkpoints, of which the newest has a flipped bit."""
    folder = tmp_path / "runs"
    for step in (100, 200, 300):
        make(folder, step)
    flip(folder / "step-300" / "state.pt")
    return folder


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def told(folder: str, job: str = "mnist", node: str = "n7") -> CheckpointsView:
    saved = SavedStep(
        rank=RankId(job, "main", 0), incarnation="0" * 24, step=500, folder=folder, node=node, size=120_000_000,
        seconds=2.5, stall=0.1, at=1.0,
    )  # fmt: skip
    return CheckpointsView(job=job, folder=folder, node=node, saved=(saved,))


def test_a_folder_is_listed_without_a_control_plane(loom: Loom, runs: Path) -> None:
    ran = loom("checkpoints", str(runs))
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["STEP", "300", "200", "100"]
    assert lines[-1] == "a resume would take step-300; with --verify this is certain"


def test_verify_reads_every_byte_and_says_what_a_resume_takes(loom: Loom, runs: Path) -> None:
    ran = loom("checkpoints", str(runs), "--verify")
    assert (ran.code, ran.err) == (0, ""), "no progress where there is no terminal"
    assert "state.pt differs in bytes 5000 to 6000" in ran.out
    assert ran.out.endswith("a resume takes step-200: 1 newer is damaged\n")
    document = json.loads(loom("checkpoints", str(runs), "--verify", "-o", "json").out)
    assert (document["verified"], document["resume"], document["job"]) == (True, "step-200", None)
    assert [c["status"] for c in document["checkpoints"]] == ["damaged", "valid", "valid"]


def test_a_terminal_sees_how_far_it_is_and_then_only_the_answer(runs: Path) -> None:
    code, shown = on_terminal("checkpoints", str(runs), "--verify")
    assert code == 0
    before, _, after = shown.partition("\r\x1b[Kreading step-300 (20 kB), 1 of 3")
    assert (before, "a resume takes step-200" in after) == ("", True)
    assert "\r\x1b[K\x1b[2mSTEP" in after.replace("\r\x1b[K ", "\r\x1b[K"), "it is gone before the table comes"
    assert "reading" not in on_terminal("checkpoints", str(runs))[1]


def test_none_valid_is_exit_code_8_and_only_if_all_was_read(loom: Loom, runs: Path) -> None:
    for step in (100, 200, 300):
        (runs / f"step-{step}" / "extra.bin").unlink()
    assert loom("checkpoints", str(runs)).code == 0
    ran = loom("checkpoints", str(runs), "--verify")
    assert ran.code == 8
    assert ran.out.endswith("none of them is whole: a resume would find nothing\n")
    assert loom("checkpoints", str(runs), "--verify", "-o", "json").code == 8


def test_an_empty_folder_is_no_error_and_a_missing_one_is(loom: Loom, tmp_path: Path) -> None:
    assert loom("checkpoints", str(tmp_path), "--verify") == (0, f"no checkpoints in {tmp_path}\n", "")
    ran = loom("checkpoints", str(tmp_path / "none"))
    assert ran.code == 6
    assert "does not exist" in ran.err


def test_one_that_is_being_written_is_neither_valid_nor_damaged(loom: Loom, tmp_path: Path) -> None:
    (tmp_path / ".saving-step-7-0123abcd").mkdir()
    (tmp_path / ".saving-step-7-0123abcd" / "state.pt").write_bytes(b"x" * 2000)
    ran = loom("checkpoints", str(tmp_path), "--verify")
    assert ran.code == 0
    assert "being written, 2.0 kB so far" in ran.out


def test_a_folder_by_its_name_and_one_called_prune(loom: Loom, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    assert "step-300" in loom("checkpoints", "runs").out
    runs.rename("prune")
    assert "step-300" in loom("checkpoints", "./prune").out
    assert "would delete 1" in loom("checkpoints", "prune", "--last", "2", "prune", "--dry-run").out


def test_a_pattern_leaves_out_what_it_does_not_name(loom: Loom, runs: Path) -> None:
    (runs / "model_7.pt").write_bytes(b"")
    assert "model_7.pt" not in loom("checkpoints", str(runs)).out  # beside ours it is something else
    assert "model_7.pt" in loom("checkpoints", str(runs), "--pattern", "model_{step}.pt").out
    assert "model_7.pt" not in loom("checkpoints", str(runs), "--pattern", "other_{step}.pt").out
    assert loom("checkpoints", str(runs), "--pattern", "other.pt").code == 6


def test_a_job_whose_folder_is_here_is_read_from_disk(weaver: Responder, at: Loom, runs: Path) -> None:
    weaver.checkpoints["mnist"] = told(str(runs))
    ran = at("checkpoints", "mnist", "--verify")
    assert ran.code == 0
    assert ran.out.startswith(f"mnist saves into {runs}\n")
    assert "a resume takes step-200" in ran.out
    assert weaver.looked[-1] == QueryCheckpoints(job="mnist")
    assert json.loads(at("checkpoints", "mnist", "-o", "json").out)["job"] == "mnist"


def test_a_job_whose_folder_is_elsewhere_is_listed_as_told(weaver: Responder, at: Loom) -> None:
    weaver.checkpoints["mnist"] = told("/nowhere/runs")
    ran = at("checkpoints", "mnist")
    assert ran.code == 0
    assert "120 MB" in ran.out
    assert "reported by n7" in ran.out
    assert "the folder is on n7" in ran.out
    for words in (["mnist", "--verify"], ["prune", "mnist", "--last", "1"]):
        ran = at("checkpoints", *words)
        assert (ran.code, ran.out) == (4, "")
        assert "/nowhere/runs is on n7" in ran.err
        assert "there" in ran.err


def started(weaver: Responder, **task: str) -> None:
    """torchLoom started mnist in this way."""
    run = RunView(job="mnist", phase="running", since=1.0, submitted=1.0, task=Task(argv=("a.py",), **task))  # type: ignore[arg-type]
    weaver.runs = RunsView(runs=(run,))


def test_a_job_that_reports_nothing_is_read_where_it_resumes_from(weaver: Responder, at: Loom, runs: Path) -> None:
    started(weaver, cwd=str(runs.parent), checkpoint_dir="runs")
    ran = at("checkpoints", "mnist", "--verify")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"mnist saves into {runs}\n")
    assert "a resume takes step-200" in ran.out
    assert "step-100" in at("checkpoints", "prune", "mnist", "--last", "2", "--dry-run").out
    weaver.checkpoints["mnist"] = told("/nowhere/earlier")
    assert "a resume takes step-200" in at("checkpoints", "mnist", "--verify").out
    (runs / "model_7.pt").write_bytes(b"")
    started(weaver, cwd=str(runs.parent), checkpoint_dir="runs", checkpoint_pattern="model_{step}.pt")
    assert "model_7.pt" in at("checkpoints", "mnist").out
    assert "model_7.pt" not in at("checkpoints", "mnist", "--pattern", "other_{step}.pt").out


def test_a_folder_that_a_job_resumes_from_and_that_is_not_here(weaver: Responder, at: Loom) -> None:
    started(weaver, checkpoint_dir="/nowhere/runs")
    ran = at("checkpoints", "mnist")
    assert ran.code == 0
    assert ran.out.endswith(
        "not here; if another machine has it, run `loom checkpoints --verify /nowhere/runs` there\n"
    )
    assert at("checkpoints", "mnist", "--verify").code == 4
    weaver.checkpoints["mnist"] = told("/nowhere/saved")
    assert "reported by n7" in at("checkpoints", "mnist").out


def test_a_job_that_saved_nothing_and_one_that_is_unknown(weaver: Responder, at: Loom) -> None:
    assert at("checkpoints", "mnist", "--verify") == (0, "job mnist has reported no checkpoints\n", "")
    ran = at("checkpoints", "prune", "mnist", "--last", "1")
    assert ran.code == 4
    assert "job mnist has reported no checkpoints" in ran.err
    ran = at("checkpoints", "mnits")
    assert ran.code == 4
    assert "did you mean mnist" in ran.err
    assert "./mnits" in ran.err


def test_prune_deletes_what_the_rule_does_not_keep(loom: Loom, runs: Path) -> None:
    ran = loom("checkpoints", "prune", str(runs), "--last", "2", "--yes")
    assert (ran.code, ran.err) == (0, "")
    first, second = ran.out.splitlines()
    assert first.startswith(f"deleted 1 checkpoint in {runs} and freed ")
    assert second == "  step-100"
    assert steps(runs) == ["step-200", "step-300"]
    assert loom("checkpoints", "prune", str(runs), "--last", "2").out == f"nothing to delete in {runs}\n"


def test_prune_spares_the_last_good_one_and_what_is_read(loom: Loom, runs: Path) -> None:
    with reading(runs / "step-100"):
        ran = loom("checkpoints", "prune", "-o", "json", "--last", "1", str(runs), "--yes")
    document = json.loads(ran.out)
    assert document == {
        "folder": str(runs), "dry_run": False, "deleted": [], "freed": 0,
        "spared": {"step-200": "it is the last good one", "step-100": "it is being read"},
    }  # fmt: skip
    assert (
        "spared step-200: it is the last good one" in loom("checkpoints", "prune", str(runs), "--last", "1", "-y").out
    )
    assert steps(runs) == ["step-200", "step-300"]


def test_prune_only_says_what_it_would_do_if_asked_to(loom: Loom, runs: Path) -> None:
    ran = loom("checkpoints", "prune", str(runs), "--every", "200", "--dry-run")
    assert ran.code == 0
    assert ran.out.startswith(f"would delete 2 checkpoints in {runs} and free ")
    assert json.loads(loom("checkpoints", "prune", str(runs), "--last", "2", "--dry-run", "-o", "json").out)["dry_run"]
    assert len(steps(runs)) == 3


def test_prune_asks_and_without_a_terminal_refuses(loom: Loom, runs: Path) -> None:
    words = ["checkpoints", "prune", str(runs), "--last", "2"]
    ran = loom(*words)
    assert ran.code == 2
    assert f"this will delete 1 checkpoint in {runs}" in ran.err
    assert "--yes" in ran.err
    code, shown = on_terminal(*words, type_in=b"n\n")
    assert (code, "nothing was deleted" in shown) == (0, True)
    assert len(steps(runs)) == 3
    assert on_terminal(*words, type_in=b"y\n")[0] == 0
    assert len(steps(runs)) == 2


def test_prune_of_a_folder_that_cannot_be_used(loom: Loom, runs: Path) -> None:
    ran = loom("checkpoints", "prune", str(runs / "none"), "--last", "1")
    assert ran.code == 6
    assert "does not exist" in ran.err
    (runs / ".pruner").mkdir()
    ran = loom("checkpoints", "prune", str(runs), "--last", "1", "--yes")
    assert ran.code == 6
    assert "cannot delete in" in ran.err


def test_the_shell_completes_the_second_word() -> None:
    assert offered("checkpoints ", "p") == ["prune "]
    assert offered("checkpoints ", "--v") == ["--verify "]
    assert offered("checkpoints prune ", "--la") == ["--last "]
    assert offered("jobs ", "p") == []
