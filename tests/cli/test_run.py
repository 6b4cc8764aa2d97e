"""What `loom run` takes from its command line: its own options, in torchrun's spellings too, and the script's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Loom
from torchloom.bus.weaver_client import WeaverClient
from torchloom.cli.parser import parse
from torchloom.cli.verbs.run import _count, _counts, silent_lighthouse, with_replicas
from torchloom.core.torchft.replica_groups import timeouts
from torchloom.errors import BadInput
from torchloom.launcher.local_run import output_folder
from torchloom.protocol.job_spec import Task, Torchft
from torchloom.protocol.operator import Submit
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings


def test_torchrun_s_spellings_are_understood() -> None:
    words = ["run", "--standalone", "--nproc_per_node=2", "--max_restarts", "7", "train.py", "--max_restarts", "1"]
    args = parse(words).args
    assert (args.nproc_per_node, args.max_restarts) == ("2", 7)
    assert args.words == ["train.py", "--max_restarts", "1"]


@pytest.mark.parametrize(
    "words", [["-m", "pkg.train"], ["-m=pkg.train"], ["--job", "a", "--standalone", "-m", "pkg.train"]]
)
def test_what_follows_a_module_is_for_the_module(words: list[str]) -> None:
    args = parse(["run", *words, "-m", "x", "--job"]).args
    assert (args.module, args.words) == ("pkg.train", ["-m", "x", "--job"])
    assert parse(["run", "--job", "b", "--", "train.py", "--", "-x"]).args.words == ["train.py", "--", "-x"]


@pytest.mark.parametrize("option", ["--rdzv_endpoint", "--rdzv-endpoint"])
def test_what_torchrun_has_and_we_have_not_is_said_with_what_to_do(option: str) -> None:
    with pytest.raises(BadInput, match=f"no option {option}") as error:
        parse(["run", option, "host:29500", "train.py"])
    assert error.value.hint == "ranks find each other without it"


def test_what_two_runs_of_one_second_print_is_kept_apart(tmp_path: Path) -> None:
    settings = Settings(state=str(tmp_path))
    assert output_folder(settings, "mnist", 1000.001) != output_folder(settings, "mnist", 1000.002)


def test_no_gpu_is_not_taken_for_one() -> None:
    assert _count("auto", 0) == 1
    assert _count("gpu", 4) == 4
    with pytest.raises(BadInput, match="there is no GPU"):
        _count("gpu", 0)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (None, 4)), ("2:4", (2, 4)), ("4:4", (None, 4)), ("1:auto", (None, 1))]
)
def test_a_least_and_a_most_are_written_as_torchrun_does(text: str, counts: tuple[int | None, int]) -> None:
    assert _counts(text, 0) == counts


@pytest.mark.parametrize("text", ["4:2", "0:4", ":4", "2:", "a:4", "2:3:4"])
def test_a_span_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--nproc-per-node"):
        _counts(text, 0)


def test_the_usage_names_the_script_and_what_is_for_it(loom: Loom) -> None:
    usage = loom("run", "--help").out.split("\n\n")[0]
    assert "loom run [options] SCRIPT [ARGS ...]" in usage
    assert "-m MODULE [ARGS ...]" in usage


def test_a_command_that_no_message_can_carry_is_refused_before_anything_is_started(loom: Loom, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    ran = loom("--state", str(tmp_path / "state"), "run", str(tmp_path / "train.py"), *["x" * 90_000] * 10)
    assert (ran.code, "900," in ran.err, "786,432" in ran.err) == (2, True, True)
    assert not (tmp_path / "state").exists()


async def test_a_request_that_the_server_does_not_take_is_refused_with_its_size(settings: Settings) -> None:
    task = Task(argv=("a.py", *["x" * 90_000] * 100))
    async with WeaverClient(settings, Role.OPERATOR) as weaver:
        with pytest.raises(BadInput, match=r"9,000,\d{3} bytes; the server takes 8,388,608"):
            await weaver.ask(Submit(request="r" * 32, job="a", task=task, operator="o"))


# ── replicas under torchft ──


PLAIN = Task(argv=("a.py",))


def grouped(*words: str, gpus: int = 0, task: Task = PLAIN) -> Task:
    return with_replicas(task, parse(["run", *words, "a.py"]).args, gpus)


def test_a_job_under_torchft_has_two_replicas_unless_told_otherwise() -> None:
    assert grouped("--torchft").torchft == Torchft(replicas=2)
    words = ("--replicas", "3", "--min-replicas", "2", "--spares", "1", "--lighthouse", "http://there:29510")
    told = Torchft(replicas=3, min_replicas=2, spares=1, lighthouse="http://there:29510")
    assert grouped("--torchft", *words).torchft == told
    assert grouped().torchft is None


def test_torchft_is_imported_beforehand_and_quiet_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUST_LOG", *timeouts(Torchft(replicas=2))):
        monkeypatch.delenv(name, raising=False)
    task = grouped("--torchft")
    assert (task.preload, task.env) == (("torchft",), {"RUST_LOG": "warn"})
    assert grouped("--torchft", task=Task(argv=("a.py",), env={"RUST_LOG": "info"})).env == {"RUST_LOG": "info"}
    monkeypatch.setenv("RUST_LOG", "debug")
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "7")
    assert grouped("--torchft").env == {"RUST_LOG": "debug", "TORCHFT_TIMEOUT_SEC": "7"}


@pytest.mark.parametrize("words", [("--replicas", "2"), ("--min-replicas", "1"), ("--spares", "0")])
def test_what_is_for_torchft_alone_says_so(words: tuple[str, str]) -> None:
    with pytest.raises(BadInput, match=f"{words[0]} is for jobs under torchft") as error:
        grouped(*words)
    assert error.value.hint == "add --torchft"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--replicas", "0"), "^replicas cannot be 0"),
        (("--replicas", "1001"), "^replicas cannot be 1001"),
        (("--min-replicas", "0"), "^min_replicas cannot be 0"),
        (("--spares", "-1"), "^spares cannot be -1"),
        (("--min-replicas", "3"), "at least 3 of 2 replicas"),
        (("--lighthouse", "there"), "no such lighthouse: 'there'"),
    ],
)
def test_what_cannot_be_is_told(words: tuple[str, str], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        grouped("--torchft", *words)


def test_a_lighthouse_of_the_user_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        task = grouped("--torchft", "--lighthouse", f"http://127.0.0.1:{port}")
        assert silent_lighthouse(task) == ""
    assert silent_lighthouse(task) == f"127.0.0.1:{port}"
    assert silent_lighthouse(grouped("--torchft")) == silent_lighthouse(grouped()) == ""


def test_more_replicas_than_gpus_are_refused() -> None:
    assert grouped("--torchft", "--replicas", "3", "--spares", "1", gpus=4).torchft is not None
    with pytest.raises(BadInput, match="4 replicas of 1 rank and 3 GPUs"):
        grouped("--torchft", "--replicas", "3", "--spares", "1", gpus=3)
    with pytest.raises(BadInput, match="a fixed number of ranks"):
        grouped("--torchft", task=Task(argv=("a.py",), nodes=2))
