"""job.toml: what can be said in it, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchloom.errors import BadInput, TorchLoomError
from torchloom.job import job_file_reader
from torchloom.protocol.job_spec import Rule, Torchft


def write(folder: Path, text: str, name: str = "mnist.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_says_what_the_options_of_loom_run_say(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        script = "train.py"
        args = ["--epochs", "3"]
        nnodes = 2
        nproc_per_node = 8
        max_restarts = 5
        restart_window = 600
        checkpoint_dir = "runs/a"
        resume_arg = "--resume {path}"
        log_dir = "logs"
        grace = 3
        standby = false
        preload = ["numpy"]
        [env]
        NCCL_DEBUG = "WARN"
        """,
    )
    name, task = job_file_reader.read(path)
    assert name == "mnist"
    assert task.argv == ("train.py", "--epochs", "3")
    assert (task.nodes, task.per_node, task.max_restarts, task.restart_window) == (2, 8, 5, 600.0)
    assert (task.cwd, task.log_dir) == (str(tmp_path), str(tmp_path / "logs"))
    assert (task.checkpoint_dir, task.resume_arg, task.grace) == ("runs/a", "--resume {path}", 3.0)
    assert (task.standby, task.preload, task.env) == (False, ("numpy",), {"NCCL_DEBUG": "WARN"})


def test_a_module_is_run_as_python_runs_one(tmp_path: Path) -> None:
    name, task = job_file_reader.read(write(tmp_path, 'job = "a"\nmodule = "package.train"\ncwd = "src"\n'))
    assert (name, task.argv, task.cwd) == ("a", ("-m", "package.train"), str(tmp_path / "src"))


def test_a_file_says_what_is_done_when_something_goes_wrong(tmp_path: Path) -> None:
    text = """
    script = "a.py"
    [policy]
    hang = "stacks+restart@30"
    not_finite = "rollback,back=2,skip"
    dry_run = true
    """
    task = job_file_reader.read(write(tmp_path, text))[1]
    assert task.policy == (
        Rule(on="hang", do=("stacks", "restart"), after=30),
        Rule(on="not_finite", do=("rollback",), back=2, skip=True),
    )
    assert (task.dry_run, task.check) == (True, False)
    assert job_file_reader.read(write(tmp_path, 'script = "a.py"\ncheck = true'))[1].check
    assert job_file_reader.read(write(tmp_path, 'script = "a.py"\n[policy]\ncheck = true'))[1].check


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ('script = "a.py"\n[policy]\nhnag = "restart"', "[policy] has no event 'hnag'", "did you mean hang"),
        ('script = "a.py"\n[policy]\nhang = "restrat"', "hang: response 'restrat' is unknown", "restart"),
        ('script = "a.py"\n[policy]\nhang = true', "[policy] hang is a rule", 'hang = "report"'),
        ('script = "a.py"\n[policy]\ndry_run = "yes"', "[policy] dry_run is true or false", ""),
        ('script = "a.py"\n[policy]\nhang = 3', "[policy] hang is a rule, as text", 'hang = "stacks+restart@3"'),
        ("", "names neither script nor module", 'script = "train.py"'),
        ('script = "a.py"\nmodule = "a"', "names both script and module", "script"),
        ('script = "a.py"\nnode_count = 2', "there is no setting 'node_count'", ""),
        ('script = "a.py"\nnprocs_per_node = 2', "there is no setting 'nprocs_per_node'", "nproc_per_node"),
        ('script = "a.py"\nnproc_per_node = "two"', "nproc_per_node two", ""),
        ('script = "a.py"\nnproc_per_node = 0', "nproc_per_node", ""),
        ('script = "a.py"\nnnodes = 0', "nnodes", ""),
        ('script = "a.py"\ngrace = -1.0', "grace", ""),
        ('script = "a.py"\ncheckpoint_pattern = "last.pt"', "has no {step}", ""),
        ("script = ", "is not TOML", ""),
        ("x = " + "[" * 5000, "is nested too deeply", ""),
        ('script = "a.py"\nrestart_window = inf', "restart_window", ""),
        ('script = "a.py"\npreload = ["a b"]', "preload", ""),
        ('script = "a.py"\njob = "a b"', "a b", ""),
        ('script = "a.py"\n[env]\nA = 1', "Expected `str`, got `int`", ""),
    ],
)
def test_what_is_wrong_is_said_with_the_name_that_was_used(tmp_path: Path, text: str, told: str, hint: str) -> None:
    with pytest.raises(TorchLoomError) as error:
        job_file_reader.read(write(tmp_path, text))
    assert told in error.value.message
    assert hint in error.value.hint


def test_a_job_that_no_message_can_carry_is_refused_with_its_size(tmp_path: Path) -> None:
    def text(count: int) -> str:
        return f'script = "a.py"\nargs = {["x" * 50_000] * count}\n'

    assert len(job_file_reader.read(write(tmp_path, text(15)))[1].argv) == 16
    with pytest.raises(BadInput, match=r"too long: 800,\d{3} bytes, the limit is 786,432\n"):
        job_file_reader.read(write(tmp_path, text(16)))
    with pytest.raises(BadInput, match="the limit is 262,144 for each of 3 replicas"):
        job_file_reader.read(write(tmp_path, text(15) + "[torchft]\nreplicas = 2\nspares = 1"))


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        job_file_reader.read(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not TOML"):
        job_file_reader.read(tmp_path / "binary.toml")


def test_a_span_says_how_small_a_job_may_be(tmp_path: Path) -> None:
    _, task = job_file_reader.read(write(tmp_path, 'script = "a.py"\nnnodes = "2:3"\nnproc_per_node = "4:8"\n'))
    assert (task.min_nodes, task.nodes, task.least, task.per_node) == (2, 3, 4, 8)
    with pytest.raises(BadInput, match="nnodes 3:2"):
        job_file_reader.read(write(tmp_path, 'script = "a.py"\nnnodes = "3:2"\n'))


# ── replicas under torchft ──


def test_a_table_makes_a_job_of_replicas(tmp_path: Path) -> None:
    text = """
    script = "train_ddp.py"
    nproc_per_node = 2
    [torchft]
    replicas = 3
    min_replicas = 2
    spares = 1
    lighthouse = "stock"
    heartbeat_timeout = 2
    join_timeout = 7.5
    """
    task = job_file_reader.read(write(tmp_path, text))[1]
    assert task.torchft == Torchft(
        replicas=3, min_replicas=2, spares=1, lighthouse="stock", heartbeat_timeout=2.0, join_timeout=7.5
    )
    assert (task.per_node, task.preload, task.env) == (2, ("torchft",), {"RUST_LOG": "warn"})


def test_an_empty_table_is_enough_and_none_is_no_job_of_replicas(tmp_path: Path) -> None:
    assert job_file_reader.read(write(tmp_path, 'script = "a.py"\n[torchft]'))[1].torchft == Torchft(replicas=2)
    assert job_file_reader.read(write(tmp_path, 'script = "a.py"'))[1].torchft is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("replica = 2", "[torchft] there is no setting 'replica'"),
        ("replicas = 0", "[torchft] replicas cannot be 0"),
        ('replicas = "2"', "[torchft] Expected `int`, got `str` - at `replicas`"),
        ("spares = -1", "[torchft] spares cannot be -1"),
        ("min_replicas = 3", "[torchft] at least 3 of 2 replicas"),
        ('lighthouse = "there"', "[torchft] no such lighthouse: 'there'"),
        ("join_timeout = 5", "[torchft] a join timeout of 5 s, and a heartbeat timeout of 5 s"),
        ("heartbeat_timeout = 0", "[torchft] Expected `float` > 0.0 - at `heartbeat_timeout`"),
    ],
)
def test_a_table_that_cannot_be_is_told(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(BadInput) as caught:
        job_file_reader.read(write(tmp_path, f'script = "a.py"\n[torchft]\n{line}\n'))
    assert told in caught.value.message
    assert caught.value.hint


def test_a_replica_is_on_one_node_and_has_a_fixed_number_of_ranks(tmp_path: Path) -> None:
    for line in ("nnodes = 2", 'nproc_per_node = "1:2"'):
        with pytest.raises(BadInput, match=r"\[torchft\] a replica has a fixed number of ranks"):
            job_file_reader.read(write(tmp_path, f'script = "a.py"\n{line}\n[torchft]\n'))
