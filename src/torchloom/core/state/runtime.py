"""The runtime state: what the weaver has observed since it started, and may forget. Links, last beats, deadlines.

Nothing here is stored. After a restart or a reconnection every timer starts again (`restart`): a weaver that was
suspended or cut off must not declare a rank dead because of its own absence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from torchloom.core.detect.checkpoint_overdue import CheckpointIntervalDetector
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.hang import HangTracker
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.detect.straggler import StragglerDetector
from torchloom.core.state.pending_operations import PendingOperations
from torchloom.core.state.rank_states import Presence, Rank
from torchloom.core.state.run_states import Run
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.node import AttemptStatus, NodeBeat
from torchloom.protocol.rank import Beat, ChangeSpec
from torchloom.protocol.views import Point
from torchloom.settings import Settings

DUE_KEPT = 8
NODE_SILENCE = 6.0
"""Seconds without a beat after which an agent counts as gone."""
ANSWER_PAUSE = 2.0
"""Seconds between two answers to the same unknown or muted incarnation."""
Life = tuple[RankId, str]
"""One incarnation of one rank."""
Attempts = tuple[tuple[str, int], ...]
"""Runs, and which attempt of each."""


class Curve:
    """A rank's history in bounded memory: when it is full, neighbours are merged and the spacing doubles.

    Points in order of time, at most `capacity`, evenly spaced but for the newest, which is always there.
    """

    __slots__ = ("_extra", "_offered", "_points", "capacity", "stride")

    def __init__(self, capacity: int) -> None:
        assert capacity >= 2
        self.capacity = capacity
        self.stride = 1
        """One of this number of offered points is kept."""
        self._offered = 0
        self._extra = False
        """The newest is between two kept points, and the next one replaces it."""
        self._points: list[Point] = []

    def add(self, point: Point) -> None:
        if self._points and point.at <= self._points[-1].at:
            return  # read again after a restart, or a clock that went back
        if self._extra:
            self._points.pop()
        self._points.append(point)
        self._extra = self._offered % self.stride != 0
        self._offered += 1
        if len(self._points) > self.capacity:
            self._thin()

    def _thin(self) -> None:
        newest = self._points[-1]
        self._points = (self._points[:-1] if self._extra else self._points)[::2]
        self.stride *= 2
        self._extra = self._points[-1] is not newest
        if self._extra:
            self._points.append(newest)

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)


@dataclass(slots=True)
class RankRuntime:
    """What was observed of a rank that has joined."""

    incarnation: str
    heard: float
    detectors: RankDetectors
    beat: Beat | None = None
    curve: Curve | None = None
    charted: float = 0.0
    """The time of the last beat in the curve."""
    missing: bool = False
    """Lost or presumed dead: its next beat needs a decision."""
    over: bool = False
    """Left or failed: this incarnation is not expected to send more."""
    due: list[ChangeSpec] = field(default_factory=list)
    """The latest changes, which must be in force from their steps on. A rank may learn late that it missed one."""
    missed: ChangeSpec | None = None
    """The newest of them whose step has passed without it."""
    astray: int = 0
    """Beats in a row in which that change was missing."""
    mended: bool = False
    """The latest beat has all changes again."""

    def compare(self, beat: Beat) -> None:
        """Compare the change that a beat reports with those that must be in force."""
        behind = [change for change in self.due if change.number > beat.change and change.step <= beat.step]
        missed = max(behind, key=lambda change: change.number, default=None)
        self.mended = missed is None and self.astray >= 2
        if missed is None:
            self.astray = 0
        elif missed != self.missed and self.astray >= 2:
            self.astray = 1  # the last one was reported; this is another
        else:
            self.astray += 1
        self.missed = missed


def _lasting(beat: NodeBeat) -> NodeBeat:
    """Without values that differ in every beat, and that no decision depends on."""
    return replace(beat, pressure=None, readings=())


@dataclass(slots=True)
class NodeSeen:
    """The last beat of an agent."""

    beat: NodeBeat
    heard: float


@dataclass(slots=True)
class RuntimeState:
    settings: Settings
    nodes: dict[str, NodeSeen] = field(default_factory=dict)
    ranks: dict[RankId, RankRuntime] = field(default_factory=dict)
    links: dict[Life, set[str]] = field(default_factory=dict)
    """Open connections of each incarnation; an empty set means that all were closed."""
    deadlines: dict[RankId, float] = field(default_factory=dict)
    """When a lost rank is presumed dead."""
    blind_until: float = 0.0
    """Silence is not judged before this time."""
    answered: dict[Life, float] = field(default_factory=dict)
    """When an unknown or muted incarnation was last answered: a rate limit."""
    reunion: bool = False
    """The server must be asked who is connected."""
    operations: PendingOperations = field(default_factory=PendingOperations)
    """Changes and orders under way."""
    lighthouses: dict[str, LighthouseBeat] = field(default_factory=dict)
    """By job: the last beat of its lighthouse."""
    examined: dict[str, float] = field(default_factory=dict)
    """When the agent of a node last reported whether it is fit."""
    meanwhile: list[tuple[Life, str, bool]] | None = None
    """While the server lists connections: links that opened (True) or closed since it was asked."""
    _hang_trackers: dict[str, tuple[Attempts, HangTracker]] = field(default_factory=dict)
    _straggler_detectors: dict[str, StragglerDetector[RankId]] = field(default_factory=dict)
    _checkpoint_detectors: dict[str, CheckpointIntervalDetector] = field(default_factory=dict)

    # ── what is seen ──

    def hear(self, rank: RankId, beat: Beat, now: float) -> tuple[Finding, ...] | None:
        """Take in a beat. None if that is all there is to it; else what was found, for a decision."""
        rank_runtime = self.ranks.get(rank)
        if rank_runtime is None or rank_runtime.incarnation != beat.incarnation:
            return ()
        rank_runtime.beat = beat
        rank_runtime.heard = now
        findings = rank_runtime.detectors.hear(beat, now)
        if not (findings or rank_runtime.missing or rank_runtime.due or rank_runtime.astray or rank_runtime.mended):
            return None  # as mostly
        if rank_runtime.due or rank_runtime.astray or rank_runtime.mended:
            rank_runtime.compare(beat)
        # A change that only one beat lacks may be under way.
        wanted = findings or rank_runtime.missing or rank_runtime.mended or rank_runtime.astray == 2
        return findings if wanted else None

    def last_beat(self, rank: RankId, incarnation: str) -> Beat | None:
        """The last beat of this incarnation, if one was heard since the weaver started."""
        rank_runtime = self.ranks.get(rank)
        return rank_runtime.beat if rank_runtime is not None and rank_runtime.incarnation == incarnation else None

    def attempt_status(self, node: str, run: Run) -> AttemptStatus | None:
        """What the agent of a node last reported about the attempt under way."""
        attempts = self.nodes[node].beat.attempts if node in self.nodes else ()
        return next((status for status in attempts if (status.job, status.attempt) == (run.name, run.attempt)), None)

    def hang_tracker(self, job: str, attempts: Attempts = ()) -> HangTracker:
        """The hang tracker of a job or run, for these attempts."""
        tracked, case = self._hang_trackers.get(job, ((), None))
        if case is None or tracked != attempts:
            case = HangTracker()
            self._hang_trackers[job] = attempts, case
        return case

    def straggler_detector(self, job: str) -> StragglerDetector[RankId]:
        return self._straggler_detectors.setdefault(job, StragglerDetector())

    def checkpoint_detector(self, job: str) -> CheckpointIntervalDetector:
        return self._checkpoint_detectors.setdefault(job, CheckpointIntervalDetector())

    def forget_job(self, job: str) -> None:
        for table in (self._hang_trackers, self._straggler_detectors, self._checkpoint_detectors, self.lighthouses):
            table.pop(job, None)

    def hear_lighthouse(self, job: str, beat: LighthouseBeat) -> bool:
        """Store a beat of a lighthouse; whether it differs from the last one."""
        before = self.lighthouses.get(job)
        self.lighthouses[job] = beat
        return before != beat

    def hear_node(self, node: str, beat: NodeBeat, now: float) -> bool:
        """Store a beat of an agent; whether it differs from the last one. Beats of an older incarnation are ignored."""
        before = self.nodes.get(node)
        if before is not None and beat.incarnation < before.beat.incarnation and now - before.heard < NODE_SILENCE:
            return False
        self.nodes[node] = NodeSeen(beat, now)
        if beat.fitness is not None and (before is None or before.beat.fitness != beat.fitness):
            self.examined[node] = now
        return before is None or _lasting(before.beat) != _lasting(beat)

    def node_speaks(self, node: str, now: float) -> bool:
        """Whether an agent sends beats; after this weaver was away, the agent has time to send the first."""
        if now < self.blind_until + NODE_SILENCE:
            return True
        seen = self.nodes.get(node)
        return seen is not None and now - seen.heard < NODE_SILENCE

    def leaves(self, node: str) -> bool:
        """Whether an agent has announced that it ends, with all ranks it runs."""
        seen = self.nodes.get(node)
        return seen is not None and seen.beat.leaving

    def forget_nodes(self, now: float) -> None:
        """Forget silent agents that announced their end, or that served only one job."""
        patience = self.settings.node_patience_seconds + NODE_SILENCE
        for node, seen in list(self.nodes.items()):
            away = now - seen.heard
            if (seen.beat.leaving and away > NODE_SILENCE) or (seen.beat.tied and away > patience):
                del self.nodes[node]
                self.examined.pop(node, None)

    def link_changed(self, life: Life, link: str, *, opened: bool) -> None:
        if not opened and len(self.links) > 2 * len(self.ranks) + 1000:  # no hello of these is expected any more
            self.links = {life: links for life, links in self.links.items() if links}
        links = self.links.setdefault(life, set())
        (links.add if opened else links.discard)(link)
        if self.meanwhile is not None:
            self.meanwhile.append((life, link, opened))

    def linked(self, life: Life) -> bool:
        return bool(self.links.get(life))

    def seen_closing(self, life: Life) -> bool:
        return self.links.get(life) == set()

    def ask_roll(self) -> None:
        """The server is asked who is connected: record what changes until it answers."""
        self.meanwhile = []

    def call_roll(self, present: dict[Life, set[str]]) -> None:
        """Take in who is connected, as listed by the server, and what changed after it had been asked."""
        news, self.meanwhile = self.meanwhile or [], None
        self.links = {life: set(links) for life, links in present.items()}
        for life, link, opened in news:
            self.link_changed(life, link, opened=opened)
        self.reunion = False

    # ── what follows from records ──

    def joined(self, rank: Rank, now: float) -> None:
        before = self.ranks.get(rank.id)
        detectors, curve = RankDetectors(self.settings), before.curve if before else None
        self.ranks[rank.id] = RankRuntime(rank.incarnation, now, detectors, curve=curve)
        self.follow(rank, now)

    def expect(self, rank: RankId, change: ChangeSpec) -> None:
        """From its step on, this change must be in force in the rank."""
        rank_runtime = self.ranks[rank]
        rank_runtime.due = [*rank_runtime.due[1 - DUE_KEPT :], change]

    def follow(self, rank: Rank, now: float) -> None:
        """The presence of a rank has changed. A beat of one that is only presumed dead still needs a decision."""
        rank_runtime = self.ranks[rank.id]
        rank_runtime.missing = rank.presence in {Presence.LOST, Presence.DEAD}
        rank_runtime.over = rank.presence in {Presence.LEFT, Presence.FAILED}
        self.deadlines.pop(rank.id, None)
        if rank.presence is Presence.LIVE:
            rank_runtime.heard = now
        elif rank.presence is Presence.LOST:
            grace = self.settings.frozen_grace_seconds if rank.patient else self.settings.grace_seconds
            self.deadlines[rank.id] = now + grace

    def forgotten(self, rank: RankId) -> None:
        self.ranks.pop(rank, None)
        self.deadlines.pop(rank, None)
        for life in [life for life in self.links if life[0] == rank]:
            del self.links[life]

    # ── patience ──

    def restart(self, now: float, lost: Iterable[Rank]) -> None:
        """Restart every timer, also those of the lost ranks: this weaver was away."""
        for rank_runtime in self.ranks.values():
            rank_runtime.heard = now
        for seen in self.nodes.values():
            seen.heard = now
        self.blind_until = now + self.settings.reunion_seconds
        self.reunion = True
        for table in (self._hang_trackers, self._straggler_detectors, self._checkpoint_detectors):
            table.clear()
        for rank in lost:
            self.follow(rank, self.blind_until)
        for operation in self.operations.by_request.values():
            operation.began = now

    def silent(self, ranks: Iterable[RankId], now: float, beat_seconds: float) -> list[RankId]:
        """The ranks among these that have sent nothing for too long."""
        if now < self.blind_until:
            return []
        limit = now - max(self.settings.silence_seconds, 5 * beat_seconds)
        observed = ((rank, self.ranks[rank]) for rank in ranks if rank in self.ranks)
        return [
            rank
            for rank, rank_runtime in observed
            if rank_runtime.heard < limit and not rank_runtime.missing and not rank_runtime.over
        ]

    def expired(self, now: float) -> list[RankId]:
        return [rank for rank, deadline in self.deadlines.items() if deadline <= now]

    def may_answer(self, life: Life, now: float) -> bool:
        return self.answered.get(life, float("-inf")) + ANSWER_PAUSE <= now

    def note_answer(self, life: Life, now: float) -> None:
        if len(self.answered) > 20_000:
            self.answered.clear()
        self.answered[life] = now
