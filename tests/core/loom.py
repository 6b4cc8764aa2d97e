"""A weaver without a wire: decides, folds, and remembers what it would have logged and sent. Time is passed in."""

from __future__ import annotations

from torchloom.core.decide import decide
from torchloom.core.decision import Decision, WantedVerdict
from torchloom.core.events import (
    Asked,
    Event,
    FactTold,
    Heard,
    LinkClosed,
    LinkOpened,
    Replied,
    Reported,
    RollCalled,
    Tick,
)
from torchloom.core.fabric import Fabric, State
from torchloom.messages import Ask, Beat, Command, Done, Fact, Goodbye, Hello, No, RankId, Record
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
        self.fabric = Fabric(settings, state)
        self.log: list[tuple[float, tuple[Record, ...]]] = []
        self.sent: list[tuple[RankId, Command]] = []
        self.replies: list[tuple[str, Done | No]] = []
        self.verdicts: list[WantedVerdict] = []
        self.now = 1000.0

    def happen(self, event: Event) -> Decision:
        watch = self.fabric.watch
        if isinstance(event, LinkOpened):
            watch.link_opened((event.rank, event.incarnation), event.link)
        elif isinstance(event, LinkClosed):
            watch.link_closed((event.rank, event.incarnation), event.link)
        elif isinstance(event, Heard):
            if watch.hear(event.rank, event.beat, self.now):
                return Decision()
            event = Heard(event.rank, event.beat, watch.take_found(event.rank))
        if isinstance(event, Replied) and watch.courses.take(event.rank, event.reply) is None:
            return Decision()
        decision = decide(self.fabric, event, self.now)
        self.fabric.fold(decision.records, self.now)
        for note in decision.notes:
            watch.courses.note(note)
        if decision.records:
            self.log.append((self.now, decision.records))
        for rank, command in decision.commands:
            watch.has_told((rank, command.incarnation), self.now)
        self.sent += decision.commands
        self.replies += decision.replies
        if isinstance(event, Asked) and decision.answer is not None:
            self.replies.append((event.reply, decision.answer))
        self.verdicts += decision.verdicts
        return decision

    def wait(self, seconds: float, heartbeat: tuple[RankId, ...] = ()) -> list[Record]:
        """Let time pass in ticks; those in `heartbeat` go on beating."""
        seen: list[Record] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for rank in heartbeat:
                self.beat(rank, int(self.fabric.ranks[rank].incarnation, 16))
            seen += self.happen(Tick()).records
        return seen

    def join(self, rank: RankId = HI, number: int = 1, link: str = "", **hello: object) -> Decision:
        self.happen(LinkOpened(rank, life(number), link or f"s:{number}"))
        return self.happen(Reported(rank, a_hello(number, **hello)))  # type: ignore[arg-type]

    def close(self, rank: RankId = HI, number: int = 1, reason: str = "Client Closed", link: str = "") -> Decision:
        return self.happen(LinkClosed(rank, life(number), link or f"s:{number}", reason))

    def open(self, rank: RankId = HI, number: int = 1, link: str = "s:again") -> Decision:
        return self.happen(LinkOpened(rank, life(number), link))

    def leave(self, rank: RankId = HI, number: int = 1, how: str = "finished", error: str = "") -> Decision:
        return self.happen(Reported(rank, Goodbye(incarnation=life(number), how=how, error=error)))  # type: ignore[arg-type]

    def beat(self, rank: RankId = HI, number: int = 1, step: int = 1, change: int = 0) -> Decision:
        return self.happen(Heard(rank, Beat(incarnation=life(number), step=step, change=change)))

    def tell(self, fact: Fact) -> Decision:
        return self.happen(FactTold(fact))

    def ask(self, ask: Ask, reply: str = "") -> Decision:
        return self.happen(Asked(ask, reply))

    def answers(self, reply: str) -> list[Done | No]:
        return [answer for to, answer in self.replies if to == reply]

    def call_roll(self, *present: tuple[RankId, int]) -> Decision:
        self.fabric.watch.call_roll({(rank, life(number)): {f"s:{number}"} for rank, number in present})
        return self.happen(RollCalled())

    def presence(self, rank: RankId = HI) -> str:
        return self.fabric.ranks[rank].presence.value

    def open_incidents(self) -> list[str]:
        return [i.what for i in self.fabric.incidents.values() if i.closed is None]

    def restarted(self) -> Loom:
        """Another weaver that folds the same log."""
        other = Loom(self.fabric.settings)
        for at, records in self.log:
            other.fabric.fold(records, at)
        other.now = self.now
        other.log = list(self.log)
        other.fabric.restart_watch(other.now)
        return other
