"""The grammar of `loom`: its verbs, their options, and help that says what to type."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchloom import __version__
from torchloom.cli.call import Call
from torchloom.cli.verb_registry import Parser, Verbs, common, options_of, verbs_of
from torchloom.cli.verbs import (
    check_node,
    checkpoints,
    control_plane,
    devices,
    doctor,
    event_log,
    jobs,
    join,
    knobs,
    lighthouse,
    logs,
    nodes,
    run,
    settings,
    shell,
    status,
    steer,
    why,
)
from torchloom.errors import BadInput
from torchloom.shared.suggestions import did_you_mean, nearest

GROUPS = (
    control_plane, run, jobs, logs, nodes, lighthouse, status, why, event_log, knobs, steer, checkpoints, devices, join,
    doctor, check_node, settings, shell,
)  # fmt: skip
EXIT_CODES = """\
exit codes:
  0  done
  1  something went wrong (for `doctor` and `check-node`: a check failed)
  2  invalid input
  3  no control plane answers
  4  the weaver refused, or the name is unknown
  5  already running, or the port is in use
  6  the state folder or a credential cannot be used
  7  a newer weaver has taken over
  8  no checkpoint is valid
  124  `wait --timeout` expired before the job ended
  130  interrupted with Ctrl-C
  141  the reader of the output is gone
"""


def build(verb: str | None = None) -> Parser:
    """The parser of all verbs. Where a verb is named, others may lack options that take long to make."""
    parser = Parser(
        prog="loom",
        description="Monitor and control distributed PyTorch training.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"loom {__version__}")
    common(parser, top=True)
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    verbs = Verbs(subparsers, verb)
    for group in GROUPS:
        group.add(verbs)
    return parser


def parse(words: Sequence[str]) -> Call:
    verb = _verb(words)
    parser = build(verb)
    rest: list[str] = []
    if verb == "run":
        words, rest = run.split(verbs_of(parser)["run"], words)
    args, unknown = parser.parse_known_args(words)
    if rest:
        args.words = rest
    if unknown:
        raise _unknown(parser, args, unknown)
    if args.verb is None:
        parser.print_help()
        raise SystemExit(0)
    return Call(args, build)


def _verb(words: Sequence[str]) -> str:
    """The first word that is neither an option of `loom` itself nor its value."""
    skip = False
    for word in words:
        if skip or word.startswith("-"):
            skip = word == "--state"
            continue
        return word
    return ""


def _unknown(parser: argparse.ArgumentParser, args: argparse.Namespace, unknown: Sequence[str]) -> BadInput:
    verbs = verbs_of(parser)
    verb = verbs.get(args.verb or "", parser)
    longer = {name.partition(" ")[2]: verbs[name] for name in verbs if name.startswith(f"{args.verb} ")}
    word = unknown[0]
    if not word.startswith("-"):
        target = getattr(args, "target", "")
        near = nearest(target, list(longer))
        hint = did_you_mean(target, near) if near else f"`{verb.prog} --help` explains"
        return BadInput(f"`{verb.prog}` does not take {word!r}", hint=hint)
    word = word.partition("=")[0]
    owner = next((other.prog for other in longer.values() if word in options_of(other)), None)
    hint = f"`{owner}` has it" if owner else did_you_mean(word, options_of(verb))
    return BadInput(f"`{verb.prog}` has no option {word}", hint=hint)
