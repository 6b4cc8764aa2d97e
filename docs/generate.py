"""Generate the pages of docs/ that repeat tables of the code: settings, states, subjects, commands, incidents.

    python -m docs.generate           write the pages
    python -m docs.generate --check   exit with 1 if a page is out of date, and name it

A test fails when a table changes in the code and the page is not generated again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from docs import jobs, packages, traces, trouble
from docs.markdown import code, fenced, table
from torchloom.bus.credentials import Authority
from torchloom.cli.parser import EXIT_CODES, build
from torchloom.core.state.rank_states import JOB_NEXT, PRESENT, RANK_NEXT, JobPhase, JobSign, Presence, Sign
from torchloom.core.state.run_states import RUN_NEXT, RunPhase, RunSign
from torchloom.protocol.ids import RankId
from torchloom.protocol.permissions import Permissions, permissions
from torchloom.protocol.subjects import STREAMS, SUBJECTS, Role, Stream
from torchloom.settings import ADDRESS_VARIABLES, documentation

DOCS = Path(__file__).parent
MARK = "<!-- Printed by `python -m docs.generate`. Change the code, not this page. -->"
_MB = 1024 * 1024
_DAY = 86_400


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings() -> list[str]:
    older = " and ".join(code(name) for name in ADDRESS_VARIABLES[1:])
    return [
        "# Settings",
        "",
        "Every setting is an environment variable, read once when a process starts. A running process keeps the values "
        "it was started with. `loom settings` lists all settings with their values in the current environment.",
        "",
        "Names that end in `_SECONDS` are in seconds. A number must be above 0; a switch is `1` or `0`. With an "
        "invalid value a command exits with 2; a training process prints a warning and uses the default.",
        "",
        f"For `{ADDRESS_VARIABLES[0]}` the older names {older} work too; the first that is set is used.",
        "",
        *table(
            ("variable", "default", "meaning"),
            ((code(name), code(default), meaning) for name, default, meaning in documentation()),
        ),
        "",
        "A training process also reads `TORCHLOOM_JOB` and `TORCHLOOM_REPLICA`, which name it if the arguments of "
        "`attach()` do not. They are not settings. The command line respects `NO_COLOR`.",
    ]


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────

RANK_STATES = {
    Presence.LIVE: "It is connected and sends messages.",
    Presence.LOST: "Its connection closed, or it sends no messages. It has a grace period to return.",
    Presence.DEAD: "Its grace period is over. If it sends a message again, it is live again.",
    Presence.LEFT: "It said goodbye, or an agent saw its process exit with code 0. This is not an error.",
    Presence.FAILED: "It reported a failure, or an agent saw its process fail. Final for this incarnation.",
}
JOB_STATES = {
    JobPhase.RUNNING: "At least one rank is live or lost, or the last one ended only a moment ago.",
    JobPhase.FINISHED: "All ranks left without an error.",
    JobPhase.STOPPED: "All ranks left, and at least one had been interrupted (Ctrl-C).",
    JobPhase.FAILED: "All ranks are gone, and at least one is dead or failed.",
}

RUN_STATES = {
    RunPhase.SUBMITTED: "It has not arrived, or waits for room for all its ranks.",
    RunPhase.PLACING: "It has its nodes and devices; the agent of rank 0 looks for a port and a checkpoint.",
    RunPhase.STARTING: "Agents start its ranks.",
    RunPhase.RUNNING: "All ranks run.",
    RunPhase.PAUSED: "All ranks run and are paused (`loom pause`). It keeps its devices.",
    RunPhase.STOPPING: "All ranks are being ended.",
    RunPhase.RESTARTING: "No process is left. It waits before the next attempt, or for room.",
    RunPhase.RELEASED: "It has saved a checkpoint and given its devices back (`loom pause --release`).",
    RunPhase.DONE: "All ranks ended well.",
    RunPhase.FAILED: "A rank failed, and no further attempt is made.",
    RunPhase.CANCELLED: "It was cancelled, and no process is left.",
}


def states() -> list[str]:
    present = " and ".join(code(presence) for presence in Presence if presence in PRESENT)
    return [
        "# States",
        "",
        "This page lists the states of a rank, of a job, and of a job that torchLoom starts, and the events that "
        "change them. The weaver uses the same tables; a pair that is not in a table cannot happen.",
        "",
        "## A rank",
        "",
        f"A rank is `{Presence.LIVE}` when the weaver has read its hello. The hello of a newer incarnation makes it "
        f"`{Presence.LIVE}` again from any state; an older incarnation is muted. Ranks that are {present} count as "
        "present in their job.",
        "",
        *table(("state", "meaning"), ((code(state), text) for state, text in RANK_STATES.items())),
        "",
        *diagram(RANK_NEXT, Presence.LIVE, "said hello"),
        "",
        *transitions(RANK_NEXT, Presence, Sign),
        "",
        "## A job",
        "",
        f"A job is `{JobPhase.RUNNING}` when its first rank joins, and again if a rank joins after its end.",
        "",
        *table(("phase", "meaning"), ((code(state), text) for state, text in JOB_STATES.items())),
        "",
        *diagram(JOB_NEXT, JobPhase.RUNNING, JobSign.JOINED),
        "",
        *transitions(JOB_NEXT, JobPhase, JobSign),
        "",
        "## A job that torchLoom starts",
        "",
        "While it is not over, `loom jobs` shows these phases of such a job, unless its ranks run. Under torchft each "
        "replica has its own.",
        "",
        *table(("phase", "meaning"), ((code(state), text) for state, text in RUN_STATES.items())),
        "",
        *diagram(RUN_NEXT, RunPhase.SUBMITTED, "submitted"),
        "",
        *transitions(RUN_NEXT, RunPhase, RunSign),
    ]


def diagram(following: Mapping[tuple[StrEnum, StrEnum], StrEnum], first: StrEnum, why: str) -> list[str]:
    """The table as a diagram, without the signs that change nothing."""
    arrows: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for (state, sign), after in following.items():
        if after != state:
            arrows.setdefault((state, after), []).append(sign)
    lines = ["stateDiagram-v2", f"    [*] --> {first}: {why}"]
    lines += [f"    {state} --> {after}: {' / '.join(signs)}" for (state, after), signs in arrows.items()]
    return fenced("mermaid", lines)


def transitions(
    following: Mapping[tuple[StrEnum, StrEnum], StrEnum], all_states: type[StrEnum], all_signs: type[StrEnum]
) -> list[str]:
    """The whole table: a row for each state, a column for each sign; `-` where the pair cannot happen."""
    rows = (
        [code(state), *(str(following.get((state, sign), "-")) for sign in all_signs)] for state in list(all_states)
    )
    return table(("in", *(str(sign) for sign in all_signs)), rows)


# ── subjects ─────────────────────────────────────────────────────────────────────────────────────────────────────────

RANK = RankId("JOB", "REPLICA", 0)
ROLES = {
    Role.WEAVER: "the service that makes decisions; owns the streams",
    Role.AGENT: "reports facts about processes and devices of a node",
    Role.THREADLET: "a training process; reports, never commands",
    Role.OPERATOR: "a person or a program that may request changes",
    Role.VIEWER: "may only read",
}


def subjects() -> list[str]:
    return [
        "# Subjects, streams, permissions",
        "",
        "All messages in torchLoom use one of these NATS subjects. Payloads are JSON; `src/torchloom/protocol` "
        "defines every message. The permissions of each role on the server are computed from this table.",
        "",
        "## Subjects",
        "",
        *table(
            ("subject", "sent by", "received by", "purpose"),
            ((code(s.template), _roles(s.speakers), _roles(s.listeners), s.why) for s in SUBJECTS),
        ),
        "",
        "A name inside a subject has 1 to 128 characters from `A-Z a-z 0-9 _ : -`.",
        "",
        "## Streams",
        "",
        "JetStream keeps these streams on disk. When the weaver starts, it creates them and updates their limits. When "
        "a limit is reached, the oldest messages are deleted; by then a snapshot contains the state of the weaver.",
        "",
        *table(
            ("stream", "subjects", "size", "age", "per subject", "read by", "purpose"),
            (_stream(stream) for stream in STREAMS),
        ),
        "",
        "## Permissions",
        "",
        "The roles:",
        "",
        *table(("role", "is"), ((code(role), text) for role, text in ROLES.items())),
        "",
        "The server allows each role exactly this:",
        "",
        *table(("role", "may publish", "may subscribe"), (_allowed_row(role, permissions(role)) for role in Role)),
        "",
        "A credential can be limited to one rank. For rank 0 of `JOB/REPLICA` it allows:",
        "",
        *table(
            ("role", "may publish", "may subscribe"),
            [_allowed_row(Role.THREADLET, permissions(Role.THREADLET, RANK))],
        ),
        "",
        "### The system account",
        "",
        "The weaver has a second credential, of a user in the server's system account. With it the weaver is notified "
        "when a connection of torchLoom's account opens or closes, and can list the connected clients. `ACCOUNT` is "
        "the public key of torchLoom's account.",
        "",
        *table(("credential", "may publish", "may subscribe"), [_allowed_row("system", system_permissions())]),
        "",
        "## The same for a server of your own",
        "",
        "For a nats-server without operator mode, merge this into its configuration and set a password for each user. "
        "Clients then use `TORCHLOOM_ADDR=nats://weaver:PASSWORD@HOST:4222`, each with the name of its role.",
        "",
        *fenced("", server_config()),
    ]


def system_permissions() -> Permissions:
    """The permissions of the weaver's second credential, taken from a new authority."""
    authority = Authority.create()
    found = authority.system_permissions()
    return Permissions(
        tuple(s.replace(authority.account_key, "ACCOUNT") for s in found.publish),
        tuple(s.replace(authority.account_key, "ACCOUNT") for s in found.subscribe),
    )


def server_config(password: str = "change me") -> list[str]:
    """A nats-server configuration with an account and a user for each role."""
    lines = ["accounts {", "  LOOM {", "    jetstream: enabled", "    users: ["]
    for role in Role:
        allowed = permissions(role)
        lines += [
            f'      {{ user: {role}, password: "{password}", permissions: {{',
            f"        publish: [{_quoted(allowed.publish)}]",
            f"        subscribe: [{_quoted(allowed.subscribe)}]",
            "      } }",
        ]
    return [*lines, "    ]", "  }", "}"]


def _quoted(subjects: Iterable[str]) -> str:
    return ", ".join(f'"{subject}"' for subject in subjects)


def _roles(roles: Iterable[Role]) -> str:
    found = set(roles)
    return ", ".join(role for role in Role if role in found) or "-"


def _stream(stream: Stream) -> list[str]:
    return [
        code(stream.name),
        ", ".join(code(subject.pattern()) for subject in stream.subjects),
        f"{stream.max_bytes // _MB} MB",
        _days(stream.max_age_seconds) if stream.max_age_seconds else "no limit",
        f"{stream.max_per_subject:,}" if stream.max_per_subject > 0 else "no limit",
        _roles({*stream.readers, Role.WEAVER}),
        stream.why,
    ]


def _days(seconds: float) -> str:
    days = seconds / _DAY
    return f"{days:g} day{'' if days == 1 else 's'}"


def _allowed_row(name: str, allowed: Permissions) -> list[str]:
    return [code(name), "<br>".join(map(code, allowed.publish)), "<br>".join(map(code, allowed.subscribe))]


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def cli() -> list[str]:
    parser = build()
    verbs = parser.verbs
    summaries = {name: (verb.description or "").partition("\n")[0] for name, verb in verbs.items()}
    codes = [line.strip().partition("  ") for line in EXIT_CODES.splitlines()[1:] if line.strip()]
    lines = [
        "# Commands",
        "",
        str(parser.description),
        "",
        *table(
            ("verb", "what it does"),
            ((f"[`{name}`](#loom-{name.replace(' ', '-')})", text) for name, text in summaries.items()),
        ),
        "",
        "These options may come before or after the verb:",
        "",
        *_options(_shared(parser)),
        "",
        "## Exit codes",
        "",
        *table(("code", "meaning"), ((code(number), text.strip()) for number, _, text in codes)),
    ]
    shared = {option for action in _shared(parser) for option in action.option_strings}
    for name, verb in verbs.items():
        own = [a for a in verb._actions if not a.option_strings or not shared.issuperset(a.option_strings)]
        lines += ["", f"## loom {name}", "", *_description(verb)]
        if own:
            lines += ["", *_options(own)]
    return lines


def _shared(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if a.option_strings and "--version" not in a.option_strings]


def _description(verb: argparse.ArgumentParser) -> list[str]:
    """The description of a verb; indented lines are commands."""
    lines: list[str] = []
    typed = False
    for line in (verb.description or "").splitlines():
        example = line.startswith("  ")
        if example and not typed:
            lines += ["```sh"]
        if typed and not example:
            lines += ["```"]
        typed = example
        lines.append(line[2:] if example else line)
    return [*lines, "```"] if typed else lines


def _options(actions: Iterable[argparse.Action]) -> list[str]:
    return table(("option", "meaning"), ((_option(action), _help(action)) for action in actions))


def _option(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        value = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    return code(" ".join(filter(None, [", ".join(action.option_strings), value])))


def _help(action: argparse.Action) -> str:
    if action.dest == "help":
        return "show the help"
    if action.dest == "output":
        return f"text for people or one JSON document for programs; {action.help}"
    return action.help or f"its name, as `loom {'map' if action.dest == 'replica' else action.dest + 's'}` lists it"


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────

PAGES: Mapping[str, Callable[[], list[str]]] = {
    "settings.md": settings,
    "states.md": states,
    "subjects.md": subjects,
    "cli.md": cli,
    "job-file.md": jobs.job_file,
    "detection.md": trouble.detection,
    "policies.md": trouble.policies,
}


PARTS: Mapping[str, Callable[[str], str]] = {
    "tour.md": packages.with_diagram,
    "workloads.md": traces.with_tables,
}
"""Pages that are written by hand, but for a part."""


def page(name: str) -> str:
    if name in PARTS:
        return PARTS[name]((DOCS / name).read_text("utf-8"))
    return "\n".join([MARK, "", *PAGES[name](), ""])


def out_of_date() -> list[str]:
    """The pages that differ from the code."""
    return [
        name
        for name in (*PAGES, *PARTS)
        if not (DOCS / name).is_file() or (DOCS / name).read_text("utf-8") != page(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    old = out_of_date()
    if parser.parse_args().check:
        for name in old:
            print(f"docs/{name} is out of date: run `python -m docs.generate`", file=sys.stderr)
        return 1 if old else 0
    for name in old:
        (DOCS / name).write_text(page(name), "utf-8")
        print(f"docs/{name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
