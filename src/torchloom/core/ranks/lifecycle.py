"""Ranks: joining, going missing, coming back, ending.

The newest incarnation of a rank is the rank; an older one is muted. Incarnations are ordered by themselves, not by
arrival, so late and repeated messages change nothing. Evidence of life and death comes from different senders (the
rank, the server, an agent) in any order; core/state/ranks.py says what each sign means in each state.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.detect.incident_kinds import HANGS
from torchloom.core.incident_ids import close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.ranks import JobPhase, Presence, Rank
from torchloom.core.state.runs import RunPhase
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat, Command, Farewell, Goodbye, Hello, Introduce, Knobs, KnobSpec, Muted, Welcome
from torchloom.protocol.records import (
    About,
    IncidentAmended,
    IncidentOpened,
    JobBegan,
    KnobsOffered,
    RankAttached,
    RankDied,
    RankFound,
    RankJoined,
    RankLeft,
    RankLost,
    Record,
)

FROZEN_REASONS = frozenset({"Stale Connection", "Slow Consumer (Pending Bytes)", "Slow Consumer (Write Deadline)"})
"""The server closed the link because the process did not answer or read, not because it ended."""
REPORT_ONLY = phrase("rank_report_only")
BY_ITS_RUN = phrase("rank_by_its_run")
MOST_OF_WHY = 500
"""Characters of why a rank is dead, in an outcome."""


def handle_hello(cluster: ClusterState, rank_id: RankId, report: Hello) -> Decision:
    rank = cluster.ranks.get(rank_id)
    if rank is not None and report.incarnation < rank.incarnation:
        return Decision(commands=((rank_id, _mute(cluster, report.incarnation, rank)),))
    job = cluster.jobs.get(rank_id.job)
    same_run = job is not None and job.phase is JobPhase.RUNNING
    welcome = Welcome(
        term=cluster.term,
        incarnation=report.incarnation,
        beat_seconds=cluster.beat_seconds(),
        changes=cluster.ledger.in_force(rank_id) if same_run else (),
    )
    if rank is not None and report.incarnation == rank.incarnation:
        if rank.counted and not report.counted:
            attached = RankAttached(rank=rank_id, incarnation=report.incarnation)
            return Decision((attached,), ((rank_id, welcome),))
        return Decision(commands=((rank_id, welcome),))

    records: list[Record] = []
    commands: list[tuple[RankId, Command]] = [(rank_id, welcome)]
    if not same_run:
        records.append(JobBegan(job=rank_id.job))
    if rank is not None and rank.incident:
        records.append(close_incident(rank.incident, phrase("rank_joined_again")))
    if rank is not None and rank.presence is Presence.LIVE and cluster.runtime.linked((rank_id, rank.incarnation)):
        records += _report_duplicate(rank_id, rank, report)
        commands.append((rank_id, _mute(cluster, rank.incarnation, report)))
    records.append(RankJoined(rank=rank_id, hello=report))
    if cluster.runtime.seen_closing((rank_id, report.incarnation)):  # it was over before its hello was read
        records += _lose(cluster, rank_id, report.incarnation, "Client Closed")
    return Decision(tuple(records), tuple(commands))


def _mute(cluster: ClusterState, incarnation: str, newer: Rank | Hello) -> Muted:
    return Muted(term=cluster.term, incarnation=incarnation, newest=newer.incarnation, pid=newer.pid, node=newer.node)


def _report_duplicate(rank_id: RankId, rank: Rank, report: Hello) -> list[Record]:
    incident = provisional("twice", rank_id)
    return [
        IncidentOpened(
            id=incident,
            what=phrase("rank_id_twice", rank=rank_id),
            about=About(rank=rank_id),
            job=rank_id.job,
            evidence=(
                phrase("twice_older", pid=rank.pid, node=rank.node, incarnation=rank.incarnation),
                phrase("twice_newer", pid=report.pid, node=report.node, incarnation=report.incarnation),
            ),
            decision=phrase("twice_decided"),
            reason=phrase("twice_reason"),
        ),
        close_incident(incident, phrase("twice_muted")),
    ]


def handle_goodbye(cluster: ClusterState, rank_id: RankId, report: Goodbye) -> Decision:
    farewell = (rank_id, Farewell(term=cluster.term, incarnation=report.incarnation))
    rank = cluster.ranks.find(rank_id, report.incarnation)
    if rank is None:
        return Decision(commands=(farewell,))
    if report.how == "failed":
        ended = _fail(cluster, rank, report.error or phrase("rank_said_failed"))
    else:
        ended = _leave(rank, report.how)
    return Decision(ended.records, (farewell,))


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


def _leave(rank: Rank, how: str) -> Decision:
    if rank.presence in {Presence.LEFT, Presence.FAILED}:
        return NOTHING
    records: list[Record] = [
        RankLeft(rank=rank.id, incarnation=rank.incarnation, how="interrupted" if how == "interrupted" else "finished")
    ]
    if rank.incident:
        records.append(close_incident(rank.incident, phrase("rank_had_left")))
    return Decision(tuple(records))


def _fail(cluster: ClusterState, rank: Rank, why: Prose, evidence: str = "") -> Decision:
    if rank.presence is Presence.FAILED:
        return NOTHING
    died = RankDied(rank=rank.id, incarnation=rank.incarnation, reason=why, confirmed=True)
    causes = (why, evidence) if evidence else (why,)
    dead = phrase("rank_dead", why=why[:MOST_OF_WHY] if isinstance(why, str) else why)
    run = cluster.runs.of(rank.id.replica_id)
    if run is not None and run.phase is RunPhase.STOPPING and not rank.incident:
        return Decision((died,))  # it is stopped with its peers
    if rank.incident:
        ended = IncidentAmended(
            id=rank.incident,
            evidence=causes,
            decision="" if run is not None else REPORT_ONLY,
            reason=why,
            outcome=dead,
            closed=True,
        )
        return Decision((died, ended))
    incident = provisional("failed", rank.id)
    opened = IncidentOpened(
        id=incident,
        what=phrase("rank_failed", rank=rank.id),
        about=About(rank=rank.id),
        job=rank.id.job,
        evidence=(*causes, _describe_place(rank)),
        decision=REPORT_ONLY if run is None else BY_ITS_RUN,
        reason=why,
    )
    if run is not None:
        return Decision((died, opened))  # its run decides what follows
    return Decision(
        (died, opened, close_incident(incident, dead)),
    )


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
            return phrase(
                "killed_by_operator" if order.operator else "killed_by_an_operator",
                operator=order.operator,
                order=order.id,
            )
    return None


def lose_silent(cluster: ClusterState, rank_id: RankId, now: float) -> Decision:
    rank = cluster.ranks[rank_id]
    quiet = now - cluster.runtime.ranks[rank_id].heard
    why = phrase("rank_silent", seconds=quiet)
    return Decision(tuple(_lose(cluster, rank_id, rank.incarnation, why, patient=True)))


def _lose(cluster: ClusterState, rank_id: RankId, incarnation: str, why: Prose, patient: bool = False) -> list[Record]:
    rank = cluster.ranks.get(rank_id)
    frozen = isinstance(why, str) and why in FROZEN_REASONS
    patient = patient or frozen
    run = cluster.runs.of(rank_id.replica_id)
    if run is not None and run.phase is RunPhase.STOPPING:  # it is being ended with its peers
        return [RankLost(rank=rank_id, incarnation=incarnation, reason=why, patient=patient)]
    grace = cluster.settings.frozen_grace_seconds if patient else cluster.settings.grace_seconds
    rank_runtime = cluster.runtime.ranks.get(rank_id)
    evidence = [phrase("server_says", why=why) if not patient or frozen else why]
    if rank_runtime is not None and rank_runtime.beat is not None and rank_runtime.incarnation == incarnation:
        evidence.append(phrase("rank_last_step", step=rank_runtime.beat.step))
    if rank is not None and rank.incarnation == incarnation:
        evidence.append(_describe_place(rank))
    mine = (i for i in cluster.incidents.open_of(rank_id.job) if i.about.rank == rank_id and i.about.part)
    hangs = next((i for i in mine if i.kind in HANGS), None)
    if hangs is not None:  # that is why
        more = IncidentAmended(id=hangs.id, evidence=(phrase("rank_lost_too", why=why),))
        return [RankLost(rank=rank_id, incarnation=incarnation, reason=why, patient=patient), more]
    return [
        RankLost(rank=rank_id, incarnation=incarnation, reason=why, patient=patient),
        IncidentOpened(
            id=provisional("lost", rank_id),
            what=phrase("rank_lost", rank=rank_id),
            about=About(rank=rank_id),
            job=rank_id.job,
            evidence=tuple(evidence),
            decision=phrase("rank_waited_for", seconds=grace),
            reason=phrase("rank_may_be_frozen" if patient else "link_only_closed"),
        ),
    ]


def _describe_place(rank: Rank) -> Phrase:
    return phrase(
        "rank_on_devices" if rank.devices else "rank_on_no_device",
        pid=rank.pid,
        node=rank.node,
        devices=rank.devices,
    )


def handle_link_opened(cluster: ClusterState, rank_id: RankId, incarnation: str, now: float) -> Decision:
    rank = cluster.ranks.find(rank_id, incarnation)
    if rank is None:
        return NOTHING
    return _find_again(cluster, rank, phrase("link_open_again"), now)


def handle_beat(cluster: ClusterState, rank_id: RankId, beat: Beat, now: float) -> Decision:
    rank = cluster.ranks.get(rank_id)
    life = (rank_id, beat.incarnation)
    if rank is not None and rank.incarnation == beat.incarnation:
        rank_runtime = cluster.runtime.ranks[rank_id]
        astray = _close_disagreements(cluster, rank) if rank_runtime.mended else NOTHING
        if rank_runtime.astray == 2:
            astray = _report_disagreement(cluster, rank, beat)
        if now - rank.since < cluster.settings.settle_seconds:
            return astray  # may have been under way when it died
        return merge_decisions((astray, _find_again(cluster, rank, phrase("rank_heard", step=beat.step), now)))
    if not cluster.runtime.may_answer(life, now):
        return NOTHING
    if rank is not None and beat.incarnation < rank.incarnation:
        return Decision(commands=((rank_id, _mute(cluster, beat.incarnation, rank)),))
    introduce = Introduce(term=cluster.term, incarnation=beat.incarnation)
    return Decision(commands=((rank_id, introduce),))


def _report_disagreement(cluster: ClusterState, rank: Rank, beat: Beat) -> Decision:
    """Two beats in a row lack a change that all ranks must have: the rank was cut off at that step."""
    missed = cluster.runtime.ranks[rank.id].missed
    assert missed is not None
    opened = IncidentOpened(
        id=provisional("astray", rank.id, missed.id),
        what=phrase("rank_astray", rank=rank.id),
        about=About(rank=rank.id, part=missed.id),
        job=rank.id.job,
        evidence=(
            phrase("astray_from", change=missed.id, step=missed.step),
            phrase("astray_at" if beat.change else "astray_without", step=beat.step, change=f"c{beat.change}"),
        ),
        decision=REPORT_ONLY,
        reason=phrase("astray_reason"),
    )
    again = _welcome(cluster, rank)  # in case the change never reached it
    return Decision((opened,), ((rank.id, again),))


def _close_disagreements(cluster: ClusterState, rank: Rank) -> Decision:
    """Close the incidents about changes that a rank had missed and has now."""
    mine = [i for i in cluster.incidents.open_of(rank.id.job) if i.about.rank == rank.id and i.about.part]
    open_ones = [i for i in mine if not i.kind]  # the others are about something else
    agrees = phrase("rank_agrees_again")
    return Decision(tuple(close_incident(i.id, agrees) for i in open_ones))


def record_knobs(cluster: ClusterState, rank_id: RankId, report: Knobs) -> Decision:
    """A rank offers knobs; recorded if they differ from what its job has offered so far."""
    rank = cluster.ranks.find(rank_id, report.incarnation)
    if rank is None:
        return NOTHING
    offered = cluster.ledger.knobs.get(rank_id.job, {})
    news = tuple(spec for spec in report.knobs if spec.name not in offered or _differs(offered[spec.name].spec, spec))
    saves = report.checkpoints and rank_id.job not in cluster.ledger.checkpointers
    if not news and not saves:
        return NOTHING
    record = KnobsOffered(job=rank_id.job, knobs=news, checkpoints=report.checkpoints)
    return Decision((record,))


def _differs(offered: KnobSpec, spec: KnobSpec) -> bool:
    """Whether it accepts other values than before. Its current value does not matter."""
    return replace(offered, value=spec.value) != spec


def _find_again(cluster: ClusterState, rank: Rank, why: Prose, now: float) -> Decision:
    if rank.presence not in {Presence.LOST, Presence.DEAD}:
        return NOTHING
    records: list[Record] = [RankFound(rank=rank.id, incarnation=rank.incarnation, reason=why)]
    if rank.incident:
        outcome = phrase("rank_came_back", seconds=now - rank.since, why=why)
        records.append(close_incident(rank.incident, outcome))
    # What was changed while it was missing did not ask for it.
    return Decision(tuple(records), ((rank.id, _welcome(cluster, rank)),))


def _welcome(cluster: ClusterState, rank: Rank) -> Welcome:
    return Welcome(
        term=cluster.term,
        incarnation=rank.incarnation,
        beat_seconds=cluster.beat_seconds(),
        changes=cluster.ledger.in_force(rank.id),
    )


def compare_connections(cluster: ClusterState, now: float) -> Decision:
    """Ranks that were lost, and ranks that came back, while the weaver was away."""
    decisions: list[Decision] = []
    for rank in cluster.ranks.values():
        if cluster.runtime.linked((rank.id, rank.incarnation)):
            decisions.append(_find_again(cluster, rank, phrase("roll_call_answered"), now))
        elif rank.presence is Presence.LIVE:
            why = phrase("roll_call_missed")
            records = _lose(cluster, rank.id, rank.incarnation, why)
            decisions.append(Decision(tuple(records)))
    return merge_decisions(decisions)


def presume_dead(cluster: ClusterState, rank: Rank) -> Decision:
    why = phrase("did_not_come_back", reason=rank.reason)
    records: list[Record] = [RankDied(rank=rank.id, incarnation=rank.incarnation, reason=why)]
    if rank.incident:
        records.append(
            IncidentAmended(
                id=rank.incident,
                decision=REPORT_ONLY if cluster.runs.of(rank.id.replica_id) is None else BY_ITS_RUN,
                reason=phrase("rank_grace_over"),
                outcome=phrase("rank_presumed_dead"),
                closed=True,
            )
        )
    return Decision(tuple(records))
