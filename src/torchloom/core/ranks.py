"""Ranks: joining, going missing, coming back, ending.

The newest incarnation of a rank is the rank; an older one is muted. Incarnations are ordered by themselves, not by
arrival, so late and repeated messages change nothing. Evidence of life and death comes from different senders (the
rank, the server, an agent) in any order; core/presence.py says what each sign means in each state.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision, together
from torchloom.core.fabric import Fabric, Rank
from torchloom.core.policy import HANGS
from torchloom.core.presence import JobPhase, Presence
from torchloom.core.runs import RunPhase
from torchloom.messages import (
    Beat,
    Command,
    Farewell,
    Goodbye,
    Hello,
    IncidentAmended,
    IncidentOpened,
    Introduce,
    JobBegan,
    Knobs,
    KnobsOffered,
    KnobSpec,
    Muted,
    RankAttached,
    RankDied,
    RankExited,
    RankFound,
    RankId,
    RankJoined,
    RankLeft,
    RankLost,
    Record,
    Welcome,
)

FROZEN_REASONS = frozenset({"Stale Connection", "Slow Consumer (Pending Bytes)", "Slow Consumer (Write Deadline)"})
"""The server closed the link because the process did not answer or read, not because it ended."""
REPORT_ONLY = "reported; no policy restarts this rank"
BY_ITS_RUN = "all ranks of its job are ended; what follows is decided for them together"


def hello(fabric: Fabric, rank: RankId, said: Hello) -> Decision:
    known = fabric.ranks.get(rank)
    if known is not None and said.incarnation < known.incarnation:
        muted = Muted(
            term=fabric.term,
            incarnation=said.incarnation,
            newest=known.incarnation,
            why=f"a newer life of {rank} speaks from pid {known.pid} on {known.node}",
        )
        return Decision(commands=((rank, muted),), reason=f"{rank}: an older life said hello")
    job = fabric.jobs.get(rank.job)
    same_run = job is not None and job.phase is JobPhase.RUNNING
    welcome = Welcome(
        term=fabric.term,
        incarnation=said.incarnation,
        beat_seconds=fabric.beat_seconds(),
        changes=fabric.ledger.in_force(rank) if same_run else (),
    )
    if known is not None and said.incarnation == known.incarnation:
        if known.counted and not said.counted:
            attached = RankAttached(rank=rank, incarnation=said.incarnation)
            return Decision((attached,), ((rank, welcome),), reason=f"{rank} is attached by its script")
        return Decision(commands=((rank, welcome),), reason=f"{rank} said hello again")

    records: list[Record] = []
    commands: list[tuple[RankId, Command]] = [(rank, welcome)]
    if not same_run:
        records.append(JobBegan(job=rank.job))
    if known is not None and known.incident:
        records.append(IncidentAmended(id=known.incident, outcome="a new life of the rank joined", closed=True))
    if known is not None and known.presence is Presence.LIVE and fabric.watch.linked((rank, known.incarnation)):
        records += _twice(fabric, rank, known, said)
        muted = Muted(
            term=fabric.term,
            incarnation=known.incarnation,
            newest=said.incarnation,
            why=f"pid {said.pid} on {said.node} joined as {rank} too, and is newer",
        )
        commands.append((rank, muted))
    records.append(RankJoined(rank=rank, hello=said))
    if fabric.watch.seen_closing((rank, said.incarnation)):  # it was over before its hello was read
        opened = sum(isinstance(record, IncidentOpened) for record in records)
        records += _lost(fabric, rank, said.incarnation, "Client Closed", offset=opened)
    return Decision(tuple(records), tuple(commands), reason=f"{rank} joined from pid {said.pid} on {said.node}")


def _twice(fabric: Fabric, rank: RankId, known: Rank, said: Hello) -> list[Record]:
    incident = fabric.incidents.next_id()
    return [
        IncidentOpened(
            id=incident,
            what=f"rank id {rank} is used twice",
            subject=str(rank),
            job=rank.job,
            evidence=(
                f"pid {known.pid} on {known.node}, incarnation {known.incarnation}, is still connected",
                f"pid {said.pid} on {said.node}, incarnation {said.incarnation}, joined under the same id",
            ),
            decision="the newer one is believed, the older one is muted",
            reason="two processes cannot speak for one rank; give each its own replica or rank",
        ),
        IncidentAmended(id=incident, outcome="the older one was told to be silent", closed=True),
    ]


def goodbye(fabric: Fabric, rank: RankId, said: Goodbye) -> Decision:
    farewell = (rank, Farewell(term=fabric.term, incarnation=said.incarnation))
    known = fabric.ranks.get(rank)
    if known is None or known.incarnation != said.incarnation:
        return Decision(commands=(farewell,), reason=f"{rank}: goodbye of a life that is not the current one")
    if said.how == "failed":
        ended = _failed(fabric, known, said.error or "it said that it failed")
    else:
        ended = _left(known, said.how)
    return Decision(ended.records, (farewell,), reason=f"{rank} {said.how}")


def exited(fabric: Fabric, fact: RankExited) -> Decision:
    known = fabric.ranks.get(RankId(fact.job, fact.replica, fact.rank))
    if known is None or known.incarnation != fact.incarnation:
        return NOTHING
    if fact.exit_code == 0 and not fact.signal:
        return _left(known, "finished")
    code = "its process has ended" if fact.exit_code is None else f"exit code {fact.exit_code}"
    how = f"killed by {fact.signal}" if fact.signal else code
    return _failed(fabric, known, how, fact.evidence)


def _left(known: Rank, how: str) -> Decision:
    if known.presence in {Presence.LEFT, Presence.FAILED}:
        return NOTHING
    records: list[Record] = [
        RankLeft(
            rank=known.id, incarnation=known.incarnation, how="interrupted" if how == "interrupted" else "finished"
        )
    ]
    if known.incident:
        records.append(IncidentAmended(id=known.incident, outcome="it had left in good order", closed=True))
    return Decision(tuple(records), reason=f"{known.id} {how}")


def _failed(fabric: Fabric, known: Rank, why: str, evidence: str = "") -> Decision:
    if known.presence is Presence.FAILED:
        return NOTHING
    died = RankDied(rank=known.id, incarnation=known.incarnation, reason=why, confirmed=True)
    told = (why, evidence) if evidence else (why,)
    run = fabric.runs.of(known.id.of)
    if run is not None and run.phase is RunPhase.STOPPING and not known.incident:
        return Decision((died,), reason=f"{known.id}: {why}")  # it goes with its peers
    if known.incident:
        ended = IncidentAmended(
            id=known.incident,
            evidence=told,
            decision="" if run is not None else REPORT_ONLY,
            reason=why,
            outcome=f"dead: {why}"[:500],
            closed=True,
        )
        return Decision((died, ended), reason=f"{known.id}: {why}")
    incident = fabric.incidents.next_id()
    opened = IncidentOpened(
        id=incident,
        what=f"rank {known.id} failed",
        subject=str(known.id),
        job=known.id.job,
        evidence=(*told, _where(known)),
        decision=REPORT_ONLY if run is None else BY_ITS_RUN,
        reason=why,
    )
    if run is not None:
        return Decision((died, opened), reason=f"{known.id}: {why}")  # its run decides what follows
    return Decision(
        (died, opened, IncidentAmended(id=incident, outcome=f"dead: {why}"[:500], closed=True)),
        reason=f"{known.id}: {why}",
    )


def link_closed(fabric: Fabric, rank: RankId, incarnation: str, reason: str) -> Decision:
    known = fabric.ranks.get(rank)
    if known is None or known.incarnation != incarnation or known.presence is not Presence.LIVE:
        return NOTHING
    if fabric.watch.linked((rank, incarnation)):
        return NOTHING  # it has another link: it had reconnected before the server noticed the old one
    killed = _killed_by(fabric, rank, incarnation)
    if killed:
        return _failed(fabric, known, killed)
    return Decision(tuple(_lost(fabric, rank, incarnation, reason)), reason=f"{rank}: its link closed ({reason})")


def _killed_by(fabric: Fabric, rank: RankId, incarnation: str) -> str:
    """Who had it killed, if it has said itself that it obeys: an order alone may never have reached it."""
    for order in fabric.ledger.kills(rank, incarnation):
        course = fabric.watch.courses.find(order.id)
        obeyed = course.ordered.get(rank) if course is not None else None
        all_obeyed = order.outcome and order.applied == len(order.lives)  # a kill of one presumed dead ends well too
        if all_obeyed or (obeyed is not None and obeyed.outcome == "applied"):
            return f"killed by {order.operator or 'an operator'} ({order.id})"
    return ""


def silent(fabric: Fabric, rank: RankId, now: float, offset: int) -> Decision:
    known = fabric.ranks[rank]
    quiet = now - fabric.watch.pulses[rank].heard
    why = f"silent for {quiet:.0f} s"
    return Decision(tuple(_lost(fabric, rank, known.incarnation, why, offset, patient=True)), reason=f"{rank}: {why}")


def _lost(
    fabric: Fabric, rank: RankId, incarnation: str, why: str, offset: int = 0, patient: bool = False
) -> list[Record]:
    known = fabric.ranks.get(rank)
    patient = patient or why in FROZEN_REASONS
    run = fabric.runs.of(rank.of)
    if run is not None and run.phase is RunPhase.STOPPING:  # it is being ended with its peers
        return [RankLost(rank=rank, incarnation=incarnation, reason=why, patient=patient)]
    grace = fabric.settings.frozen_grace_seconds if patient else fabric.settings.grace_seconds
    pulse = fabric.watch.pulses.get(rank)
    evidence = [f"the server says: {why}" if not patient or why in FROZEN_REASONS else why]
    if pulse is not None and pulse.beat is not None and pulse.incarnation == incarnation:
        evidence.append(f"last heard at step {pulse.beat.step}")
    if known is not None and known.incarnation == incarnation:
        evidence.append(_where(known))
    mine = (i for i in fabric.incidents.open_of(rank.job) if i.subject.startswith(f"{rank}#"))
    hangs = next((i for i in mine if i.kind in HANGS), None)
    if hangs is not None:  # that is why
        more = IncidentAmended(id=hangs.id, evidence=(f"it is lost: {why}",))
        return [RankLost(rank=rank, incarnation=incarnation, reason=why, patient=patient), more]
    return [
        RankLost(rank=rank, incarnation=incarnation, reason=why, patient=patient),
        IncidentOpened(
            id=fabric.incidents.next_id(offset),
            what=f"rank {rank} is lost",
            subject=str(rank),
            job=rank.job,
            evidence=tuple(evidence),
            decision=f"wait {grace:g} s for it to come back",
            reason="a closed link is not yet a death"
            if not patient
            else "the process may be frozen or cut off rather than dead",
        ),
    ]


def _where(known: Rank) -> str:
    return f"pid {known.pid} on {known.node}, devices {', '.join(known.devices) or 'none'}"


def link_opened(fabric: Fabric, rank: RankId, incarnation: str, now: float) -> Decision:
    known = fabric.ranks.get(rank)
    if known is None or known.incarnation != incarnation:
        return NOTHING
    return _found(fabric, known, "its link is open again", now)


def heard(fabric: Fabric, rank: RankId, beat: Beat, now: float) -> Decision:
    known = fabric.ranks.get(rank)
    life = (rank, beat.incarnation)
    if known is not None and known.incarnation == beat.incarnation:
        pulse = fabric.watch.pulses[rank]
        astray = _mended(fabric, known) if pulse.mended else NOTHING
        if pulse.astray == 2:
            astray = _astray(fabric, known, beat)
        if now - known.since < fabric.settings.settle_seconds:
            return astray  # may have been under way when it died
        return together((astray, _found(fabric, known, f"heard at step {beat.step}", now)))
    if not fabric.watch.may_tell(life, now):
        return NOTHING
    if known is not None and beat.incarnation < known.incarnation:
        why = "a newer life joined"
        muted = Muted(term=fabric.term, incarnation=beat.incarnation, newest=known.incarnation, why=why)
        return Decision(commands=((rank, muted),), reason=f"{rank}: an older life still beats")
    introduce = Introduce(term=fabric.term, incarnation=beat.incarnation)
    return Decision(commands=((rank, introduce),), reason=f"{rank}: an unknown life beats")


def _astray(fabric: Fabric, known: Rank, beat: Beat) -> Decision:
    """Two beats in a row say that a change which all ranks took is not in force here: it was cut off at that step."""
    missed = fabric.watch.pulses[known.id].missed
    assert missed is not None
    opened = IncidentOpened(
        id=fabric.incidents.next_id(),
        what=f"rank {known.id} disagrees with its peers",
        subject=f"{known.id}#{missed.id}",
        job=known.id.job,
        evidence=(
            f"change {missed.id} takes effect at step {missed.step} on all ranks",
            f"at step {beat.step} the newest change in force there is {f'c{beat.change}' if beat.change else 'none'}",
        ),
        decision=REPORT_ONLY,
        reason="it could not reach the server when the step came, and went on unchanged",
    )
    again = _welcome(fabric, known)  # in case it never heard of it
    return Decision((opened,), ((known.id, again),), reason=opened.what)


def _mended(fabric: Fabric, known: Rank) -> Decision:
    """It has by now what it had missed."""
    mine = [i for i in fabric.incidents.open_of(known.id.job) if i.subject.startswith(f"{known.id}#")]
    open_ones = [i for i in mine if not i.kind]  # the others are about something else
    closing = tuple(IncidentAmended(id=i.id, outcome="it agrees with its peers again", closed=True) for i in open_ones)
    return Decision(closing, reason=f"{known.id} agrees with its peers again")


def offers(fabric: Fabric, rank: RankId, said: Knobs) -> Decision:
    """A rank says what may be changed; recorded if that is more than, or other than, its job has offered so far."""
    known = fabric.ranks.get(rank)
    if known is None or known.incarnation != said.incarnation:
        return NOTHING
    offered = fabric.ledger.knobs.get(rank.job, {})
    news = tuple(spec for spec in said.knobs if spec.name not in offered or _differs(offered[spec.name].spec, spec))
    saves = said.checkpoints and rank.job not in fabric.ledger.checkpointers
    if not news and not saves:
        return NOTHING
    record = KnobsOffered(job=rank.job, knobs=news, checkpoints=said.checkpoints)
    return Decision((record,), reason=f"{rank.job} offers {', '.join(spec.name for spec in news) or 'checkpoints'}")


def _differs(known: KnobSpec, said: KnobSpec) -> bool:
    """In what it accepts; the value it has just now is another matter."""
    return replace(known, value=said.value) != said


def _found(fabric: Fabric, known: Rank, why: str, now: float) -> Decision:
    if known.presence not in {Presence.LOST, Presence.DEAD}:
        return NOTHING
    records: list[Record] = [RankFound(rank=known.id, incarnation=known.incarnation, reason=why)]
    if known.incident:
        outcome = f"came back after {now - known.since:.1f} s: {why}"
        records.append(IncidentAmended(id=known.incident, outcome=outcome, closed=True))
    # What was changed while it was missing did not ask for it.
    return Decision(tuple(records), ((known.id, _welcome(fabric, known)),), reason=f"{known.id}: {why}")


def _welcome(fabric: Fabric, known: Rank) -> Welcome:
    return Welcome(
        term=fabric.term,
        incarnation=known.incarnation,
        beat_seconds=fabric.beat_seconds(),
        changes=fabric.ledger.in_force(known.id),
    )


def roll_called(fabric: Fabric, now: float) -> Decision:
    """Who died while no one could be told of it, and who is back."""
    decisions: list[Decision] = []
    opened = 0
    for known in fabric.ranks.values():
        if fabric.watch.linked((known.id, known.incarnation)):
            decisions.append(_found(fabric, known, "answered the roll-call", now))
        elif known.presence is Presence.LIVE:
            why = "absent at the roll-call"
            records = _lost(fabric, known.id, known.incarnation, why, offset=opened)
            decisions.append(Decision(tuple(records), reason=f"{known.id}: {why}"))
            opened += decisions[-1].opened
    return together(decisions)


def grace_over(fabric: Fabric, known: Rank) -> Decision:
    why = f"{known.reason}; it did not come back"
    records: list[Record] = [RankDied(rank=known.id, incarnation=known.incarnation, reason=why)]
    if known.incident:
        records.append(
            IncidentAmended(
                id=known.incident,
                decision=REPORT_ONLY if fabric.runs.of(known.id.of) is None else BY_ITS_RUN,
                reason="its grace is over",
                outcome="presumed dead",
                closed=True,
            )
        )
    return Decision(tuple(records), reason=f"{known.id}: {why}")
