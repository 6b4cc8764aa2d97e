"""How a verb is declared: its name, one line of summary, a description with an example, its arguments, and the function
that it runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torchloom.cli import completion_names
from torchloom.errors import BadInput
from torchloom.shared.suggestions import did_you_mean

if TYPE_CHECKING:
    from torchloom.cli.call import Call


class Parser(argparse.ArgumentParser):
    """argparse that raises our errors, suggests what was meant, and has the arguments that several verbs share."""

    def add_argument(
        self, *names: str, complete: Callable[..., list[str]] | None = None, **how: Any
    ) -> argparse.Action:
        """`complete` gives the names that the shell offers."""
        action = super().add_argument(*names, **how)
        if complete is not None:
            action.completer = complete  # type: ignore[attr-defined]  # where argcomplete looks
        return action

    def add_job(self, name: str = "job", **how: Any) -> None:
        self.add_argument(name, metavar="JOB", complete=completion_names.complete_job, **how)

    def add_run(self, **how: Any) -> None:
        """A job that torchLoom started."""
        self.add_argument("job", metavar="JOB", complete=completion_names.complete_run, **how)

    def add_target(self) -> None:
        self.add_argument(
            "target", metavar="TARGET", help="JOB, JOB/REPLICA or JOB/REPLICA/RANK",
            complete=completion_names.complete_target,
        )  # fmt: skip

    def add_replica(self, text: str = "Show only this replica") -> None:
        self.add_argument("--replica", metavar="REPLICA", help=text, complete=completion_names.complete_replica)

    def add_yes(self) -> None:
        self.add_argument("-y", "--yes", action="store_true", help="Do not ask for confirmation")

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


class Verbs:
    def __init__(self, subparsers: Any, wanted: str | None = None) -> None:
        self._subparsers = subparsers
        self._wanted = wanted

    def wants(self, name: str) -> bool:
        """Whether the options of a verb are needed: if it was typed, or if all are to be shown."""
        return self._wanted in {None, name}

    def add(
        self, name: str, run: Callable[[Call], int], summary: str, more: str = "", *, listing: bool = False
    ) -> Parser:
        """A verb; a `listing` also has -o."""
        verb: Parser = self._subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{more}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        common(verb, top=False)
        if listing:
            verb.add_argument(
                "-o", "--output", choices=["text", "json"], default="text", help="Output format; default: text"
            )
        verb.set_defaults(run=run)
        return verb


def common(parser: argparse.ArgumentParser, *, top: bool) -> None:
    """Options that may stand before or after the verb. After it they have no default, or it would undo the former."""
    parser.add_argument(
        "--state",
        metavar="PATH",
        default=None if top else argparse.SUPPRESS,
        help="State folder (default: TORCHLOOM_STATE, else ~/.local/state/torchloom)",
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        default=False if top else argparse.SUPPRESS,
        help="Print without colours, even on a terminal (also: NO_COLOR)",
    )


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
