"""The grammar of `loom`: its verbs, their options, and help that says what to type."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module

from torchloom import __version__
from torchloom.cli.verb_call import Call, Parser, options_of
from torchloom.errors import BadInput
from torchloom.shared.suggestions import did_you_mean, nearest

VERBS: Mapping[str, tuple[str, str]] = {
    "up": ("services", "start the control plane: nats-server and weaver"),
    "down": ("services", "stop the control plane of this state folder"),
    "weaver": ("services", "run the weaver alone, on an existing NATS server"),
    "run": ("run", "run a script, watch it, and restart it from its last valid checkpoint when it fails"),
    "submit": ("jobs", "submit a job to machines with agents; it starts as soon as there is room"),
    "wait": ("jobs", "wait until a job has ended, and exit with its result"),
    "cancel": ("jobs", "end a job that torchLoom started, without a restart"),
    "logs": ("logs", "show what the ranks of a job that torchLoom started have printed"),
    "agent": ("services", "let this machine run jobs that the control plane starts"),
    "nodes": ("nodes", "list the machines that run agents: their devices, and what runs on them"),
    "drain": ("nodes", "start no more ranks on a machine, or let a replica under torchft leave until --undo"),
    "lighthouse": ("services", "run a lighthouse for torchft replicas that learns at once when one of them dies"),
    "status": ("status", "show everything, or one job, on one screen"),
    "jobs": ("status", "list the jobs"),
    "devices": ("status", "list the devices, their health, how busy and how hot they are, and the replicas on them"),
    "map": ("status", "show which replicas are on which devices, and which devices each replica has"),
    "incidents": ("status", "list what went wrong, newest first"),
    "curves": ("status", "draw the history of a job: step, loss and samples/s of each rank"),
    "trace": ("job_traces", "follow jobs and write what they do over time: CSV files and a picture"),
    "why": ("why", "explain what went wrong with a job, what was done about it, and what it cost"),
    "policy": ("why", "show which response follows each kind of incident in a job"),
    "events": ("event_log", "show what happened, oldest first"),
    "set": ("knobs", "change values of a running job, on all its ranks at one step or on none"),
    "knobs": ("knobs", "list the values of a job that can be changed: bounds, current value, last change"),
    "changes": ("knobs", "list the changes of a job, newest first: who, when, from → to, step, outcome"),
    "revert": ("knobs", "undo a change: restore the values before it, on all ranks at one step"),
    "schedule": ("loaders", "show which loaders each job has and why, or change by which rules they are allocated"),
    "predict": ("loaders", "show the throughput of a job with other numbers of loaders"),
    "log-level": ("knobs", "set the log level of the processes of a job: the knob log_level"),
    "pause": ("steer", "pause training at a common step, on all ranks that train together"),
    "resume": ("steer", "continue paused training"),
    "checkpoint": ("steer", "save a checkpoint of a job now, at a common step"),
    "stop": ("steer", "end training cleanly: all ranks leave their loop after the same step"),
    "kill": ("steer", "end training processes at once, without asking them"),
    "evict": ("steer", "kill a replica under torchft while the others continue, and restart it"),
    "stacks": ("steer", "show where every thread of every rank is"),
    "annotate": ("steer", "add a note to a job: `events`, `why` and `curves` show it"),
    "checkpoints": ("checkpoints", "list the checkpoints of a job or in a folder, and which one a resume takes"),
    "checkpoints prune": ("checkpoints", "delete the checkpoints that a rule does not keep"),
    "fail": ("devices", "report a device as failed, as a monitoring system would"),
    "recover": ("devices", "report a failed device as working again"),
    "register": ("devices", "record by hand that a replica uses a device"),
    "token": ("join", "print a token with which another machine joins this control plane"),
    "token ingress": ("join", "print the token with which a monitoring system reports devices"),
    "join": ("join", "make commands and training on this machine use the control plane of another"),
    "doctor": ("installation", "check this installation, with a remedy for each problem"),
    "check-node": ("nodes", "check whether machines are fit for training, with a remedy for each problem"),
    "settings": ("installation", "list every setting: its variable, value in force, default and meaning"),
    "shell": ("shell", "run verbs at a prompt"),
    "completion": ("shell", "print the script that makes the shell complete verbs and names"),
}
"""Each verb with its module in `cli.verbs`, which is imported only if the verb is typed, and its summary."""
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
    """The parser of all verbs. Where a verb is named, those of other modules lack their options."""
    parser = Parser(prog="loom", description="Monitor and control distributed PyTorch training.", epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"loom {__version__}")
    parser.add_common(top=True)
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    parser.verbs = {
        name: subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        for name, (_, summary) in VERBS.items()
    }
    for module in dict.fromkeys(module for name, (module, _) in VERBS.items() if verb in {None, name}):
        import_module(f"torchloom.cli.verbs.{module}").add(parser.verbs)
    return parser


def parse(words: Sequence[str]) -> Call:
    verb = typed_verb(words)
    parser = build(verb)
    rest: list[str] = []
    if verb == "run":
        from torchloom.cli.verbs.run import split

        words, rest = split(parser.verbs["run"], words)
    args, unknown = parser.parse_known_args(words)
    if rest:
        args.words = rest
    if unknown:
        raise _unknown(parser, args, unknown)
    if args.verb is None:
        parser.print_help()
        raise SystemExit(0)
    return Call(args)


def typed_verb(words: Sequence[str]) -> str:
    """The first word that is neither an option of `loom` itself nor its value."""
    skip = False
    for word in words:
        if skip or word.startswith("-"):
            skip = word == "--state"
            continue
        return word
    return ""


def _unknown(parser: Parser, args: argparse.Namespace, unknown: Sequence[str]) -> BadInput:
    verbs = parser.verbs
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
    options = {option.lstrip("-"): option for option in options_of(verb)}  # dashes make any two alike
    near = [options[name] for name in nearest(word.lstrip("-"), list(options), cutoff=0.6)]
    after = "; options of the script come after it" if args.verb == "run" else ""
    hint = f"did you mean {' or '.join(near)}?" if near else f"`{verb.prog} --help` lists them{after}"
    return BadInput(f"`{verb.prog}` has no option {word}", hint=f"`{owner}` has it" if owner else hint)
