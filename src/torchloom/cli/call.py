"""One call of a verb: its arguments, the settings in force, and where and how its answer is printed."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torchloom.errors import BadInput, TorchLoomError

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.client import AsyncClient
    from torchloom.protocol.operator import Done
    from torchloom.settings import Settings
    from torchloom.views.format.tables import Screen

T = TypeVar("T")


class Call:
    def __init__(self, args: Namespace, build: Callable[[], ArgumentParser]) -> None:
        self.args = args
        self.build = build
        """Makes the parser of all verbs."""

    def run(self, run_line: Callable[[Sequence[str]], int]) -> int:
        """Run the verb; `run_line` runs another command line, for `loom shell`."""
        self.run_line = run_line
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

    def show(self, value: object, lines: Callable[[], Iterable[str]], empty: str = "") -> int:
        """The answer of a verb: a document with -o json, otherwise lines of text, or `empty` where there is nothing to
        list. The exit code is that of success."""
        if self.json:
            self.print_json(value)
        else:
            self.print([empty] if empty and not value else lines())
        return 0

    def show_done(self, done: Done) -> int:
        from torchloom.views.answers import answer

        return self.show(done, lambda: answer(done, self.screen))

    def query(self, work: Callable[[WeaverClient], Coroutine[Any, Any, T]], role: str = "viewer", **how: Any) -> T:
        """What `work` returns, given a connection to the weaver."""
        from torchloom.bus.weaver_client import WeaverClient
        from torchloom.protocol.subjects import Role

        async def connected() -> T:
            async with WeaverClient(self.settings, Role(role), **how) as weaver:
                return await work(weaver)

        return self.wait(connected())

    def request(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, given a client that sends a request again until --timeout, and reports once that it
        waits."""
        from torchloom.client import AsyncClient

        timeout, notes = self.args.timeout, [f"loom: waiting for the ranks, up to {self.args.timeout:g} s"]

        async def connected() -> T:
            on_wait = lambda: self.note(notes.pop()) if notes else None  # noqa: E731
            async with AsyncClient(self.settings, timeout=timeout, on_wait=on_wait) as client:
                return await work(client)

        return self.wait(connected())

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


def print_error(error: TorchLoomError) -> None:
    print(f"loom: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  → {error.hint}", file=sys.stderr)
