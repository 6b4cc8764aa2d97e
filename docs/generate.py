"""Print the pages of docs/ that the code already says: settings, states, subjects, commands, trouble.

    python -m docs.generate           write them
    python -m docs.generate --check   exit with 1 if one is out of date, and name it

Nothing in these pages is written twice: a table that changes in the code changes here, or a test fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from docs import trouble
from docs.markdown import code, fenced, table
from torchloom.bus.authority import Authority
from torchloom.cli.parser import EXIT_CODES, build, verbs_of
from torchloom.core.presence import JOB_NEXT, PRESENT, RANK_NEXT, JobPhase, JobSign, Presence, Sign
from torchloom.messages import RankId
from torchloom.settings import ADDRESS_VARIABLES, documentation
from torchloom.subjects import STREAMS, SUBJECTS, Permissions, Role, Stream, permissions

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
        "Every setting is an environment variable, read once when a process starts. A process that runs keeps what it "
        "was started with. `loom settings` lists them with the value in force where you stand.",
        "",
        "Those that end in `_SECONDS` are seconds. A number must be above 0; a switch is `1` or `0`. An impossible "
        "value ends a command with exit code 2; in a training process it is told as a warning and the default is used.",
        "",
        f"For `{ADDRESS_VARIABLES[0]}` the older spellings {older} work too; the first that is set counts.",
        "",
        *table(
            ("variable", "default", "meaning"),
            ((code(name), code(default), meaning) for name, default, meaning in documentation()),
        ),
        "",
        "Not settings, but also read from the environment of a training process: `TORCHLOOM_JOB` and "
        "`TORCHLOOM_REPLICA` name it where `attach()` was not told. The command line follows `NO_COLOR`.",
    ]


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────

RANK_STATES = {
    Presence.LIVE: "It is connected and speaks.",
    Presence.LOST: "Its link closed, or it fell silent. That is news, not a verdict. It has a grace to come back.",
    Presence.DEAD: "Its grace is over. A presumption: if it is heard again, it is live again.",
    Presence.LEFT: "It said goodbye, or its process was seen to end with exit code 0. Nothing went wrong.",
    Presence.FAILED: "It said that it failed, or its process was seen to end badly. Final for this incarnation.",
}
JOB_STATES = {
    JobPhase.RUNNING: "At least one rank is live or lost, or the last one went only just now.",
    JobPhase.FINISHED: "All ranks left in good order.",
    JobPhase.STOPPED: "All ranks left, and at least one had been interrupted (Ctrl-C).",
    JobPhase.FAILED: "All ranks are gone, and at least one is dead or failed.",
}


def states() -> list[str]:
    present = " and ".join(code(presence) for presence in Presence if presence in PRESENT)
    return [
        "# States",
        "",
        "What a rank and a job can be, and what turns one into the other. The tables are those the weaver folds with; "
        "a pair that is not in a table cannot happen.",
        "",
        "## A rank",
        "",
        f"A rank begins as `{Presence.LIVE}` when its hello is read. The hello of a newer incarnation makes it "
        f"`{Presence.LIVE}` again from any state; an older incarnation is muted. A job counts on ranks that are "
        f"{present}.",
        "",
        *table(("state", "meaning"), ((code(state), text) for state, text in RANK_STATES.items())),
        "",
        *diagram(RANK_NEXT, Presence.LIVE, "said hello"),
        "",
        *transitions(RANK_NEXT, Presence, Sign),
        "",
        "## A job",
        "",
        f"A job begins as `{JobPhase.RUNNING}` with the first rank that joins it, and again if one joins after its "
        "end.",
        "",
        *table(("phase", "meaning"), ((code(state), text) for state, text in JOB_STATES.items())),
        "",
        *diagram(JOB_NEXT, JobPhase.RUNNING, JobSign.JOINED),
        "",
        *transitions(JOB_NEXT, JobPhase, JobSign),
    ]


def diagram(following: Mapping[tuple[StrEnum, StrEnum], StrEnum], first: StrEnum, why: str) -> list[str]:
    """The table as a picture, without the signs that change nothing."""
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
    Role.WEAVER: "the service that decides; keeper of the streams",
    Role.AGENT: "tells facts about processes and devices of a node",
    Role.THREADLET: "a training process; reports, never commands",
    Role.OPERATOR: "a person or a program that may ask for a change",
    Role.VIEWER: "may look, and nothing else",
}


def subjects() -> list[str]:
    return [
        "# Subjects, streams, permissions",
        "",
        "Everything said in torchLoom is said on one of these NATS subjects. Payloads are JSON; `src/torchloom/"
        "messages.py` holds every message. What each role may do on the server is computed from this table.",
        "",
        "## Subjects",
        "",
        *table(
            ("subject", "who speaks", "who listens", "why"),
            ((code(s.template), _roles(s.speakers), _roles(s.listeners), s.why) for s in SUBJECTS),
        ),
        "",
        "A name inside a subject has 1 to 128 characters out of `A-Z a-z 0-9 _ : -`.",
        "",
        "## Streams",
        "",
        "What JetStream keeps, on disk. The weaver makes the streams when it starts and brings their limits up to "
        "date. When a limit is reached, the oldest messages go; what the weaver knows is safe in a snapshot by then.",
        "",
        *table(
            ("stream", "keeps", "size", "age", "per subject", "read by", "why"),
            (_stream(stream) for stream in STREAMS),
        ),
        "",
        "## Permissions",
        "",
        "The roles:",
        "",
        *table(("role", "is"), ((code(role), text) for role, text in ROLES.items())),
        "",
        "What the server lets each do, and nothing else:",
        "",
        *table(("role", "may publish", "may subscribe"), (_allowed_row(role, permissions(role)) for role in Role)),
        "",
        "A credential can be narrowed to one rank. For rank 0 of `JOB/REPLICA` it is:",
        "",
        *table(
            ("role", "may publish", "may subscribe"),
            [_allowed_row(Role.THREADLET, permissions(Role.THREADLET, RANK))],
        ),
        "",
        "### The system account",
        "",
        "The weaver has a second credential, of a user in the server's system account. With it the weaver hears when a "
        "connection of torchLoom's account opens or closes, and asks who is connected. `ACCOUNT` is the public key of "
        "torchLoom's account.",
        "",
        *table(("credential", "may publish", "may subscribe"), [_allowed_row("system", system_permissions())]),
        "",
        "## The same for a server of your own",
        "",
        "For a nats-server without operator mode: merge this into its configuration and give each user a password. "
        "Clients then use `TORCHLOOM_ADDR=nats://weaver:PASSWORD@HOST:4222`, each with its own role.",
        "",
        *fenced("", server_config()),
    ]


def system_permissions() -> Permissions:
    """What the weaver's second credential says, of an authority made for the purpose."""
    authority = Authority.create()
    found = authority.system_permissions()
    return Permissions(
        tuple(s.replace(authority.account_key, "ACCOUNT") for s in found.publish),
        tuple(s.replace(authority.account_key, "ACCOUNT") for s in found.subscribe),
    )


def server_config(password: str = "change me") -> list[str]:
    """An account with a user for each role, as a nats-server configuration says it."""
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
    verbs = verbs_of(parser)
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
        "These may stand before or after the verb:",
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
    """Prose as prose; what stands indented is an example to type."""
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
        return "explain it"
    if action.dest == "output":
        return f"text for people or one JSON document for programs; {action.help}"
    return action.help or f"its name, as `loom {'map' if action.dest == 'replica' else action.dest + 's'}` lists it"


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────

PAGES: Mapping[str, Callable[[], list[str]]] = {
    "settings.md": settings,
    "states.md": states,
    "subjects.md": subjects,
    "cli.md": cli,
    "detection.md": trouble.detection,
    "policies.md": trouble.policies,
}


def page(name: str) -> str:
    return "\n".join([MARK, "", *PAGES[name](), ""])


def out_of_date() -> list[str]:
    """The pages that do not say what the code says."""
    return [name for name in PAGES if not (DOCS / name).is_file() or (DOCS / name).read_text("utf-8") != page(name)]


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
