"""Verbs about values that change while a job runs: set, knobs, changes, revert, log-level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from torchloom.cli.known_names import known_job
from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput
from torchloom.protocol.ids import check_name
from torchloom.protocol.operator import Done, LrRule
from torchloom.protocol.views import KnobsView
from torchloom.views import listings

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.client import AsyncClient, Target


def add(verbs: Verbs) -> None:
    examples = (
        "loom set mnist lr=3e-4 clip=1.0",
        "loom set mnist lr=0 --at-step 5000 --over 1000",
        "loom set mnist batch_size=128 --lr-rule linear",
    )
    verb = verbs["set"].define(set_knobs, *examples)
    verb.add_target()
    what = "Knobs and values, as `loom knobs` lists them"
    verb.add_argument("values", nargs="+", metavar="NAME=VALUE", help=what, complete="knob")
    verb.add_argument("--at-step", type=step, metavar="N", help="Apply it when N steps are finished; default: soon")
    verb.add_replica("Change only this replica")
    steps = "Move to the value over this number of steps"
    verb.add_argument("--over", type=step, default=0, metavar="STEPS", help=steps)
    same = "With batch_size: change accumulation too, so that a step has as many samples"
    verb.add_flag("--keep-global-batch", help=same)
    rule = "With batch_size: scale learning rates with the samples in a step"
    verb.add_argument("--lr-rule", choices=get_args(LrRule), default="none", help=rule)
    verb.add_flag("--dry-run", help="Check the change and show what it would do")
    verb.add_flag("--no-wait", help="Return when the change is committed, before it takes effect")
    verb.add_timeout()

    verbs["knobs"].define(show_knobs, "loom knobs mnist").add_job()
    verbs["changes"].define(show_changes, "loom changes mnist").add_job()

    verb = verbs["revert"].define(revert, "loom revert mnist c3")
    verb.add_job()
    verb.add_argument("change", complete="change")
    verb.add_yes()
    verb.add_timeout()

    verb = verbs["log-level"].define(log_level, "loom log-level mnist debug")
    verb.add_target()
    verb.add_argument("level", help="One of debug, info, warning, error, critical")
    verb.add_timeout()


def step(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def set_knobs(call: Call) -> int:
    """The answer says at which step it took effect, or who refused and why. A knob that each rank has for itself
    may be set on one: JOB/REPLICA/RANK.
    """
    args = call.args
    return _set(
        call, parse_values(args.values), args.replica,
        at_step=args.at_step, over=args.over, dry_run=args.dry_run, wait=not args.no_wait,
        keep_global_batch=args.keep_global_batch, lr_rule=args.lr_rule,
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

    async def work(client: AsyncClient) -> Done:
        return await client.set(target.job, texts, replica=target.replica, rank=target.rank, typed=True, **how)

    return call.show_done(call.request(work))


def _target(text: str, replica: str | None) -> Target:
    from torchloom.client import parse_target

    target = parse_target(text)
    if replica is None:
        return target
    if target.replica not in {None, replica}:
        raise BadInput(f"--replica says {replica!r} and the target says {target.replica!r}", hint="give one of them")
    return target._replace(replica=check_name("replica", replica))


def revert(call: Call) -> int:
    """Asks for confirmation if it overwrites later changes of the same knobs."""
    job, change = call.args.job, call.args.change

    async def look(client: AsyncClient) -> tuple[str, ...]:
        return next((view.overwrites for view in await client.changes(job) if view.id == change), ())

    overwrites = () if call.args.yes else call.request(look)
    if overwrites and not call.confirm(
        lambda: f"the values before {change} replace those of later changes of the same knobs: {', '.join(overwrites)}"
    ):
        return 0
    return call.show_done(call.request(lambda client: client.revert(job, change)))


def show_knobs(call: Call) -> int:
    view, now = _look(call)
    return call.show(
        view.knobs, lambda: listings.knobs(view.knobs, now, call.screen), f"job {call.args.job} offers no knobs"
    )


def show_changes(call: Call) -> int:
    view, now = _look(call)
    return call.show(view.changes, lambda: listings.changes(view.changes, now, call.screen), "no changes yet")


def _look(call: Call) -> tuple[KnobsView, float]:
    """As a viewer: to see what was changed one need not be allowed to change."""
    job = check_name("job", call.args.job)

    async def look(weaver: WeaverClient) -> tuple[KnobsView, float]:
        cluster = await weaver.cluster(most=0)
        return await weaver.knobs(known_job(cluster, job)), cluster.plane.now

    return call.query(look)
