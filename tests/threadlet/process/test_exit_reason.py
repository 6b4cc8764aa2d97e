"""How a goodbye reports an exception."""

from __future__ import annotations

import pytest

from torchloom.protocol.codec import decode_report, encode
from torchloom.protocol.rank import Goodbye
from torchloom.threadlet.process.exit_reason import MAX_ERROR, ending_of


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(), "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(3), "failed"),
        (SystemExit("no data"), "failed"),
        (ValueError("x"), "failed"),
        (Unprintable(), "failed"),
    ],
)
def test_an_end_has_one_of_three_words(error: BaseException | None, how: str) -> None:
    assert ending_of(error).how == how


def test_a_failure_says_what_and_where_however_long_its_text() -> None:
    try:
        raise ValueError("no such thing \udcff " * 1000)
    except ValueError as error:
        ending = ending_of(error)
    assert ending.error.startswith("ValueError: no such thing")
    assert "test_exit_reason.py:" in ending.error
    assert len(ending.error) <= MAX_ERROR
    decode_report(encode(Goodbye(incarnation="0" * 24, how="failed", error=ending.error)))


def test_an_exit_code_is_told() -> None:
    assert "3" in ending_of(SystemExit(3)).error
