"""One call of a verb: its arguments, the settings in force, and where and how its answer is printed."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torchloom.errors import BadInput

if TYPE_CHECKING:
    from torchloom.settings import Settings
    from torchloom.views.format.tables import Screen

T = TypeVar("T")


class Call:
    def __init__(self, args: Namespace) -> None:
        self.args = args

    def run(self) -> int:
        verb: Callable[[Call], int] = self.args.run
        return verb(self)

    @cached_property
    def settings(self) -> Settings:
        from torchloom.settings import Settings

        return Settings.from_env().with_state(self.args.state)

    @property
    def json(self) -> bool:
        return getattr(self.args, "output", "text") == "json"

    @cached_property
    def screen(self) -> Screen:
        """A terminal has a width and colours; a file or pipe gets every character and none of the colours."""
        from torchloom.views.format.tables import Screen

        if not sys.stdout.isatty():
            return Screen()
        size = shutil.get_terminal_size()
        colour = not (self.args.no_color or os.environ.get("NO_COLOR")) and os.environ.get("TERM") != "dumb"
        return Screen(size.columns, size.lines, colour)

    def print(self, lines: Iterable[str]) -> None:
        """Lines of text, as one write: a listing is not torn by another program's output."""
        text = "".join(f"{line}\n" for line in lines)
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # an ASCII terminal still gets its answer
            encoding = sys.stdout.encoding or "ascii"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))

    def print_json(self, value: object) -> None:
        """One document on one line."""
        from torchloom.views.format.json_document import document

        sys.stdout.write(document(value).decode() + "\n")

    def note(self, text: str) -> None:
        """Something beside the answer, on stderr, so that stdout stays clean for scripts."""
        print(text, file=sys.stderr, flush=True)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something asynchronous to its end."""
        import asyncio
        import logging

        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns at every TLS connection that nats-py closes
        return asyncio.run(work)

    def confirm(self, what: str) -> bool:
        """Ask before harm. Without a terminal there is nobody to ask, so --yes must have been given."""
        if self.args.yes:
            return True
        if not sys.stdin.isatty():
            raise BadInput(what, hint="there is no terminal to ask on: pass --yes to go ahead")
        self.note(what)
        return input("Go ahead? [y/N] ").strip().lower() in {"y", "yes"}
