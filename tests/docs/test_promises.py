"""Every promise of the README has a test with real processes that `make test` runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def promises() -> set[int]:
    """The numbers under which the README lists them."""
    _, _, rest = (ROOT / "README.md").read_text("utf-8").partition("## What you can rely on")
    section, _, _ = rest.partition("\n## ")
    return {int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)}


def shown_by_tests() -> set[int]:
    numbers: set[int] = set()
    for path in (ROOT / "tests" / "flow").glob("test_*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            for mark in getattr(function, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    numbers |= {ast.literal_eval(argument) for argument in mark.args}
    return numbers


def test_every_promise_is_shown_on_real_processes() -> None:
    assert promises()
    assert shown_by_tests() == promises()
