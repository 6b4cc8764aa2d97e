"""A knob says what it may be, and takes nothing else."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

from torchloom.errors import BadInput
from torchloom.knob_validation import BadValue, check
from torchloom.protocol.codec import decode_report, encode
from torchloom.protocol.rank import Knobs
from torchloom.threadlet.changes.knob import Knob, log_level_knob, make_knob


def sent(knob: Knob) -> Any:
    """As the weaver gets it."""
    report = decode_report(encode(Knobs(incarnation="0" * 24, knobs=(knob.spec,))))
    assert isinstance(report, Knobs)
    return report.knobs[0]


@pytest.mark.parametrize(
    ("value", "about", "kind"),
    [
        (0.1, {}, "float"),
        (3, {}, "int"),
        (True, {}, "bool"),
        ("adam", {}, "text"),
        ("b", {"choices": ("a", "b")}, "enum"),
        ((0.9, 0.99), {}, "floats"),
        ([0.9, 0.99], {}, "floats"),
        (3, {"type": float}, "float"),
        (np.float64(0.1), {}, "float"),
        (np.int64(3), {"low": np.float32(1), "high": 10}, "int"),
        (torch.tensor(0.5), {}, "float"),
    ],
)
def test_a_knob_finds_its_kind_and_reaches_the_weaver_as_it_is(value: Any, about: dict[str, Any], kind: str) -> None:
    knob = make_knob("x", value, **about)
    assert knob.spec.kind == kind
    assert sent(knob) == knob.spec
    assert knob.value == knob.read()


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("", {"value": 1}),
        ("1x", {"value": 1}),
        ("a b", {"value": 1}),
        ("x" * 65, {"value": 1}),
        ("x", {}),
        ("x", {"value": object()}),
        ("x", {"value": math.nan}),
        ("x", {"value": 0.1, "low": 0.2}),
        ("x", {"value": 5, "high": 4}),
        ("x", {"value": "c", "choices": ("a", "b")}),
        ("x", {"value": "1", "choices": (1, 2)}),
        ("x", {"value": "1", "choices": [str(n) for n in range(65)]}),
        ("x", {"value": 1, "per": "node"}),
        ("x", {"value": 1, "type": "complex"}),
        ("x", {"value": "y" * 1001}),
    ],
)
def test_a_knob_that_makes_no_sense_is_refused_where_the_script_makes_it(name: str, about: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        make_knob(name, **about)


@pytest.mark.parametrize(
    ("knob", "good", "bad"),
    [
        (make_knob("f", 0.5, low=0, high=1), [0, 1, 0.25], [-0.1, 1.1, math.nan, math.inf, True, "0.5", (0.5,)]),
        (make_knob("i", 2, low=1), [1, 10**9], [0, 1.5, True, "2"]),
        (make_knob("b", False), [True, False], [0, 1, "true", 1.0]),
        (make_knob("e", "a", choices=("a", "b")), ["b"], ["c", 1, True]),
        (make_knob("t", "a"), ["", "x" * 1000], ["x" * 1001, 1, 0.5]),
        (make_knob("fs", (0.9, 0.99), high=1), [(0.1, 1.0)], [(0.9,), (0.9, 1.1), (0.9, math.nan), 0.9, "0.9,0.9"]),
    ],
)
def test_the_rule_for_each_kind(knob: Knob, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert check(knob.spec, value) == value
    for value in bad:
        with pytest.raises(BadValue, match=f"^{knob.spec.name}="):
            check(knob.spec, value)


def test_a_knob_with_functions_reaches_the_value_where_it_is() -> None:
    place = {"rate": np.float32(0.5)}
    knob = make_knob("rate", get=lambda: place["rate"], set=lambda value: place.update(rate=value))
    assert (knob.value, knob.read()) == (0.5, 0.5)
    knob.turn(0.25)
    assert place == {"rate": 0.25}
    place["rate"] = np.float32(0.125)  # the script itself moves it
    assert knob.read() == 0.125
    place.clear()
    assert knob.read() == 0.25  # what it last knew, if it cannot be read


def test_a_setter_that_fails_leaves_the_knob_as_it_was() -> None:
    def refuse(value: float) -> None:
        raise RuntimeError("not now")

    knob = make_knob("x", 1.0, set=refuse)
    with pytest.raises(RuntimeError):
        knob.turn(2.0)
    assert knob.value == 1.0


def test_the_log_level_is_that_of_the_root_logger() -> None:
    root = logging.getLogger()
    before = root.level
    try:
        knob = log_level_knob()
        knob.turn("ERROR")
        assert root.level == logging.ERROR
        root.setLevel(7)  # a level without a name among the choices
        assert knob.read() == "WARNING"
    finally:
        root.setLevel(before)


def test_a_role_that_no_rule_knows_is_refused() -> None:
    with pytest.raises(BadInput, match="role='speed'"):
        make_knob("x", 1, role="speed")  # type: ignore[arg-type]
