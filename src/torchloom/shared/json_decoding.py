"""Decoding JSON from outside of this process: bytes become a value of the expected type, or a msgspec.DecodeError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from torchloom.errors import BadState

T = TypeVar("T")


@overload
def decoder(kind: type[T]) -> Callable[[bytes], T]: ...
@overload
def decoder(kind: Any) -> Callable[[bytes], Any]: ...  # a union, for which Python has no type
def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Decode and validate this type. msgspec alone raises other errors for two kinds of damage, which callers miss."""
    decode = msgspec.json.Decoder(kind).decode

    def checked(data: bytes) -> Any:
        try:
            return decode(data)
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"text that is not UTF-8: {error}") from None
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None

    return checked


def read_file(path: Path, kind: type[T], hint: str) -> T | None:
    """What a file holds; None if there is none. BadState if it cannot be read or, with this hint, is damaged."""
    try:
        return decoder(kind)(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadState(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise BadState(f"{path} is damaged: {error}", hint=hint) from error
