"""Who a process is, from its arguments and its launcher's environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.errors import BadInput, BadName
from torchloom.protocol.ids import NAME, RankId
from torchloom.threadlet.process.identity import Host, Names, find_names, sanitised, script_name

HOST = Host("node7.cluster", 4321, "/home/me/train mnist.py")
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "99"}


def names(environ: dict[str, str], **given: object) -> Names:
    return find_names(environ, HOST, **given)  # type: ignore[arg-type]


def test_a_bare_process_is_named_after_its_script_its_host_and_its_pid() -> None:
    found = names({})
    assert found.rank == RankId("train-mnist", "node7-cluster-4321", 0)
    assert (found.world_size, found.local_rank, found.launcher, found.node) == (1, None, "", "node7.cluster")
    assert found.chosen


def test_all_ranks_of_a_torchrun_agree_on_their_replica() -> None:
    found = names(TORCHRUN)
    assert found.rank == RankId("train-mnist", "main", 3)
    assert (found.world_size, found.local_rank, found.launcher) == (8, 1, "torchrun")
    assert names(TORCHRUN | {"TORCHELASTIC_RUN_ID": "run.7"}).rank.replica == "run-7"


def test_slurm_numbers_a_process_that_nobody_nearer_has_numbered() -> None:
    found = names(SLURM)
    assert found.rank == RankId("train-mnist", "slurm-99", 5)
    assert (found.world_size, found.local_rank, found.launcher) == (16, 2, "slurm")
    assert names(SLURM | TORCHRUN).rank.rank == 3
    assert names(SLURM | {"RANK": "3"}).rank == RankId("train-mnist", "main", 3)


def test_a_torchft_replica_group_is_a_replica() -> None:
    assert names(TORCHRUN | {"REPLICA_GROUP_ID": "2"}, job="vit").rank.replica == "vit_2"


def test_what_is_passed_wins_over_the_environment_and_that_over_what_is_picked() -> None:
    environ = TORCHRUN | {"TORCHLOOM_JOB": "a", "TORCHLOOM_REPLICA": "b"}
    assert names(environ).rank == RankId("a", "b", 3)
    assert not names(environ).chosen
    assert names(environ, job="x", replica="y", rank=0, world_size=2).rank == RankId("x", "y", 0)


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "a*", "a>", "é", "x" * 129, 7, b"x", ["x"]])
def test_a_bad_name_that_was_passed_raises_at_once(bad: object) -> None:
    with pytest.raises(BadName):
        names({}, job=bad)
    with pytest.raises(BadName):
        names({}, replica=bad)


@pytest.mark.parametrize("bad", [-1, "3", 1.5, True, 10**7])
def test_a_bad_rank_that_was_passed_raises_at_once(bad: object) -> None:
    with pytest.raises(BadInput):
        names({}, rank=bad)


def test_a_bad_name_in_the_environment_is_mended_and_told() -> None:
    found = names({"TORCHLOOM_JOB": "my job.v2", "TORCHLOOM_REPLICA": "..."})
    assert found.rank.job == "my-job-v2"
    assert found.rank.replica == "node7-cluster-4321"
    assert len(found.warnings) == 2


def test_numbers_that_are_none_count_as_absent_with_a_warning() -> None:
    found = names({"RANK": "x", "WORLD_SIZE": "-4", "LOCAL_RANK": "1e3"})
    assert (found.rank.rank, found.world_size, found.local_rank) == (0, 1, None)
    assert any("RANK='x'" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("argv0", "job"),
    [
        ("", "train"),
        ("-c", "train"),
        ("-m", "train"),
        ("...", "train"),
        ("/x/pkg/__main__.py", "pkg"),
        ("a.b.py", "a-b"),
    ],
)
def test_a_job_is_called_after_its_script_or_else_train(argv0: str, job: str) -> None:
    assert script_name(argv0) == job


@given(st.text())
def test_any_text_becomes_a_name_or_nothing(text: str) -> None:
    assert not sanitised(text) or NAME.fullmatch(sanitised(text))


@given(st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM, "REPLICA_GROUP_ID", "TORCHLOOM_JOB"]), st.text(max_size=8)))
def test_no_environment_is_refused(environ: dict[str, str]) -> None:
    found = names(environ)
    assert NAME.fullmatch(found.rank.job)
    assert NAME.fullmatch(found.rank.replica)
    assert found.world_size >= 1
