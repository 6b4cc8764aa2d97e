"""Verbs about the allocation of loaders: schedule, predict."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from torchloom.cli.known_names import known_job
from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput, BadState, Refused
from torchloom.protocol.ids import check_name
from torchloom.protocol.scheduling import (
    ObjectiveName,
    PolicyName,
    PredictionView,
    QueryPrediction,
    QuerySchedule,
    ScheduleView,
)

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient

_MOST_LOADERS = 100_000
_BY_AGENT = "agent"


def add(verbs: Verbs) -> None:
    examples = ("loom schedule", "loom schedule --policy ours --objective log", "loom schedule --budget n1=12")
    verb = verbs["schedule"].define(show_or_set, *examples)
    policy = (
        "Allocate loaders by this policy: ours (measured curves), even (the same for all ranks of a node), requested "
        "(what scripts request), torchloader (its rule, but without its restarts) or off (move nothing)"
    )
    verb.add_argument("--policy", choices=get_args(PolicyName), help=policy)
    objective = "Let the policy ours maximise this: share (default), samples, log or makespan"
    verb.add_argument("--objective", choices=get_args(ObjectiveName), help=objective)
    budget = "Allow this number of loaders on a node in all; NODE=agent restores the agent's number; may be repeated"
    verb.add_argument("--budget", action="append", default=[], metavar="NODE=N", help=budget, complete="budget")
    verb.add_timeout()

    verb = verbs["predict"].define(predict, "loom predict mnist", "loom predict mnist --picture mnist.svg")
    verb.add_job()
    verb.add_argument("--picture", metavar="FILE.svg", help="Write the curve to this file too, as a picture (SVG)")


def show_or_set(call: Call) -> int:
    """Without options it shows the jobs with their loaders, measured and predicted throughput, the nodes with their
    budgets, and the latest allocations. An option changes the rules for the whole cluster; the others stay.
    docs/scheduling.md explains policies, objectives and budgets.
    """
    args = call.args
    budgets = parse_budgets(args.budget)
    if args.policy or args.objective or budgets:
        done = call.request(lambda client: client.set_schedule(args.policy, objective=args.objective, budgets=budgets))
        return call.show_done(done)
    from torchloom.views import schedule_tables

    view = call.query(lambda weaver: weaver.look(QuerySchedule(), ScheduleView))
    return call.show(view, lambda: schedule_tables.schedule(view, call.screen))


def parse_budgets(words: Iterable[str]) -> dict[str, int | None]:
    """`NODE=N` or `NODE=agent` for each node, each once."""
    budgets: dict[str, int | None] = {}
    for word in words:
        node, equals, text = word.partition("=")
        if not node or not equals:
            raise BadInput(f"--budget {word!r} is not NODE=N", hint="such as --budget n1=12, or --budget n1=agent")
        check_name("node", node)
        if node in budgets:
            raise BadInput(f"the budget of {node} is given twice", hint="give one number")
        budgets[node] = None if text == _BY_AGENT else _budget(word, text)
    return budgets


def _budget(word: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= _MOST_LOADERS):
        raise BadInput(
            f"--budget {word!r}: {text!r} is not a number of loaders",
            hint=f"0 to {_MOST_LOADERS:,}, without a comma; or {_BY_AGENT}, for the number of the agent",
        )
    return int(text)


def predict(call: Call) -> int:
    """The curve comes from measurements of the running job, and is more certain after its loaders were changed once. A
    job without an ElasticLoader has none. docs/scheduling.md explains the model.
    """
    from torchloom.views import throughput_tables

    job = check_name("job", call.args.job)

    async def look(weaver: WeaverClient) -> PredictionView:
        known_job(await weaver.cluster(most=0), job)
        return await weaver.look(QueryPrediction(job=job), PredictionView)

    view = call.query(look)
    if call.args.picture:
        _write_picture(call, view, Path(call.args.picture))
    return call.show(view, lambda: throughput_tables.prediction(view, call.screen))


def _write_picture(call: Call, view: PredictionView, path: Path) -> None:
    from torchloom.views.throughput_picture import picture
    from torchloom.views.throughput_tables import reason_absent

    if not view.curve:
        reason, remedy = reason_absent(view.job)
        raise Refused(f"there is nothing to draw of {view.job.job}: {reason}", hint=remedy)
    try:
        path.write_text(picture(view), encoding="utf-8")
    except OSError as error:
        hint = "--picture names the file to write"
        raise BadState(f"{path} cannot be written: {error.strerror}", hint=hint) from error
    call.note(f"loom: the curve is drawn in {path}")
