"""Verbs about values that change while a job runs: set, knobs, changes, revert, log-level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchloom.cli import completion_names
from torchloom.errors import BadInput

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs
    from torchloom.client import AsyncClient, Target
    from torchloom.protocol.operator import Done
    from torchloom.protocol.views import KnobsView


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "set", set_knobs, "change values of a running job, on all its ranks at one step or on none",
        "The answer says at which step it took effect, or who refused and why. A knob that each rank has for itself\n"
        "may be set on one: JOB/REPLICA/RANK.\n\n"
        "  loom set mnist lr=3e-4 clip=1.0\n  loom set mnist lr=0 --at-step 5000 --over 1000", listing=True,
    )  # fmt: skip
    verb.add_target()
    verb.add_argument(
        "values",
        nargs="+",
        metavar="NAME=VALUE",
        help="Knobs and values, as `loom knobs` lists them",
        complete=completion_names.complete_knob,
    )
    verb.add_argument("--at-step", type=step, metavar="N", help="Apply it when N steps are finished; default: soon")
    verb.add_replica("Change only this replica")
    verb.add_argument(
        "--over", type=step, default=0, metavar="STEPS", help="Move to the value over this number of steps"
    )
    verb.add_argument("--dry-run", action="store_true", help="Check the change and show what it would do")
    verb.add_argument(
        "--no-wait", action="store_true", help="Return when the change is committed, before it takes effect"
    )
    verb.add_timeout()

    verb = verbs.add(
        "knobs", show_knobs, "list the values of a job that can be changed: bounds, current value, last change",
        "  loom knobs mnist", listing=True,
    )  # fmt: skip
    verb.add_job()

    verb = verbs.add(
        "changes", show_changes, "list the changes of a job, newest first: who, when, from → to, step, outcome",
        "  loom changes mnist", listing=True,
    )  # fmt: skip
    verb.add_job()

    verb = verbs.add(
        "revert", revert, "undo a change: restore the values before it, on all ranks at one step",
        "  loom revert mnist c3", listing=True,
    )  # fmt: skip
    verb.add_job()
    verb.add_argument("change", metavar="CHANGE", complete=completion_names.complete_change)
    verb.add_timeout()

    verb = verbs.add(
        "log-level", log_level, "set the log level of the processes of a job: the knob log_level",
        "  loom log-level mnist debug", listing=True,
    )  # fmt: skip
    verb.add_target()
    verb.add_argument("level", metavar="LEVEL", help="One of debug, info, warning, error, critical")
    verb.add_timeout()


def step(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def set_knobs(call: Call) -> int:
    args = call.args
    return _set(
        call, parse_values(args.values), args.replica,
        at_step=args.at_step, over=args.over, dry_run=args.dry_run, wait=not args.no_wait,
    )  # fmt: skip


def log_level(call: Call) -> int:
    return _set(call, {"log_level": call.args.level.upper()})


def parse_values(words: Sequence[str]) -> dict[str, str]:
    """`name=value` for each knob, each once."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise BadInput(f"{word!r} is not NAME=VALUE", hint="such as lr=3e-4")
        if name in values:
            raise BadInput(f"{name} is given twice", hint="give one value")
        values[name] = text
    return values


def _set(call: Call, texts: dict[str, str], replica: str | None = None, **how: Any) -> int:
    target = _target(call.args.target, replica)

    async def work(weaver: AsyncClient) -> Done:
        values = await weaver.parse(target.job, texts)
        return await weaver.set(target.job, values, replica=target.replica, rank=target.rank, **how)

    return call.show_done(call.request(work))


def _target(text: str, replica: str | None) -> Target:
    from torchloom.client import parse_target
    from torchloom.protocol.ids import check_name

    target = parse_target(text)
    if replica is None:
        return target
    if target.replica not in {None, replica}:
        raise BadInput(f"--replica says {replica!r} and the target says {target.replica!r}", hint="give one of them")
    return target._replace(replica=check_name("replica", replica))


def revert(call: Call) -> int:
    return call.show_done(call.request(lambda weaver: weaver.revert(call.args.job, call.args.change)))


def show_knobs(call: Call) -> int:
    from torchloom.views.listings import knobs

    view, now = _look(call)
    return call.show(view.knobs, lambda: knobs(view.knobs, now, call.screen), f"job {call.args.job} offers no knobs")


def show_changes(call: Call) -> int:
    from torchloom.views.listings import changes

    view, now = _look(call)
    return call.show(view.changes, lambda: changes(view.changes, now, call.screen), "no changes yet")


def _look(call: Call) -> tuple[KnobsView, float]:
    """As a viewer: to see what was changed one need not be allowed to change."""
    from torchloom.protocol.ids import check_name

    job = check_name("job", call.args.job)

    async def look(weaver: WeaverClient) -> tuple[KnobsView, float]:
        cluster = await weaver.cluster(most=0)
        return await weaver.knobs(completion_names.known_job(cluster, job)), cluster.plane.now

    return call.query(look)
