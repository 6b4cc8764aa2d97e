"""Lists of devices as real files have them, and what is said of one that cannot be."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.errors import BadInput
from torchloom.job.device_lists import FORM, make_groups, parse_groups

Groups = list[tuple[str | None, tuple[int, ...]]]


def groups(text: str) -> Groups:
    return [(group.node, group.devices) for group in parse_groups(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["0 1" "0 1"]', [(None, (0, 1)), (None, (0, 1))]),
        ('["0 1", "2,3"]', [(None, (0, 1)), (None, (2, 3))]),
        ("['0 1' '0 1']", [(None, (0, 1)), (None, (0, 1))]),
        ('"0 1" "0 1"', [(None, (0, 1)), (None, (0, 1))]),
        ('["0 1"]', [(None, (0, 1))]),
        ('["0" "1"]', [(None, (0,)), (None, (1,))]),
        ("1 0", [(None, (1, 0))]),
        ("0", [(None, (0,))]),
        ("0, 1", [(None, (0, 1))]),
        ("[0 1]", [(None, (0, 1))]),
        ("[[0, 1], [0, 1]]", [(None, (0, 1)), (None, (0, 1))]),
        ("[(0 1) (2)]", [(None, (0, 1)), (None, (2,))]),
        ("0:1 0:1", [(None, (0, 1)), (None, (0, 1))]),
        ("0:1", [(None, (0, 1))]),
        ('["0:1" "2:3"]', [(None, (0, 1)), (None, (2, 3))]),
        ("{'d3091':[0 1]}", [("d3091", (0, 1))]),
        ("{'d3091':[0 1], 'd3092':[2]}", [("d3091", (0, 1)), ("d3092", (2,))]),
        ("{d3091: '0 1' d3092: 0:1}", [("d3091", (0, 1)), ("d3092", (0, 1))]),
        ("{0: [0 1], 1: [0 1]}", [(None, (0, 1)), (None, (0, 1))]),
        ('{"d3091.cluster.edu": [0]}', [("d3091-cluster-edu", (0,))]),
        ('  [ "0  1" ;"0 1" ]  ', [(None, (0, 1)), (None, (0, 1))]),
    ],
)
def test_each_way_to_write_devices_is_read(text: str, expected: Groups) -> None:
    assert groups(text) == expected


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("", "there is no device", FORM),
        ("[]", "0 devices", "1 to 1,024"),
        ("{}", "0 groups", "1 to 1,000"),
        ('[""]', "0 devices", "1 to 1,024"),
        ("[-1]", "'-1]' is not part of a list", FORM),
        ("1.5", "'.5' is not part of a list", FORM),
        ("[0 1", "] is missing", FORM),
        ("{'a': [0]", "} is missing", "{'n1'"),
        ("{'a' [0]}", "a group has no node", "{'n1'"),
        ("{[0]: 1}", "a group has no node", "{'n1'"),
        ('[0 "1"]', "mixed", FORM),
        ('["a b"]', "'a' is not a device", "from 0 to 1,023"),
        ("1024", "device 1024", "from 0 to 1,023"),
        ("9999999999", "'9999999999' is not a device", "from 0 to 1,023"),
        ("[[[[[0]]]]]", "nested too deeply", FORM),
        ("[" * 100_000, "nested too deeply", FORM),
        ("{'a': {'b': [0]}}", "something else than devices", FORM),
        ("{'a': [0], 'a': [1]}", "node a stands there twice", "one group"),
        ("{'a.b': [0], 'a-b': [1]}", "node a-b stands there twice", "one group"),
        ("{'!': [0]}", "'!' is not the name of a node", "loom nodes"),
        (":", ": stands where a device is expected", FORM),
        ("]", "] stands where a device is expected", FORM),
        ("__import__('os').system('true')", "is not part of a list", FORM),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(text: str, said: str, hint: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_groups(text)
    assert said in refused.value.message
    assert hint in refused.value.hint


@given(st.text() | st.text(alphabet="[]{}()\"':,; 019ab-_."))
def test_any_text_is_groups_or_is_refused(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert 1 <= len(parse_groups(text)) <= 1000


_toml = st.recursive(
    st.integers() | st.text() | st.booleans() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(_toml)
def test_any_value_of_toml_is_groups_or_is_refused(value: object) -> None:
    with contextlib.suppress(BadInput):
        assert make_groups(value)  # type: ignore[arg-type]
