"""A weaver without a wire: decides, folds, and remembers what it would have logged and sent. Time is passed in."""

from __future__ import annotations

from torchloom.core.decision import NOTHING, Decision, WantedVerdict, merge_decisions
from torchloom.core.engine import Engine
from torchloom.core.events import (
    BeatReceived,
    Event,
    FactReceived,
    LinkClosed,
    LinkOpened,
    ReplyReceived,
    ReportReceived,
    RequestReceived,
    Tick,
)
from torchloom.core.state.cluster import ClusterState, State
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import Fact
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask, Done, No
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import Beat, Command, Goodbye, Hello
from torchloom.protocol.records import Record
from torchloom.settings import Settings

SETTINGS = Settings()
HI = RankId("mnist", "hi", 0)


def life(number: int) -> str:
    """The number-th incarnation: a greater number is a newer life."""
    return f"{number:024x}"


def a_hello(
    number: int = 1,
    devices: tuple[str, ...] = ("GPU-1",),
    node: str = "node1",
    pid: int = 100,
    world_size: int = 1,
) -> Hello:
    return Hello(incarnation=life(number), node=node, pid=pid, devices=devices, world_size=world_size)


class Loom:
    def __init__(self, settings: Settings = SETTINGS, state: State | None = None) -> None:
        self.cluster = ClusterState(settings, state)
        self.engine = Engine(self.cluster)
        self.log: list[tuple[float, tuple[Record, ...]]] = []
        self.sent: list[tuple[RankId, Command]] = []
        self.replies: list[tuple[str, Done | No]] = []
        self.verdicts: list[WantedVerdict] = []
        self.now = 1000.0

    def happen(self, event: Event) -> Decision:
        if isinstance(event, Tick):
            return merge_decisions((self._handle(event), self.look()))
        return self._handle(event)

    def look(self) -> Decision:
        """At everyone."""
        return merge_decisions(self._handle(event) for events in self.engine.check_ranks(self.now) for event in events)

    def _handle(self, event: Event) -> Decision:
        heard = self._hear(event)
        if heard is None:
            return NOTHING
        decision = self.engine.handle(heard, self.now)
        parts = [*decision.stored, *(task for _, task in decision.tasks)]
        assert b'"new: ' not in encode(parts), "an incident is named by the id that it had before it was numbered"
        if decision.stored:
            self.log.append((self.now, decision.stored))
        self.sent += decision.commands
        self.replies += decision.replies
        if isinstance(event, RequestReceived) and decision.answer is not None:
            self.replies.append((event.reply, decision.answer))
        self.verdicts += decision.verdicts
        return decision

    def _hear(self, event: Event) -> Event | None:
        match event:
            case LinkOpened() | LinkClosed():
                self.engine.hear_link(event)
            case BeatReceived(rank=rank, beat=beat):
                return self.engine.hear(rank, beat, self.now)
            case ReplyReceived(rank=rank, reply=reply):
                return self.engine.hear_reply(rank, reply)
        return event

    def wait(self, seconds: float, heartbeat: tuple[RankId, ...] = ()) -> list[Record]:
        """Let time pass in ticks; those in `heartbeat` go on beating."""
        seen: list[Record] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for rank in heartbeat:
                self.beat(rank, int(self.cluster.ranks[rank].incarnation, 16))
            seen += self.happen(Tick()).records
        return seen

    def join(self, rank: RankId = HI, number: int = 1, link: str = "", **hello: object) -> Decision:
        self.happen(LinkOpened(rank, life(number), link or f"s:{number}"))
        return self.happen(ReportReceived(rank, a_hello(number, **hello)))  # type: ignore[arg-type]

    def close(self, rank: RankId = HI, number: int = 1, reason: str = "Client Closed", link: str = "") -> Decision:
        return self.happen(LinkClosed(rank, life(number), link or f"s:{number}", reason))

    def open(self, rank: RankId = HI, number: int = 1, link: str = "s:again") -> Decision:
        return self.happen(LinkOpened(rank, life(number), link))

    def leave(self, rank: RankId = HI, number: int = 1, how: str = "finished", error: str = "") -> Decision:
        return self.happen(ReportReceived(rank, Goodbye(incarnation=life(number), how=how, error=error)))  # type: ignore[arg-type]

    def beat(self, rank: RankId = HI, number: int = 1, step: int = 1, change: int = 0) -> Decision:
        return self.happen(BeatReceived(rank, Beat(incarnation=life(number), step=step, change=change)))

    def tell(self, fact: Fact) -> Decision:
        return self.happen(FactReceived(fact))

    def ask(self, ask: Ask, reply: str = "") -> Decision:
        return self.happen(RequestReceived(ask, reply))

    def answers(self, reply: str) -> list[Done | No]:
        return [answer for to, answer in self.replies if to == reply]

    def call_roll(self, *present: tuple[RankId, int]) -> Decision:
        there = {(rank, life(number)): {f"s:{number}"} for rank, number in present}
        return self.happen(self.engine.hear_roll(there))

    def presence(self, rank: RankId = HI) -> str:
        return self.cluster.ranks[rank].presence.value

    def open_incidents(self) -> list[Prose]:
        return [i.what for i in self.cluster.incidents.values() if i.closed is None]

    def restarted(self) -> Loom:
        """Another weaver that folds the same log."""
        other = Loom(self.cluster.settings)
        for at, records in self.log:
            other.cluster.fold(records, at)
        other.now = self.now
        other.log = list(self.log)
        other.cluster.restart_runtime(other.now)
        return other
