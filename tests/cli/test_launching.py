"""What `loom run` takes from its command line: its own options, in torchrun's spellings too, and the script's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Loom
from torchloom.agent.foreground import output_folder
from torchloom.cli.launching import _count, _counts
from torchloom.cli.parser import parse
from torchloom.errors import BadInput
from torchloom.settings import Settings


def test_torchrun_s_spellings_are_understood() -> None:
    words = ["run", "--standalone", "--nproc_per_node=2", "--max_restarts", "7", "train.py", "--max_restarts", "1"]
    args = parse(words).args
    assert (args.nproc_per_node, args.max_restarts) == ("2", 7)
    assert args.words == ["train.py", "--max_restarts", "1"]


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
