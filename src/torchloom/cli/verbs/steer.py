"""Verbs that tell ranks to do something (pause, resume, checkpoint, stop, kill, evict, stacks), and annotate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchloom.cli.known_names import known_rank, known_replica
from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import Refused
from torchloom.protocol.ids import RankId
from torchloom.protocol.views import ClusterView, RankView
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    from torchloom.client import AsyncClient, Target

_HARM = {
    "stop": "Their loops end after a common step",
    "kill": "They end at once and save nothing",
    "evict": "They end at once; the other replicas continue without them",
}


def add(verbs: Verbs) -> None:
    steering = [
        verbs["pause"].define(pause, "loom pause mnist", "loom resume mnist", "loom pause mnist --release"),
        verbs["resume"].define(steer, "loom resume mnist"),
        verbs["checkpoint"].define(checkpoint, "loom checkpoint mnist --timeout 300"),
        verbs["stop"].define(harm, "loom stop mnist --yes"),
        verbs["kill"].define(harm, "loom kill mnist/hi/0 --yes"),
        verbs["stacks"].define(stacks, "loom stacks mnist/hi"),
    ]
    for verb in steering:
        verb.add_target()
    verbs["pause"].add_flag("--release", help="Save, end the ranks of a job and give back its devices until `resume`")
    verb = verbs["evict"].define(evict, "loom evict train_ddp/train_ddp_0 --yes")
    verb.add_argument("target", metavar="JOB/REPLICA", help="Replica, as `loom map` lists it", complete="replica")
    for name in _HARM:
        verbs[name].add_yes()
    verb = verbs["annotate"].define(annotate, "loom annotate mnist 'the new data begins here'")
    verb.add_job()
    verb.add_argument("text", help="Note, in quotes")
    for verb in (*steering, verbs["evict"], verbs["annotate"]):
        verb.add_timeout()


def annotate(call: Call) -> int:
    """Also to a job that has ended. At most 500 characters."""
    return call.show_done(call.request(lambda client: client.annotate(call.args.job, call.args.text)))


def steer(call: Call) -> int:
    return call.show_done(call.request(lambda client: getattr(client, call.args.verb)(call.args.target)))


def pause(call: Call) -> int:
    """The processes wait, and keep their devices. With --release a job that torchLoom started saves a checkpoint and
    ends; `loom resume` starts it again from there when there is room.
    """
    release = call.args.release
    return call.show_done(call.request(lambda client: client.pause(call.args.target, release=release)))


def checkpoint(call: Call) -> int:
    """Calls the function that the script registered; the answer has its path and step."""
    return steer(call)


def stacks(call: Call) -> int:
    """Works while a rank hangs. Ranks with the same stack are shown together."""
    return steer(call)


def harm(call: Call) -> int:
    """Shows what it affects, and asks for confirmation."""
    return steer(call) if call.confirm(lambda: _question(call)) else 0


def evict(call: Call) -> int:
    """Shows what it affects, and asks. A replica that torchLoom did not start is only excluded from quorums."""
    return harm(call)


def _question(call: Call) -> str:
    from torchloom.client import parse_target

    target = parse_target(call.args.target)

    async def look(client: AsyncClient) -> ClusterView:
        view = await client.status(target.job)
        if not view.jobs:
            raise unknown("job", target.job, [job.job for job in await client.jobs()])
        return view

    view = call.request(look)
    return f"this will {call.args.verb} {hit(target, aimed(view, target))}. {_HARM[call.args.verb]}"


def aimed(view: ClusterView, target: Target) -> list[RankView]:
    """The ranks of a target that are still present."""
    job, replica, rank = target
    if replica is not None:
        known_replica(view, f"{job}/{replica}")
        if rank is not None:
            known_rank(view, RankId(job, replica, rank))
    ranks = [r for r in view.ranks if replica in {None, r.rank.replica} and rank in {None, r.rank.rank}]
    present = [r for r in ranks if r.presence in {"live", "lost"}]
    if not present:
        raise Refused(f"{target} has no living rank", hint=f"`loom status {job}` shows how they ended")
    return present


def hit(target: Target, ranks: Sequence[RankView]) -> str:
    """`mnist/hi: 2 ranks, at step 1,500`."""
    steps = [rank.beat.step for rank in ranks if rank.beat is not None]
    where = ""
    if steps:
        low, high = min(steps), max(steps)
        where = f", at step {low:,}" if low == high else f", at steps {low:,} to {high:,}"
    return f"{target}: {len(ranks):,} rank{'' if len(ranks) == 1 else 's'}{where}"
