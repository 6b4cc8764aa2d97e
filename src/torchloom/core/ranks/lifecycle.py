"""Ranks: joining, going missing, coming back, ending.

The newest incarnation of a rank is the rank; an older one is muted. Incarnations are ordered by themselves, not by
arrival, so late and repeated messages change nothing. Evidence of life and death comes from different senders (the
rank, the server, an agent) in any order; core/state/rank_states.py says what each sign means in each state.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Commands, Decision, close_incident, merge_decisions, provisional
from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incident_history import Incident
from torchloom.core.state.rank_states import JobPhase, Presence, Rank
from torchloom.core.state.run_states import RunPhase
from torchloom.protocol import rank as messages
from torchloom.protocol import records
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.records import Record

FROZEN_REASONS = frozenset({"Stale Connection", "Slow Consumer (Pending Bytes)", "Slow Consumer (Write Deadline)"})
"""The server closed the link because the process did not answer or read, not because it ended."""
REPORT_ONLY = phrase("rank_report_only")
BY_ITS_RUN = phrase("rank_by_its_run")
MOST_OF_WHY = 500
"""Characters of why a rank is dead, in an outcome."""


def handle_hello(cluster: ClusterState, rank_id: RankId, report: messages.Hello) -> Decision:
    rank = cluster.ranks.get(rank_id)
    if rank is not None and report.incarnation < rank.incarnation:
        return Decision(commands=((rank_id, _mute(cluster, report.incarnation, rank)),))
    job = cluster.jobs.get(rank_id.job)
    same_run = job is not None and job.phase is JobPhase.RUNNING
    changes = cluster.ledger.in_force(rank_id) if same_run else ()
    commands: Commands = ((rank_id, welcome(cluster, report.incarnation, changes)),)
    entries: list[Record] = []
    if rank is not None and report.incarnation == rank.incarnation:
        if rank.counted and not report.counted:
            entries.append(records.RankAttached(rank=rank_id, incarnation=report.incarnation))
        return Decision(tuple(entries), commands)
    if not same_run:
        entries.append(records.JobBegan(job=rank_id.job))
    if rank is not None and rank.incident:
        entries.append(close_incident(rank.incident, phrase("rank_joined_again")))
    if rank is not None and rank.presence is Presence.LIVE and cluster.runtime.linked((rank_id, rank.incarnation)):
        entries += _report_duplicate(rank_id, rank, report)
        commands += ((rank_id, _mute(cluster, rank.incarnation, report)),)
    entries.append(records.RankJoined(rank=rank_id, hello=report))
    if cluster.runtime.seen_closing((rank_id, report.incarnation)):  # it was over before its hello was read
        entries += _lose(cluster, rank_id, report.incarnation, "Client Closed")
    return Decision(tuple(entries), commands)


def _mute(cluster: ClusterState, incarnation: str, newer: Rank | messages.Hello) -> messages.Muted:
    newest = newer.incarnation
    return messages.Muted.from_fields(newer, term=cluster.term, incarnation=incarnation, newest=newest)


def welcome(cluster: ClusterState, incarnation: str, changes: tuple[messages.ChangeSpec, ...]) -> messages.Welcome:
    beat_seconds = cluster.beat_seconds()
    return messages.Welcome(term=cluster.term, incarnation=incarnation, beat_seconds=beat_seconds, changes=changes)


def open_incident(
    what: Phrase, rank: RankId, *, evidence: tuple[Prose, ...], decision: Prose, reason: Prose, part: str = ""
) -> records.IncidentOpened:
    """About a rank, or about a change that it lacks (`part`)."""
    return records.IncidentOpened(
        id=provisional(what.code, rank, part),
        what=what,
        about=records.About(rank=rank, part=part),
        job=rank.job,
        evidence=evidence,
        decision=decision,
        reason=reason,
    )


def _report_duplicate(rank_id: RankId, rank: Rank, report: messages.Hello) -> list[Record]:
    opened = open_incident(
        phrase("rank_id_twice", rank=rank_id),
        rank_id,
        evidence=(
            phrase("twice_older", pid=rank.pid, node=rank.node, incarnation=rank.incarnation),
            phrase("twice_newer", pid=report.pid, node=report.node, incarnation=report.incarnation),
        ),
        decision=phrase("twice_decided"),
        reason=phrase("twice_reason"),
    )
    return [opened, close_incident(opened.id, phrase("twice_muted"))]


def handle_goodbye(cluster: ClusterState, rank_id: RankId, report: messages.Goodbye) -> Decision:
    farewell = Decision(commands=((rank_id, messages.Farewell(term=cluster.term, incarnation=report.incarnation)),))
    rank = cluster.ranks.find(rank_id, report.incarnation)
    if rank is None:
        return farewell
    if report.how == "failed":
        return farewell + _fail(cluster, rank, report.error or phrase("rank_said_failed"))
    return farewell + _leave(rank, report.how)


def handle_exit(cluster: ClusterState, fact: RankExited) -> Decision:
    rank = cluster.ranks.find(RankId(fact.job, fact.replica, fact.rank), fact.incarnation)
    if rank is None:
        return NOTHING
    if fact.exit_code == 0 and not fact.signal:
        return _leave(rank, "finished")
    if fact.signal:
        how = phrase("killed_by", signal=fact.signal)
    else:
        how = phrase("rank_process_ended" if fact.exit_code is None else "exit_code", status=fact.exit_code)
    return _fail(cluster, rank, how, fact.evidence)


def _leave(rank: Rank, how: Literal["finished", "interrupted"]) -> Decision:
    if rank.presence in {Presence.LEFT, Presence.FAILED}:
        return NOTHING
    return Decision(record_left(rank, how, phrase("rank_had_left")))


def record_left(rank: Rank, how: Literal["finished", "interrupted"], outcome: Prose) -> tuple[Record, ...]:
    """A rank has left, so that the incident about it is over."""
    left = records.RankLeft(rank=rank.id, incarnation=rank.incarnation, how=how)
    return (left, close_incident(rank.incident, outcome)) if rank.incident else (left,)


def _fail(cluster: ClusterState, rank: Rank, why: Prose, evidence: str = "") -> Decision:
    if rank.presence is Presence.FAILED:
        return NOTHING
    died = records.RankDied(rank=rank.id, incarnation=rank.incarnation, reason=why, confirmed=True)
    causes = (why, evidence) if evidence else (why,)
    dead = phrase("rank_dead", why=why[:MOST_OF_WHY] if isinstance(why, str) else why)
    run = cluster.runs.of(rank.id.replica_id)
    if rank.incident:
        decision = "" if run is not None else REPORT_ONLY
        ended = close_incident(rank.incident, dead)
        return Decision((died, replace(ended, evidence=causes, decision=decision, reason=why)))
    if run is not None and run.phase is RunPhase.STOPPING:
        return Decision((died,))  # it is stopped with its peers
    opened = open_incident(
        phrase("rank_failed", rank=rank.id),
        rank.id,
        evidence=(*causes, _describe_place(rank)),
        decision=REPORT_ONLY if run is None else BY_ITS_RUN,
        reason=why,
    )
    over = (close_incident(opened.id, dead),) if run is None else ()  # else its run decides what follows
    return Decision((died, opened, *over))


def handle_link_closed(cluster: ClusterState, rank_id: RankId, incarnation: str, reason: str) -> Decision:
    rank = cluster.ranks.find(rank_id, incarnation)
    if rank is None or rank.presence is not Presence.LIVE:
        return NOTHING
    if cluster.runtime.linked((rank_id, incarnation)):
        return NOTHING  # it has another link: it had reconnected before the server noticed the old one
    killed = _killed_by(cluster, rank_id, incarnation)
    if killed is not None:
        return _fail(cluster, rank, killed)
    return Decision(tuple(_lose(cluster, rank_id, incarnation, reason)))


def _killed_by(cluster: ClusterState, rank_id: RankId, incarnation: str) -> Phrase | None:
    """The operator who had it killed, if the rank confirmed the order: an order alone may never have reached it."""
    for order in cluster.ledger.kills(rank_id, incarnation):
        operation = cluster.runtime.operations.find(order.id)
        obeyed = operation.ordered.get(rank_id) if operation is not None else None
        all_obeyed = order.outcome and order.applied == len(order.lives)  # a kill of one presumed dead ends well too
        if all_obeyed or (obeyed is not None and obeyed.outcome == "applied"):
            return phrase("killed_by_operator", operator=order.operator, order=order.id)
    return None


def lose_silent(cluster: ClusterState, silent: tuple[RankId, ...], now: float) -> Decision:
    """Silence is checked again, because beats may have arrived since."""
    entries: list[Record] = []
    for rank_id in cluster.runtime.silent(silent, now, cluster.beat_seconds()):
        why = phrase("rank_silent", seconds=now - cluster.runtime.ranks[rank_id].heard)
        entries += _lose(cluster, rank_id, cluster.ranks[rank_id].incarnation, why, patient=True)
    return Decision(tuple(entries))


def _lose(cluster: ClusterState, rank_id: RankId, incarnation: str, why: Prose, patient: bool = False) -> list[Record]:
    evidence = [why if patient else phrase("server_says", why=why)]
    patient = patient or (isinstance(why, str) and why in FROZEN_REASONS)
    lost = records.RankLost(rank=rank_id, incarnation=incarnation, reason=why, patient=patient)
    run = cluster.runs.of(rank_id.replica_id)
    if run is not None and run.phase is RunPhase.STOPPING:  # it is being ended with its peers
        return [lost]
    hang = next((i for i in _incidents_of_parts(cluster, rank_id) if i.kind in HANGS), None)
    if hang is not None:  # that is why
        return [lost, records.IncidentAmended(id=hang.id, evidence=(phrase("rank_lost_too", why=why),))]
    beat = cluster.runtime.last_beat(rank_id, incarnation)
    if beat is not None:
        evidence.append(phrase("rank_last_step", step=beat.step))
    rank = cluster.ranks.find(rank_id, incarnation)
    if rank is not None:
        evidence.append(_describe_place(rank))
    grace = cluster.settings.frozen_grace_seconds if patient else cluster.settings.grace_seconds
    opened = open_incident(
        phrase("rank_lost", rank=rank_id),
        rank_id,
        evidence=tuple(evidence),
        decision=phrase("rank_waited_for", seconds=grace),
        reason=phrase("rank_may_be_frozen" if patient else "link_only_closed"),
    )
    return [lost, opened]


def _incidents_of_parts(cluster: ClusterState, rank: RankId) -> list[Incident]:
    """The open incidents that are not about the rank as a whole."""
    return [i for i in cluster.incidents.open_of(rank.job) if i.about.rank == rank and i.about.part]


def _describe_place(rank: Rank) -> Phrase:
    return phrase("rank_place", pid=rank.pid, node=rank.node, devices=rank.devices)


def handle_link_opened(cluster: ClusterState, rank_id: RankId, incarnation: str, now: float) -> Decision:
    rank = cluster.ranks.find(rank_id, incarnation)
    if rank is None:
        return NOTHING
    return _find_again(cluster, rank, phrase("link_open_again"), now)


def handle_beat(cluster: ClusterState, rank_id: RankId, beat: messages.Beat, now: float) -> Decision:
    rank = cluster.ranks.get(rank_id)
    life = (rank_id, beat.incarnation)
    if rank is not None and rank.incarnation == beat.incarnation:
        agreement = _compare_changes(cluster, rank, beat)
        if now - rank.since < cluster.settings.settle_seconds:
            return agreement  # may have been under way when it died
        return agreement + _find_again(cluster, rank, phrase("rank_heard", step=beat.step), now)
    if not cluster.runtime.may_answer(life, now):
        return NOTHING
    if rank is not None and beat.incarnation < rank.incarnation:
        return Decision(commands=((rank_id, _mute(cluster, beat.incarnation, rank)),))
    return Decision(commands=((rank_id, messages.Introduce(term=cluster.term, incarnation=beat.incarnation)),))


def _compare_changes(cluster: ClusterState, rank: Rank, beat: messages.Beat) -> Decision:
    """Report a rank that lacks a change which all ranks must have, until it has that change again."""
    rank_runtime = cluster.runtime.ranks[rank.id]
    if rank_runtime.mended:
        open_ones = [i for i in _incidents_of_parts(cluster, rank.id) if not i.kind]  # others are about other things
        return Decision(tuple(close_incident(i.id, phrase("rank_agrees_again")) for i in open_ones))
    missed = rank_runtime.missed
    if rank_runtime.astray != 2 or missed is None:  # two beats in a row: it was cut off at that step
        return NOTHING
    opened = open_incident(
        phrase("rank_astray", rank=rank.id),
        rank.id,
        evidence=(
            phrase("astray_from", change=missed.id, step=missed.step),
            phrase("astray_at" if beat.change else "astray_without", step=beat.step, change=f"c{beat.change}"),
        ),
        decision=REPORT_ONLY,
        reason=phrase("astray_reason"),
        part=missed.id,
    )
    return Decision((opened,), _welcome_again(cluster, rank))  # in case the change never reached it


def record_knobs(cluster: ClusterState, rank: Rank, report: messages.Knobs) -> Decision:
    """A rank offers knobs; recorded if they differ from what its job has offered so far."""
    job = rank.id.job
    offered = cluster.ledger.knobs.get(job, {})
    news = tuple(spec for spec in report.knobs if spec.name not in offered or _differs(offered[spec.name].spec, spec))
    saves = report.checkpoints and job not in cluster.ledger.checkpointers
    if not news and not saves:
        return NOTHING
    return Decision((records.KnobsOffered(job=job, knobs=news, checkpoints=report.checkpoints),))


def _differs(offered: messages.KnobSpec, spec: messages.KnobSpec) -> bool:
    """Whether it accepts other values than before. Its current value does not matter."""
    return replace(offered, value=spec.value) != spec


def _find_again(cluster: ClusterState, rank: Rank, why: Prose, now: float) -> Decision:
    if rank.presence not in {Presence.LOST, Presence.DEAD}:
        return NOTHING
    found = records.RankFound(rank=rank.id, incarnation=rank.incarnation, reason=why)
    outcome = phrase("rank_came_back", seconds=now - rank.since, why=why)
    closed = (close_incident(rank.incident, outcome),) if rank.incident else ()
    # What was changed while it was missing did not ask for it.
    return Decision((found, *closed), _welcome_again(cluster, rank))


def _welcome_again(cluster: ClusterState, rank: Rank) -> Commands:
    return ((rank.id, welcome(cluster, rank.incarnation, cluster.ledger.in_force(rank.id))),)


def compare_connections(cluster: ClusterState, now: float) -> Decision:
    """Ranks that were lost, and ranks that came back, while the weaver was away."""
    decisions: list[Decision] = []
    for rank in cluster.ranks.values():
        if cluster.runtime.linked((rank.id, rank.incarnation)):
            decisions.append(_find_again(cluster, rank, phrase("roll_call_answered"), now))
        elif rank.presence is Presence.LIVE:
            entries = _lose(cluster, rank.id, rank.incarnation, phrase("roll_call_missed"))
            decisions.append(Decision(tuple(entries)))
    return merge_decisions(decisions)


def presume_dead(cluster: ClusterState, rank: Rank) -> Decision:
    why = phrase("did_not_come_back", reason=rank.reason)
    died = records.RankDied(rank=rank.id, incarnation=rank.incarnation, reason=why)
    if not rank.incident:
        return Decision((died,))
    decision = REPORT_ONLY if cluster.runs.of(rank.id.replica_id) is None else BY_ITS_RUN
    ended = close_incident(rank.incident, phrase("rank_presumed_dead"))
    return Decision((died, replace(ended, decision=decision, reason=phrase("rank_grace_over"))))
