"""The engine: all rules of the weaver, in the order in which they apply. It does no input or output.

    hear          beats, replies and links update the runtime state at once. Most of them need no decision;
                  otherwise the event to handle is returned
    handle        detect, decide, fold: findings become part of the event, `decide` judges it,
                  and the records change the cluster state
    tick          the events that time brings
    check_ranks   the same for every rank, a slice of them at a time

Hearing and handling are two steps because decisions wait for the log, and beats must not. The owner of an engine stores
`Decision.stored` before it sends anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchloom.core import events
from torchloom.core.changes.requests import is_known
from torchloom.core.decide import decide
from torchloom.core.decision import Decision
from torchloom.core.incidents.periodic_checks import hang_of_run, look_around
from torchloom.core.scheduling.loader_scheduler import JobSeen, LoaderScheduler
from torchloom.core.scheduling.observation import JobObserver, budgets
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runtime import Life
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.rank import Beat, Reply
from torchloom.protocol.records import InboxRead

EVICT_SECONDS = 1.0
"""Between two repetitions of an eviction that a lighthouse has not confirmed."""


class Engine:
    def __init__(self, cluster: ClusterState) -> None:
        self.cluster = cluster
        self.scheduler = LoaderScheduler()
        self._observer = JobObserver()
        self._looks = 0
        """Of the scheduler."""
        self._due: set[str] = set()
        """Runs that wait to be handled because an agent sent a beat: once is enough for all agents of a run."""
        self._repeated: dict[str, float] = {}
        """By job: when its evictions were last repeated to its lighthouse."""

    def handle(self, event: events.Event, now: float) -> Decision:
        """Detect, decide, fold. The decision must be stored before it is carried out."""
        if isinstance(event, events.RunDue):
            self._due.discard(event.job)
            event = events.RunDue(event.job, hang_of_run(self.cluster, event.job, now))
        decision = decide(self.cluster, event, now)
        self.cluster.fold(decision.records, now)
        for rank, command in decision.commands:
            self.cluster.runtime.note_answer((rank, command.incarnation), now)
        if isinstance(event, events.LoadersDue):
            requests = (command.request for command in event.commands)
            self.scheduler.note_unaccepted(request for request in requests if not is_known(self.cluster, request))
        return decision

    def has_read(self, seq: int, now: float) -> tuple[InboxRead, ...]:
        """The inbox has been read up to here. Returns the records to store."""
        if seq <= self.cluster.inbox_seq:
            return ()
        mark = InboxRead(seq=seq)
        self.cluster.fold((mark,), now)
        return (mark,)

    def restart(self, now: float) -> None:
        """This weaver was away: every timer starts again."""
        self.cluster.restart_runtime(now)

    # ── what arrives ──

    def hear(self, rank: RankId, beat: Beat, now: float) -> events.BeatReceived | None:
        findings = self.cluster.runtime.hear(rank, beat, now)
        return None if findings is None else events.BeatReceived(rank, beat, findings)

    def hear_node(self, node: str, beat: NodeBeat, now: float) -> tuple[events.Event, ...]:
        if not self.cluster.runtime.hear_node(node, beat, now):
            return ()
        due = [job for job in self.cluster.runs.due(node) if job not in self._due]
        self._due.update(due)
        return (events.NodeBeatReceived(node), *map(events.RunDue, due))

    def hear_lighthouse(self, job: str, beat: LighthouseBeat, now: float) -> events.LighthouseBeatReceived | None:
        behind = not set(self.cluster.evicted.get(job, ())) <= set(beat.evicted)
        news = self.cluster.runtime.hear_lighthouse(job, beat)
        return events.LighthouseBeatReceived(job) if news or (behind and self._may_repeat(job, now)) else None

    def _may_repeat(self, job: str, now: float) -> bool:
        """Not at once again: a lighthouse that cannot store evictions answers each time."""
        self._repeated = {name: at for name, at in self._repeated.items() if now - at < EVICT_SECONDS}
        if job in self._repeated:
            return False
        self._repeated[job] = now
        return True

    def hear_reply(self, rank: RankId, reply: Reply) -> events.ReplyReceived | None:
        return None if self.cluster.runtime.operations.take(rank, reply) is None else events.ReplyReceived(rank, reply)

    def hear_link(self, event: events.LinkEvent) -> None:
        """Of an event that is handled next."""
        life = (event.rank, event.incarnation)
        self.cluster.runtime.link_changed(life, event.link, opened=isinstance(event, events.LinkOpened))

    def hear_roll(self, present: dict[Life, set[str]]) -> events.RollCalled:
        """Take in which ranks are connected, as listed by the server."""
        self.cluster.runtime.call_roll(present)
        return events.RollCalled()

    # ── time ──

    def tick(self, now: float) -> tuple[events.Event, ...]:
        """A few times a second: the events that are due."""
        self.cluster.runtime.forget_nodes(now)
        moves = self._schedule(self._observer.see(self.cluster), now) if self.scheduler.is_moving else ()
        return (events.Tick(), *map(events.RunDue, self.cluster.runs.due()), *moves)

    def check_ranks(self, now: float) -> Iterator[tuple[events.Event, ...]]:
        """About once a second: a pass over all ranks, in slices between which other events may be handled."""
        yield from look_around(self.cluster, now)
        jobs, looks = [], self._looks
        for job in self._observer.see(self.cluster):
            jobs.append(job)
            yield ()
        if self._looks == looks and (moves := self._schedule(jobs, now)):  # a tick may have seen later states of jobs
            yield moves

    def _schedule(self, jobs: Iterable[JobSeen], now: float) -> tuple[events.Event, ...]:
        self._looks += 1
        outcome = self.scheduler.look(jobs, budgets(self.cluster), self.cluster.schedule, now)
        return (events.LoadersDue(outcome.allocated, outcome.commands),) if outcome else ()
