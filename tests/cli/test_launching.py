"""What `loom run` takes from its command line: its own options, in torchrun's spellings too, and the script's."""

from __future__ import annotations

import pytest

from torchloom.cli.launching import _count
from torchloom.cli.parser import parse
from torchloom.errors import BadInput


def test_torchrun_s_spellings_are_understood() -> None:
    words = ["run", "--standalone", "--nproc_per_node=2", "--max_restarts", "7", "train.py", "--max_restarts", "1"]
    args = parse(words).args
    assert (args.nproc_per_node, args.max_restarts) == ("2", 7)
    assert args.words == ["train.py", "--max_restarts", "1"]


def test_what_torchrun_has_and_we_have_not_is_said_with_what_to_do() -> None:
    with pytest.raises(BadInput, match="no option --rdzv_endpoint") as error:
        parse(["run", "--rdzv_endpoint", "host:29500", "train.py"])
    assert error.value.hint == "ranks find each other without it"


def test_no_gpu_is_not_taken_for_one() -> None:
    assert _count("auto", 0) == 1
    assert _count("gpu", 4) == 4
    with pytest.raises(BadInput, match="there is no GPU"):
        _count("gpu", 0)
