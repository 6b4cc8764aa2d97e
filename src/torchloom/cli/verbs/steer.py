"""Verbs that tell ranks to do something (pause, resume, checkpoint, stop, kill, evict, stacks), and annotate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import completion_names
from torchloom.errors import Refused
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs
    from torchloom.client import AsyncClient, Target
    from torchloom.protocol.operator import Done
    from torchloom.protocol.views import ClusterView, RankView

_HARM = {
    "stop": "Their loops end after a common step",
    "kill": "They end at once and save nothing",
    "evict": "They end at once; the other replicas continue without them",
}

_VERBS = (
    (
        "pause", "pause training at a common step, on all ranks that train together",
        "  loom pause mnist\n  loom resume mnist",
    ),
    ("resume", "continue paused training", "  loom resume mnist"),
    (
        "checkpoint", "save a checkpoint of a job now, at a common step",
        "Calls the function that the script registered; the answer has its path and step.\n\n"
        "  loom checkpoint mnist --timeout 300",
    ),
    (
        "stop", "end training cleanly: all ranks leave their loop after the same step",
        "Shows what it affects, and asks for confirmation.\n\n  loom stop mnist --yes",
    ),
    (
        "kill", "end training processes at once, without asking them",
        "Shows what it affects, and asks for confirmation.\n\n  loom kill mnist/hi/0 --yes",
    ),
    (
        "evict", "kill a replica under torchft while the others continue, and restart it",
        "Shows what it affects, and asks. A replica that torchLoom did not start is only excluded from quorums.\n\n"
        "  loom evict train_ddp/train_ddp_0 --yes",
    ),
    (
        "stacks", "show where every thread of every rank is",
        "Works while a rank hangs. Ranks with the same stack are shown together.\n\n  loom stacks mnist/hi",
    ),
)  # fmt: skip


def add(verbs: Verbs) -> None:
    for name, summary, more in _VERBS:
        verb = verbs.add(name, harm if name in _HARM else steer, summary, more, listing=True)
        if name == "evict":
            verb.add_argument(
                "target", metavar="JOB/REPLICA", help="Replica, as `loom map` lists it",
                complete=completion_names.complete_replica,
            )  # fmt: skip
        else:
            verb.add_target()
        if name in _HARM:
            verb.add_yes()
        verb.add_timeout()

    verb = verbs.add(
        "annotate", annotate, "add a note to a job: `events`, `why` and `curves` show it",
        "Also to a job that has ended. At most 500 characters.\n\n  loom annotate mnist 'the new data begins here'",
        listing=True,
    )  # fmt: skip
    verb.add_job()
    verb.add_argument("text", metavar="TEXT", help="Note, in quotes")
    verb.add_timeout()


def annotate(call: Call) -> int:
    return call.show_done(call.request(lambda weaver: weaver.annotate(call.args.job, call.args.text)))


def steer(call: Call) -> int:
    async def work(weaver: AsyncClient) -> Done:
        verb = getattr(weaver, call.args.verb)
        done: Done = await verb(call.args.target)
        return done

    return call.show_done(call.request(work))


def harm(call: Call) -> int:
    """The same, after asking."""
    if not call.args.yes and not call.confirm(_question(call)):
        call.note("nothing was done")
        return 0
    return steer(call)


def _question(call: Call) -> str:
    from torchloom.client import parse_target

    target = parse_target(call.args.target)

    async def look(weaver: AsyncClient) -> ClusterView:
        view = await weaver.status(target.job)
        if not view.jobs:
            raise unknown("job", target.job, [job.job for job in await weaver.jobs()])
        return view

    view = call.request(look)
    return f"this will {call.args.verb} {hit(target, aimed(view, target))}. {_HARM[call.args.verb]}"


def aimed(view: ClusterView, target: Target) -> list[RankView]:
    """The ranks of a target that are still present."""
    from torchloom.protocol.ids import RankId

    job, replica, rank = target
    if replica is not None:
        completion_names.known_replica(view, f"{job}/{replica}")
        if rank is not None:
            completion_names.known_rank(view, RankId(job, replica, rank))
    ranks = [r for r in view.ranks if replica in {None, r.rank.replica} and rank in {None, r.rank.rank}]
    present = [r for r in ranks if r.presence in {"live", "lost"}]
    if not present:
        raise Refused(f"{target} has no living rank", hint="`loom status` shows how they ended")
    return present


def hit(target: Target, ranks: Sequence[RankView]) -> str:
    """`mnist/hi: 2 ranks, at step 1,500`."""
    steps = [rank.beat.step for rank in ranks if rank.beat is not None]
    where = ""
    if steps:
        low, high = min(steps), max(steps)
        where = f", at step {low:,}" if low == high else f", at steps {low:,} to {high:,}"
    return f"{target}: {len(ranks):,} rank{'' if len(ranks) == 1 else 's'}{where}"
