"""Ranks: joining, going missing, coming back, ending.

The newest incarnation of a rank is the rank; an older one is muted. Incarnations are ordered by themselves, not by
arrival, so late and repeated messages change nothing. Evidence of life and death comes from different senders (the
rank, the server, an agent) in any order; core/presence.py says what each sign means in each state.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.detect.kinds import HANGS
from torchloom.core.incident_ids import close_incident, provisional
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.presence import JobPhase, Presence
from torchloom.core.state.ranks import Rank
from torchloom.core.state.runs import RunPhase
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.incident_records import About, IncidentAmended, IncidentOpened
from torchloom.protocol.knob_values import KnobSpec
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat, Command, Farewell, Goodbye, Hello, Introduce, Knobs, Muted, Welcome
from torchloom.protocol.records import (
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


def handle_hello(cluster: ClusterState, rank: RankId, said: Hello) -> Decision:
    known = cluster.ranks.get(rank)
    if known is not None and said.incarnation < known.incarnation:
        return Decision(commands=((rank, _mute(cluster, said.incarnation, known)),))
    job = cluster.jobs.get(rank.job)
    same_run = job is not None and job.phase is JobPhase.RUNNING
    welcome = Welcome(
        term=cluster.term,
        incarnation=said.incarnation,
        beat_seconds=cluster.beat_seconds(),
        changes=cluster.ledger.in_force(rank) if same_run else (),
    )
    if known is not None and said.incarnation == known.incarnation:
        if known.counted and not said.counted:
            attached = RankAttached(rank=rank, incarnation=said.incarnation)
            return Decision((attached,), ((rank, welcome),))
        return Decision(commands=((rank, welcome),))

    records: list[Record] = []
    commands: list[tuple[RankId, Command]] = [(rank, welcome)]
    if not same_run:
        records.append(JobBegan(job=rank.job))
    if known is not None and known.incident:
        records.append(close_incident(known.incident, phrase("rank_joined_again")))
    if known is not None and known.presence is Presence.LIVE and cluster.runtime.linked((rank, known.incarnation)):
        records += _report_duplicate(rank, known, said)
        commands.append((rank, _mute(cluster, known.incarnation, said)))
    records.append(RankJoined(rank=rank, hello=said))
    if cluster.runtime.seen_closing((rank, said.incarnation)):  # it was over before its hello was read
        records += _lose(cluster, rank, said.incarnation, "Client Closed")
    return Decision(tuple(records), tuple(commands))


def _mute(cluster: ClusterState, incarnation: str, newer: Rank | Hello) -> Muted:
    return Muted(term=cluster.term, incarnation=incarnation, newest=newer.incarnation, pid=newer.pid, node=newer.node)


def _report_duplicate(rank: RankId, known: Rank, said: Hello) -> list[Record]:
    incident = provisional("twice", rank)
    return [
        IncidentOpened(
            id=incident,
            what=phrase("rank_id_twice", rank=rank),
            about=About(rank=rank),
            job=rank.job,
            evidence=(
                phrase("twice_older", pid=known.pid, node=known.node, incarnation=known.incarnation),
                phrase("twice_newer", pid=said.pid, node=said.node, incarnation=said.incarnation),
            ),
            decision=phrase("twice_decided"),
            reason=phrase("twice_reason"),
        ),
        close_incident(incident, phrase("twice_muted")),
    ]


def handle_goodbye(cluster: ClusterState, rank: RankId, said: Goodbye) -> Decision:
    farewell = (rank, Farewell(term=cluster.term, incarnation=said.incarnation))
    known = cluster.ranks.find(rank, said.incarnation)
    if known is None:
        return Decision(commands=(farewell,))
    if said.how == "failed":
        ended = _fail(cluster, known, said.error or phrase("rank_said_failed"))
    else:
        ended = _leave(known, said.how)
    return Decision(ended.records, (farewell,))


def handle_exit(cluster: ClusterState, fact: RankExited) -> Decision:
    known = cluster.ranks.find(RankId(fact.job, fact.replica, fact.rank), fact.incarnation)
    if known is None:
        return NOTHING
    if fact.exit_code == 0 and not fact.signal:
        return _leave(known, "finished")
    if fact.signal:
        how = phrase("killed_by", signal=fact.signal)
    else:
        how = phrase("rank_process_ended" if fact.exit_code is None else "exit_code", status=fact.exit_code)
    return _fail(cluster, known, how, fact.evidence)


def _leave(known: Rank, how: str) -> Decision:
    if known.presence in {Presence.LEFT, Presence.FAILED}:
        return NOTHING
    records: list[Record] = [
        RankLeft(
            rank=known.id, incarnation=known.incarnation, how="interrupted" if how == "interrupted" else "finished"
        )
    ]
    if known.incident:
        records.append(close_incident(known.incident, phrase("rank_had_left")))
    return Decision(tuple(records))


def _fail(cluster: ClusterState, known: Rank, why: Prose, evidence: str = "") -> Decision:
    if known.presence is Presence.FAILED:
        return NOTHING
    died = RankDied(rank=known.id, incarnation=known.incarnation, reason=why, confirmed=True)
    told = (why, evidence) if evidence else (why,)
    dead = phrase("rank_dead", why=why[:MOST_OF_WHY] if isinstance(why, str) else why)
    run = cluster.runs.of(known.id.replica_id)
    if run is not None and run.phase is RunPhase.STOPPING and not known.incident:
        return Decision((died,))  # it goes with its peers
    if known.incident:
        ended = IncidentAmended(
            id=known.incident,
            evidence=told,
            decision="" if run is not None else REPORT_ONLY,
            reason=why,
            outcome=dead,
            closed=True,
        )
        return Decision((died, ended))
    incident = provisional("failed", known.id)
    opened = IncidentOpened(
        id=incident,
        what=phrase("rank_failed", rank=known.id),
        about=About(rank=known.id),
        job=known.id.job,
        evidence=(*told, _describe_place(known)),
        decision=REPORT_ONLY if run is None else BY_ITS_RUN,
        reason=why,
    )
    if run is not None:
        return Decision((died, opened))  # its run decides what follows
    return Decision(
        (died, opened, close_incident(incident, dead)),
    )


def handle_link_closed(cluster: ClusterState, rank: RankId, incarnation: str, reason: str) -> Decision:
    known = cluster.ranks.find(rank, incarnation)
    if known is None or known.presence is not Presence.LIVE:
        return NOTHING
    if cluster.runtime.linked((rank, incarnation)):
        return NOTHING  # it has another link: it had reconnected before the server noticed the old one
    killed = _killed_by(cluster, rank, incarnation)
    if killed is not None:
        return _fail(cluster, known, killed)
    return Decision(tuple(_lose(cluster, rank, incarnation, reason)))


def _killed_by(cluster: ClusterState, rank: RankId, incarnation: str) -> Phrase | None:
    """Who had it killed, if it has said itself that it obeys: an order alone may never have reached it."""
    for order in cluster.ledger.kills(rank, incarnation):
        operation = cluster.runtime.operations.find(order.id)
        obeyed = operation.ordered.get(rank) if operation is not None else None
        all_obeyed = order.outcome and order.applied == len(order.lives)  # a kill of one presumed dead ends well too
        if all_obeyed or (obeyed is not None and obeyed.outcome == "applied"):
            return phrase(
                "killed_by_operator" if order.operator else "killed_by_an_operator",
                operator=order.operator,
                order=order.id,
            )
    return None


def lose_silent(cluster: ClusterState, rank: RankId, now: float) -> Decision:
    known = cluster.ranks[rank]
    quiet = now - cluster.runtime.ranks[rank].heard
    why = phrase("rank_silent", seconds=quiet)
    return Decision(tuple(_lose(cluster, rank, known.incarnation, why, patient=True)))


def _lose(cluster: ClusterState, rank: RankId, incarnation: str, why: Prose, patient: bool = False) -> list[Record]:
    known = cluster.ranks.get(rank)
    frozen = isinstance(why, str) and why in FROZEN_REASONS
    patient = patient or frozen
    run = cluster.runs.of(rank.replica_id)
    if run is not None and run.phase is RunPhase.STOPPING:  # it is being ended with its peers
        return [RankLost(rank=rank, incarnation=incarnation, reason=why, patient=patient)]
    grace = cluster.settings.frozen_grace_seconds if patient else cluster.settings.grace_seconds
    rank_runtime = cluster.runtime.ranks.get(rank)
    evidence = [phrase("server_says", why=why) if not patient or frozen else why]
    if rank_runtime is not None and rank_runtime.beat is not None and rank_runtime.incarnation == incarnation:
        evidence.append(phrase("rank_last_step", step=rank_runtime.beat.step))
    if known is not None and known.incarnation == incarnation:
        evidence.append(_describe_place(known))
    mine = (i for i in cluster.incidents.open_of(rank.job) if i.about.rank == rank and i.about.part)
    hangs = next((i for i in mine if i.kind in HANGS), None)
    if hangs is not None:  # that is why
        more = IncidentAmended(id=hangs.id, evidence=(phrase("rank_lost_too", why=why),))
        return [RankLost(rank=rank, incarnation=incarnation, reason=why, patient=patient), more]
    return [
        RankLost(rank=rank, incarnation=incarnation, reason=why, patient=patient),
        IncidentOpened(
            id=provisional("lost", rank),
            what=phrase("rank_lost", rank=rank),
            about=About(rank=rank),
            job=rank.job,
            evidence=tuple(evidence),
            decision=phrase("rank_waited_for", seconds=grace),
            reason=phrase("rank_may_be_frozen" if patient else "link_only_closed"),
        ),
    ]


def _describe_place(known: Rank) -> Phrase:
    return phrase(
        "rank_on_devices" if known.devices else "rank_on_no_device",
        pid=known.pid,
        node=known.node,
        devices=known.devices,
    )


def handle_link_opened(cluster: ClusterState, rank: RankId, incarnation: str, now: float) -> Decision:
    known = cluster.ranks.find(rank, incarnation)
    if known is None:
        return NOTHING
    return _find_again(cluster, known, phrase("link_open_again"), now)


def handle_beat(cluster: ClusterState, rank: RankId, beat: Beat, now: float) -> Decision:
    known = cluster.ranks.get(rank)
    life = (rank, beat.incarnation)
    if known is not None and known.incarnation == beat.incarnation:
        rank_runtime = cluster.runtime.ranks[rank]
        astray = _close_disagreements(cluster, known) if rank_runtime.mended else NOTHING
        if rank_runtime.astray == 2:
            astray = _report_disagreement(cluster, known, beat)
        if now - known.since < cluster.settings.settle_seconds:
            return astray  # may have been under way when it died
        return merge_decisions((astray, _find_again(cluster, known, phrase("rank_heard", step=beat.step), now)))
    if not cluster.runtime.may_tell(life, now):
        return NOTHING
    if known is not None and beat.incarnation < known.incarnation:
        return Decision(commands=((rank, _mute(cluster, beat.incarnation, known)),))
    introduce = Introduce(term=cluster.term, incarnation=beat.incarnation)
    return Decision(commands=((rank, introduce),))


def _report_disagreement(cluster: ClusterState, known: Rank, beat: Beat) -> Decision:
    """Two beats in a row say that a change which all ranks took is not in force here: it was cut off at that step."""
    missed = cluster.runtime.ranks[known.id].missed
    assert missed is not None
    opened = IncidentOpened(
        id=provisional("astray", known.id, missed.id),
        what=phrase("rank_astray", rank=known.id),
        about=About(rank=known.id, part=missed.id),
        job=known.id.job,
        evidence=(
            phrase("astray_from", change=missed.id, step=missed.step),
            phrase("astray_at" if beat.change else "astray_without", step=beat.step, change=f"c{beat.change}"),
        ),
        decision=REPORT_ONLY,
        reason=phrase("astray_reason"),
    )
    again = _welcome(cluster, known)  # in case the change never reached it
    return Decision((opened,), ((known.id, again),))


def _close_disagreements(cluster: ClusterState, known: Rank) -> Decision:
    """It has by now what it had missed."""
    mine = [i for i in cluster.incidents.open_of(known.id.job) if i.about.rank == known.id and i.about.part]
    open_ones = [i for i in mine if not i.kind]  # the others are about something else
    agrees = phrase("rank_agrees_again")
    return Decision(tuple(close_incident(i.id, agrees) for i in open_ones))


def record_knobs(cluster: ClusterState, rank: RankId, said: Knobs) -> Decision:
    """A rank says what may be changed; recorded if that is more than, or other than, its job has offered so far."""
    known = cluster.ranks.find(rank, said.incarnation)
    if known is None:
        return NOTHING
    offered = cluster.ledger.knobs.get(rank.job, {})
    news = tuple(spec for spec in said.knobs if spec.name not in offered or _differs(offered[spec.name].spec, spec))
    saves = said.checkpoints and rank.job not in cluster.ledger.checkpointers
    if not news and not saves:
        return NOTHING
    record = KnobsOffered(job=rank.job, knobs=news, checkpoints=said.checkpoints)
    return Decision((record,))


def _differs(known: KnobSpec, said: KnobSpec) -> bool:
    """In what it accepts; the value it has just now is another matter."""
    return replace(known, value=said.value) != said


def _find_again(cluster: ClusterState, known: Rank, why: Prose, now: float) -> Decision:
    if known.presence not in {Presence.LOST, Presence.DEAD}:
        return NOTHING
    records: list[Record] = [RankFound(rank=known.id, incarnation=known.incarnation, reason=why)]
    if known.incident:
        outcome = phrase("rank_came_back", seconds=now - known.since, why=why)
        records.append(close_incident(known.incident, outcome))
    # What was changed while it was missing did not ask for it.
    return Decision(tuple(records), ((known.id, _welcome(cluster, known)),))


def _welcome(cluster: ClusterState, known: Rank) -> Welcome:
    return Welcome(
        term=cluster.term,
        incarnation=known.incarnation,
        beat_seconds=cluster.beat_seconds(),
        changes=cluster.ledger.in_force(known.id),
    )


def compare_connections(cluster: ClusterState, now: float) -> Decision:
    """Ranks that were lost, and ranks that came back, while the weaver was away."""
    decisions: list[Decision] = []
    for known in cluster.ranks.values():
        if cluster.runtime.linked((known.id, known.incarnation)):
            decisions.append(_find_again(cluster, known, phrase("roll_call_answered"), now))
        elif known.presence is Presence.LIVE:
            why = phrase("roll_call_missed")
            records = _lose(cluster, known.id, known.incarnation, why)
            decisions.append(Decision(tuple(records)))
    return merge_decisions(decisions)


def presume_dead(cluster: ClusterState, known: Rank) -> Decision:
    why = phrase("did_not_come_back", reason=known.reason)
    records: list[Record] = [RankDied(rank=known.id, incarnation=known.incarnation, reason=why)]
    if known.incident:
        records.append(
            IncidentAmended(
                id=known.incident,
                decision=REPORT_ONLY if cluster.runs.of(known.id.replica_id) is None else BY_ITS_RUN,
                reason=phrase("rank_grace_over"),
                outcome=phrase("rank_presumed_dead"),
                closed=True,
            )
        )
    return Decision(tuple(records))
