"""Options of `loom run` that are declared as fields."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from torchloom.errors import BadInput
from torchloom.job.options_from_spec import add_options, read_options
from torchloom.protocol.job_spec import Option


class Settings(msgspec.Struct, kw_only=True):
    max_cores: Annotated[int, Meta(ge=1), Option("Cores that may be used", "N")] = 4
    pace: Annotated[float, Option("Seconds between two looks", "S")] = 0.5
    quiet: Annotated[bool, Option("Print less")] = False
    warm: Annotated[bool, Option("Start ahead")] = True
    module: Annotated[tuple[Annotated[str, Meta(pattern=r"^\w+$")], ...], Option("A module", "NAME")] = ()
    env: Annotated[dict[str, str], Option("A variable", "NAME=VALUE")] = {}
    inner: int = 0


def read(*words: str) -> dict[str, object]:
    parser = ArgumentParser()
    add_options(parser, Settings)
    return read_options(parser.parse_args(words), Settings)


def test_what_was_not_typed_keeps_the_default_of_its_field() -> None:
    assert read() == {}


def test_each_kind_of_field_is_read() -> None:
    words = ["--max-cores", "2", "--pace", "3", "--quiet", "--warm", "0", "--module", "a,b", "--module", "c"]
    assert read(*words, "--env", "A=1=2", "--env", "B=") == {
        "max_cores": 2, "pace": 3.0, "quiet": True, "warm": False, "module": ("a", "b", "c"),
        "env": {"A": "1=2", "B": ""},
    }  # fmt: skip


def test_a_field_without_an_option_is_not_offered() -> None:
    with pytest.raises(SystemExit):
        read("--inner", "1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--max-cores", "0"), "--max-cores 0: Expected `int` >= 1"),
        (("--module", "a b"), "--module a b: Expected `str` matching"),
        (("--env", "A"), "--env 'A'"),
        (("--env", "=1"), "--env '=1'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_name_of_its_option(words: tuple[str, str], named: str) -> None:
    with pytest.raises(BadInput) as refused:
        read(*words)
    assert refused.value.message.startswith(named)
    assert refused.value.hint


def test_the_help_shows_defaults_that_are_something() -> None:
    parser = ArgumentParser(prog="x")
    add_options(parser, Settings)
    text = " ".join(parser.format_help().split())
    assert "Cores that may be used; default: 4" in text
    assert "Start ahead; default: 1" in text
    assert "Print less --warm" in text
    assert "A module; may be repeated" in text
