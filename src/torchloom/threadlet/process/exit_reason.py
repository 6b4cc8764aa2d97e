"""Why a training process ends, as its Goodbye reports it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

MAX_ERROR = 2000


@dataclass(frozen=True)
class Ending:
    how: Literal["finished", "interrupted", "failed"] = "finished"
    error: str = ""


def ending_of(error: BaseException | None) -> Ending:
    """The ending that an exception at the top of the script stands for."""
    match error:
        case None:
            return Ending()
        case KeyboardInterrupt():
            return Ending("interrupted")
        case SystemExit(code=code):
            return Ending() if code in (None, 0) else Ending("failed", _bounded(f"exit code {code}"))
        case _:
            return Ending("failed", _bounded(_describe(error)))


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a user's exception may not even print
        text = "(cannot be printed)"
    frames = traceback.extract_tb(error.__traceback__, limit=-1)  # the last one: where it was raised
    place = f" ({frames[-1].filename[-300:]}:{frames[-1].lineno})" if frames else ""
    # The location follows the text and must not be cut off with it.
    return f"{type(error).__qualname__}: {text[: MAX_ERROR - 400]}{place}"


def _bounded(text: str) -> str:
    # Lone surrogates (undecodable file names) have no UTF-8.
    return text.encode("utf-8", "replace").decode()[:MAX_ERROR]
