"""What a verb is made of: the `Parser` that declares it, and a `Call` of it, with its arguments, the settings in force,
and where and how its answer is printed."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from torchloom.errors import BadInput, TorchLoomError
from torchloom.shared.suggestions import did_you_mean

if TYPE_CHECKING:  # help, completion and verbs that ask nobody do not wait for these imports
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.client import AsyncClient
    from torchloom.protocol.operator import Ask, Done
    from torchloom.settings import Settings
    from torchloom.views.format.tables import Screen

T = TypeVar("T")
MOST_CHARACTERS = 1000
"""Of an error that is printed."""


class Parser(argparse.ArgumentParser):
    """argparse that raises our errors, suggests what was meant, and has the arguments that several verbs share."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)
        self.verbs: Verbs = {}

    def define(self, run: Callable[[Call], int], *examples: str, output: bool = True) -> Self:
        """Make a verb of it: the docstring of the function that it runs and the examples explain it, after the summary.
        Most have -o."""
        first, _, rest = (run.__doc__ or "").partition("\n")
        text = f"{first}\n{textwrap.dedent(rest)}".strip()
        indented = "\n".join(f"  {example}" for example in examples)
        self.description = "\n\n".join(filter(None, (self.description, text, indented)))
        self.add_common(top=False)
        if output:
            self.add_argument(
                "-o", "--output", choices=["text", "json"], default="text", help="Output format; default: text"
            )
        self.set_defaults(run=run)
        return self

    def add_argument(self, *names: str, complete: Callable[..., list[str]] | str = "", **how: Any) -> argparse.Action:
        """`complete` gives what the shell offers, or says which names those are."""
        if not names[0].startswith("-"):
            how.setdefault("metavar", names[0].upper())
        action = super().add_argument(*names, **how)
        if complete:  # argcomplete looks there
            action.completer = partial(_complete, complete) if isinstance(complete, str) else complete  # type: ignore[attr-defined]
        return action

    def add_common(self, *, top: bool) -> None:
        """Options that may stand before or after the verb. After it they have no default, or it would undo the
        former."""
        self.add_argument(
            "--state", metavar="PATH", default=None if top else argparse.SUPPRESS,
            help="State folder (default: TORCHLOOM_STATE, else ~/.local/state/torchloom)",
        )  # fmt: skip
        self.add_argument(
            "--no-color", action="store_true", default=False if top else argparse.SUPPRESS,
            help="Print without colours, even on a terminal (also: NO_COLOR)",
        )  # fmt: skip

    def add_flag(self, *names: str, help: str) -> None:
        self.add_argument(*names, action="store_true", help=help)

    def add_job(self, name: str = "job", **how: Any) -> None:
        self.add_argument(name, complete="job", **how)

    def add_run(self, **how: Any) -> None:
        """A job that torchLoom started."""
        self.add_argument("job", complete="run", **how)

    def add_target(self) -> None:
        self.add_argument("target", help="JOB, JOB/REPLICA or JOB/REPLICA/RANK", complete="target")

    def add_replica(self, text: str = "Show only this replica") -> None:
        self.add_argument("--replica", help=text, complete="replica")

    def add_yes(self) -> None:
        self.add_flag("-y", "--yes", help="Do not ask for confirmation")

    def add_timeout(self) -> None:
        self.add_argument(
            "--timeout", type=seconds, default=30.0, metavar="S",
            help="Seconds to retry while the weaver does not answer; default: 30",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise BadInput(message, hint=f"`{self.prog} --help` explains")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """A verb may have two words: `checkpoints prune` is another one than `checkpoints`."""
        both = " ".join(arg_strings[:2])
        if isinstance(action, argparse._SubParsersAction) and both in action.choices:
            arg_strings = [both, *arg_strings[2:]]
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            what = "verb" if isinstance(action, argparse._SubParsersAction) else action.metavar or action.dest
            raise BadInput(f"there is no {what} {value!r}", hint=did_you_mean(str(value), choices))


Verbs = dict[str, Parser]
"""The parser of each verb, by its name."""


def _complete(what: str, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    from torchloom.cli.completion_names import complete

    return complete(what, prefix, parsed_args)


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


class Call:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

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
        import shutil

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

    def ask(self, ask: Ask) -> int:
        """Send a request, again until --timeout if the verb has that option, and show the answer."""
        timeout = getattr(self.args, "timeout", 0.0)
        return self.show_done(self.query(lambda weaver: weaver.ask(ask, timeout), "operator"))

    def request(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, given a client that sends a request again until --timeout, and reports once that it
        waits. It sends once if the verb has no --timeout."""
        from torchloom.client import AsyncClient

        timeout = getattr(self.args, "timeout", 0.0)
        notes = [f"loom: waiting for the ranks, up to {timeout:g} s"]

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

    def confirm(self, question: Callable[[], str], otherwise: str = "nothing was done") -> bool:
        """Ask before harm. Without a terminal there is nobody to ask, so --yes must have been given."""
        if self.args.yes:
            return True
        text = question()
        if not sys.stdin.isatty():
            raise BadInput(text, hint="there is no terminal to ask on: pass --yes to go ahead")
        self.note(text)
        agreed = input("Go ahead? [y/N] ").strip().lower() in {"y", "yes"}
        if not agreed:
            self.note(otherwise)
        return agreed


def print_error(error: TorchLoomError) -> None:
    text = error.message
    if len(text) > MOST_CHARACTERS:  # it quotes what was typed
        text = f"{text[: MOST_CHARACTERS // 2]} … {text[-MOST_CHARACTERS // 2 :]}"
    print(f"loom: {text}", file=sys.stderr)
    if error.hint:
        print(f"  → {error.hint}", file=sys.stderr)
