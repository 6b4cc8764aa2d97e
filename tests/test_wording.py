"""No decision depends on wording: what code must not do, and how few tests may compare sentences.

`make test-noise` is the proof; this finds in a second what would fail there.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchloom
from tests.test_wire import structs
from torchloom.agent.supervisor.fork import with_startup

SOURCE = Path(torchloom.__file__).parent
TESTS = Path(__file__).parent
MOST = 0.1
"""The share of tests that may compare what people read, among those that `make test-noise` runs."""
PROSE = frozenset({"decision", "detail", "evidence", "hint", "message", "outcome", "reason", "trouble", "what", "why"})
"""Fields that hold what people read."""
PARSING = frozenset(
    {"startswith", "endswith", "partition", "rpartition", "split", "rsplit", "find", "index", "removeprefix"}
)

MESSAGES = frozenset(structs())
OUTSIDE = frozenset({"permissions violation", '"sync_interval": "always"'})
"""Words of NATS: its protocol names an error by them, and its configuration a setting."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("views/"):
            yield name, ast.parse(path.read_text("utf-8"))


def is_prose(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in PROSE


def is_sentence(node: ast.expr) -> bool:
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return " " in text.strip() and text not in OUTSIDE


def decisions_by_wording(tree: ast.Module) -> Iterator[int]:
    """The lines in which a text for people is taken apart, searched, or compared with another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in PARSING and is_prose(node.func.value):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            searched = isinstance(node.ops[0], ast.In | ast.NotIn) and is_prose(sides[-1]) and is_text(sides[0])
            if searched or any(map(is_sentence, sides)):
                yield node.lineno


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_no_code_outside_the_views_decides_by_a_sentence() -> None:
    found = [f"{name}:{line}" for name, tree in modules() for line in decisions_by_wording(tree)]
    assert found == []


def sentences_in_messages(tree: ast.Module) -> Iterator[int]:
    """The lines in which a message is made with a sentence, where a phrase belongs."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in MESSAGES:
            given = [keyword.value for keyword in call.keywords if keyword.arg in PROSE]
            made = [value for value in given if isinstance(value, ast.Constant | ast.JoinedStr | ast.IfExp | ast.Tuple)]
            if any(is_sentence(part) for value in made for part in ast.walk(value) if isinstance(part, ast.expr)):
                yield call.lineno


def test_no_code_outside_the_views_makes_a_sentence_for_a_message() -> None:
    found = [f"{name}:{line}" for name, tree in modules() for line in sentences_in_messages(tree)]
    assert found == []


@pytest.mark.parametrize("rank", [False, True])
def test_noise_reaches_the_processes_that_tests_start(rank: bool) -> None:
    env = os.environ | {"PYTHONPATH": str(TESTS / "noise")} | ({"TORCHLOOM_LAUNCHER": "loom"} if rank else {})
    script = "from torchloom.views.wording.phrases import render as r; print(r('from outside'), [r('')], r.__module__)"
    command = [sys.executable, "-P", "-c", script]
    ended = subprocess.run(command, env=with_startup(env), capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"noise/\w+: .* \[''\] torchloom.views.wording.phrases\n", ended.stdout), ended.stderr


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def test_few_tests_compare_what_people_read() -> None:
    paths = [path for part in ("core", "agent", "flow") for path in (TESTS / part).rglob("test_*.py")]
    trees = [ast.parse(path.read_text("utf-8")) for path in paths]
    tests = [node for tree in trees for node in ast.walk(tree) if is_test(node)]
    marks = [ast.unparse(mark) for test in tests for mark in getattr(test, "decorator_list", ())]
    assert 0 < marks.count("pytest.mark.wording") <= MOST * len(tests)
    whole = [ast.unparse(node) for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    assert not [line for line in whole if line.startswith("pytestmark") and "wording" in line], "each test by itself"
