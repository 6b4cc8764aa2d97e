"""How a verb is declared: its name, one line of summary, a description with an example, and the function it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchloom.cli.call import Call


class Verbs:
    def __init__(self, subparsers: Any, wanted: str | None = None) -> None:
        self._subparsers = subparsers
        self._wanted = wanted

    def wants(self, name: str) -> bool:
        """Whether the options of a verb are needed: if it was typed, or if all are to be shown."""
        return self._wanted in {None, name}

    def add(
        self, name: str, run: Callable[[Call], int], summary: str, more: str = "", *, listing: bool = False
    ) -> argparse.ArgumentParser:
        """A verb; a `listing` also has -o."""
        verb: argparse.ArgumentParser = self._subparsers.add_parser(
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
