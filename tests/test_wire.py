"""The wire is a contract: what older and newer versions say to each other. A change here must be a decision.

New fields need a default; a field that goes, or changes its meaning, needs a new name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom import protocol
from torchloom.errors import BadName
from torchloom.protocol.codec import decode_ask, decode_beat, decode_command, decode_fact, decode_report, encode
from torchloom.protocol.ids import RankId, check_name
from torchloom.protocol.permissions import permissions
from torchloom.protocol.rank import Beat, Hello
from torchloom.protocol.subjects import BEAT, Role

CONTRACT = Path(__file__).with_name("wire.txt")


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every struct of the protocol, by its name, which is given once."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.name:
                assert name not in found, f"{name} is in two modules"
                found[name] = kind
    return found


def contract() -> str:
    """Every message: its fields, those that may be absent marked."""
    lines = []
    for name, kind in sorted(structs().items()):
        fields = [field.name + ("" if field.required else "?") for field in msgspec.structs.fields(kind)]
        lines.append(f"{name}: {' '.join(fields)}")
    return "\n".join(lines) + "\n"


def test_the_fields_of_every_message_are_as_agreed() -> None:
    assert contract() == CONTRACT.read_text(), "if this is meant, write tests/wire.txt anew: python -m tests.test_wire"


def test_every_message_can_be_told_by_its_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in structs().values() if kind.__struct_config__.tag is not None]
    assert len(tags) == len(set(tags))


def test_unknown_fields_are_ignored_and_unknown_tags_refused() -> None:
    data = b'{"is":"Beat","incarnation":"0123456789abcdef01234567","step":3,"mood":"fine"}'
    assert decode_beat(data).step == 3
    with pytest.raises(msgspec.ValidationError):
        decode_report(b'{"is":"Dance","incarnation":"0123456789abcdef01234567"}')


@given(st.text(max_size=200))
def test_a_name_that_could_be_subject_syntax_is_refused(text: str) -> None:
    try:
        name = check_name("job", text)
    except BadName:
        return
    assert not set(name) & set(".*> \t\r\n$")
    assert 1 <= len(name) <= 128
    assert BEAT.to(job=name, replica="r", rank=0).count(".") == 4


@given(st.binary(max_size=300))
def test_no_bytes_make_a_decoder_do_anything_but_refuse(data: bytes) -> None:
    for decode in (decode_beat, decode_report, decode_ask, decode_command, decode_fact):
        with pytest.raises(msgspec.MsgspecError):
            decode(b"\x00" + data)


def test_a_rank_may_speak_only_as_itself() -> None:
    allowed = permissions(Role.THREADLET, RankId("job", "hi", 3))
    assert all("*" not in subject or subject.startswith("loom.verdict.job.") for subject in allowed.publish)
    assert not any(subject.startswith("loom.command") for subject in allowed.publish)


def test_a_message_is_the_same_after_the_wire() -> None:
    hello = Hello(incarnation="0" * 24, node="n", pid=1, devices=("GPU-1",))
    assert decode_report(encode(hello)) == hello
    beat = Beat(incarnation="0" * 24, step=1, loss=0.5, metrics={"a": 1.0}, not_finite=("b",))
    assert decode_beat(encode(beat)) == beat


if __name__ == "__main__":
    CONTRACT.write_text(contract())
