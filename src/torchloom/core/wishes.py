"""What operators want of a running job: checked, refused with a reason, or begun.

What is found wrong here never reaches a rank. What is begun goes on in core/changes.py.
"""

from __future__ import annotations

from torchloom import knobs
from torchloom.core.changes import ask_where, done
from torchloom.core.courses import AskerWaits, Course, CourseBegan, Lives, Wish
from torchloom.core.decision import Decision
from torchloom.core.fabric import Fabric
from torchloom.core.ledger import ChangePhase
from torchloom.core.targets import did_you_mean, find_target, split_group
from torchloom.messages import Done, No, Revert, SetKnobs, Steer


def set_knobs(fabric: Fabric, ask: SetKnobs, reply: str, now: float) -> Decision:
    again = _asked_before(fabric, ask.request, reply)
    if again is not None:
        return again
    lives = find_target(fabric, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    refusal = _check_values(fabric, ask)
    if refusal is not None:
        return Decision(answer=refusal)
    if ask.dry_run:
        return Decision(answer=Done(text=f"would set {_told(fabric, ask)} on {len(lives)} rank{_s(lives)}"))
    return _inquire(fabric, Wish(ask), lives, reply, now)


def revert(fabric: Fabric, ask: Revert, reply: str, now: float) -> Decision:
    again = _asked_before(fabric, ask.request, reply)
    if again is not None:
        return again
    change = fabric.ledger.changes.get(ask.change)
    if change is None or change.job != ask.job:
        known = [c.id for c in fabric.ledger.of_job(ask.job)]
        hint = did_you_mean(ask.change, known, f"`loom changes {ask.job}` lists them")
        return Decision(answer=No(why=f"job {ask.job} has no change {ask.change}", hint=hint))
    if change.change.action != "set" or not change.takes_effect:
        return Decision(answer=No(why=f"{ask.change} did not change any value: {change.outcome or change.phase}"))
    if change.reverted_by:
        return Decision(answer=No(why=f"{ask.change} was reverted by {change.reverted_by} already"))
    withdrawn = fabric.ledger.changes.get(change.change.withdraws)  # comes back as it was
    wanted = SetKnobs(
        request=ask.request,
        job=ask.job,
        replica=change.replica,
        rank=change.rank,
        values=change.before,
        over=withdrawn.change.over if withdrawn else 0,
        patience=ask.patience,
        operator=ask.operator,
    )
    lives = find_target(fabric, ask.job, change.replica, change.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    return _inquire(fabric, Wish(wanted, reverts=change.id), lives, reply, now)


def act(fabric: Fabric, ask: Steer, reply: str, now: float) -> Decision:
    """Pause, stop or save: things done by all ranks at one step."""
    again = _asked_before(fabric, ask.request, reply)
    if again is not None:
        return again
    lives = find_target(fabric, ask.job, ask.replica, ask.rank)
    if isinstance(lives, No):
        return Decision(answer=lives)
    alone = split_group(fabric, lives, ask.replica, ask.rank)
    if alone is not None:
        return Decision(answer=alone)
    if ask.verb == "checkpoint" and ask.job not in fabric.ledger.checkpointers:
        return Decision(
            answer=No(
                why=f"job {ask.job} has registered no function that saves a checkpoint",
                hint="in the script: loom.on_checkpoint(save), with save(step) returning the path",
            )
        )
    wanted = SetKnobs(
        request=ask.request,
        job=ask.job,
        replica=ask.replica,
        rank=ask.rank,
        values={},
        patience=ask.patience,
        operator=ask.operator,
    )
    assert ask.verb in {"pause", "stop", "checkpoint"}
    return _inquire(fabric, Wish(wanted, action=ask.verb), lives, reply, now)


def _asked_before(fabric: Fabric, request: str, reply: str) -> Decision | None:
    """The same request once more: whoever asks waits with the others, or is told how it ended."""
    if request in fabric.watch.courses.by_request:
        return Decision(notes=(AskerWaits(request, reply),))
    change = fabric.ledger.change_of(request)
    if change is None:
        return None
    if change.phase is ChangePhase.ABORTED:
        return Decision(answer=No(why=f"{change.id} was not made: {change.outcome}"))
    if change.phase is ChangePhase.SETTLED and (change.failed or not change.applied):
        return Decision(answer=No(why=f"{change.id}: {change.outcome}"))
    return Decision(answer=done(change))


def _check_values(fabric: Fabric, ask: SetKnobs) -> No | None:
    offered = {name: knob.spec for name, knob in fabric.ledger.knobs.get(ask.job, {}).items()}
    if not ask.values:
        return No(why="there is nothing to set", hint=f"loom set {ask.job} NAME=VALUE")
    for name in ask.values:
        if name not in offered:
            otherwise = f"`loom knobs {ask.job}` lists what may be changed; in the script: loom.knob({name!r}, …)"
            hint = did_you_mean(name, offered, otherwise)
            return No(why=f"job {ask.job} has no knob {name}", hint=hint)
        if ask.rank is not None and offered[name].per != "rank":
            return No(
                why=f"{name} is a knob of the whole job: it changes on all ranks or on none",
                hint=f"loom set {ask.job} {name}=…",
            )
        if ask.over and not knobs.can_ramp(offered[name]):
            return No(why=f"{name} is not a number: it cannot change little by little", hint="leave --over out")
    try:
        knobs.check_all(offered, ask.values)
    except knobs.BadValue as error:
        return No(why=error.message, hint=f"`loom knobs {ask.job}` shows the bounds")
    return None


def _inquire(fabric: Fabric, wish: Wish, lives: Lives, reply: str, now: float) -> Decision:
    ask = wish.ask
    busy = fabric.ledger.under_way(ask.job)
    asked = fabric.watch.courses.inquiring(ask.job)
    if busy or asked:
        who = busy.operator if busy else asked.wish.ask.operator if asked and asked.wish else ""
        name = f"change {busy.id}" if busy else "another change"
        return Decision(
            answer=No(why=f"{name} of {who or 'someone'} is under way in {ask.job}", hint="try again in a moment")
        )
    course = Course(ask.request, ask.job, dict(lives), wish, began=now, sent=now, waiters=[reply] if reply else [])
    commands = ask_where(fabric, course, lives)
    return Decision(commands=commands, notes=(CourseBegan(course),), reason=f"{ask.job}: how far is everyone?")


def _told(fabric: Fabric, ask: SetKnobs) -> str:
    before = {name: fabric.ledger.value_of(ask.job, ask.replica, ask.rank, name) for name in ask.values}
    return ", ".join(f"{name} {before[name]} → {value}" for name, value in ask.values.items())


def _s(things: Lives) -> str:
    return "" if len(things) == 1 else "s"
