"""A world for the protocol of changes: weavers, ranks and operators, over a network that loses, repeats and reorders.

Only the wire, the disk and the clock are played; `Engine` and `Participant` are the real ones. A run is a list
of moves (`play`), so that hypothesis can shrink it and a campaign can repeat it by its seed. Then comes a calm,
and after it everything must be well: `problems` says what is not. `Parts` lets a test put a broken part in, to see that
the world notices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from tests.core.loom import life as life_name
from torchloom.core.decision import Decision, WantedVerdict
from torchloom.core.engine import Engine
from torchloom.core.events import (
    Event,
    LinkClosed,
    LinkOpened,
    ReportReceived,
    RequestReceived,
    TookOver,
    VerdictKnown,
)
from torchloom.core.state.cluster import ClusterState
from torchloom.knob_validation import BadValue
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask, Done, No, Revert, SetKnobs, Steer
from torchloom.protocol.phrase import Phrase
from torchloom.protocol.rank import (
    Beat,
    ChangeSpec,
    Command,
    Hello,
    Introduce,
    Knobs,
    KnobSpec,
    Muted,
    Order,
    Ordered,
    Propose,
    QueryStep,
    Reply,
    Report,
    StepReport,
    Value,
    Verdict,
    Welcome,
)
from torchloom.protocol.records import ChangeDecided, ChangeProposed, ChangeSettled, IncidentOpened, OrderGiven, Record
from torchloom.settings import Settings
from torchloom.threadlet.changes.participant import Participant
from torchloom.threadlet.changes.step_boundary import ASK_AGAIN, PATIENCE

SETTINGS = Settings()
JOB = "job"
RANKS = tuple(RankId(JOB, "r", number) for number in range(3))
KNOBS = (
    KnobSpec(name="lr", kind="float", value=1.0),
    KnobSpec(name="clip", kind="float", value=1.0),
)
UNLUCKY = 13.0
"""A value that the last rank refuses."""
STEP_SECONDS = 0.05
CALM_SECONDS = 90.0

Life = tuple[RankId, str]


# ── the parts that hold the promise ──


class Verdicts:
    """The server's stream of verdicts: the first one written stands."""

    def __init__(self) -> None:
        self.stands: dict[str, bool] = {}

    def write(self, change: str, commit: bool) -> bool:
        """Which one stands."""
        return self.stands.setdefault(change, commit)


class Log:
    """The server's log: who does not know its end cannot append."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, tuple[Record, ...]]] = []

    def append(self, expected: int, at: float, records: tuple[Record, ...]) -> bool:
        if expected != len(self.entries):
            return False
        self.entries.append((at, records))
        return True


def read_reply(cluster: ClusterState, rank: RankId, reply: Reply) -> Reply:
    """As the weaver understands it."""
    return reply


def is_for_me(mine: Living, command: Command) -> bool:
    return command.incarnation == mine.incarnation and command.term >= mine.term


@dataclass(frozen=True)
class Parts:
    verdicts: type[Verdicts] = Verdicts
    log: type[Log] = Log
    steering: type[Participant] = Participant
    read_reply: Callable[[ClusterState, RankId, Reply], Reply] = read_reply
    is_for_me: Callable[[Living, Command], bool] = is_for_me


# ── the network ──


@dataclass(frozen=True)
class Packet:
    arrive: Callable[[], None]
    link: tuple[Living, int] | None = None
    """It travels on this connection, and is lost if that closes."""

    def lost(self) -> bool:
        return self.link is not None and self.link[0].link != self.link[1]


@dataclass
class Request:
    ask: SetKnobs | Revert | Steer
    asked: float
    answers: list[Done | No] = field(default_factory=list)


# ── a rank in one of its lives ──


class Living:
    """The rules of step_boundary.py and session.py, in simulated time."""

    def __init__(self, world: World, rank: RankId, number: int, step: int) -> None:
        self.world = world
        self.rank = rank
        self.incarnation = life_name(number)
        self.steering = world.parts.steering(self.incarnation, self._accept)
        self.step = step
        self.counted = False
        """A step was counted and its boundary has not been passed yet."""
        self.values: dict[str, Value] = {spec.name: spec.value for spec in KNOBS}
        self.alive = True
        self.begun = False
        self.born = self.introduced = world.now
        self.link = 0
        """Number of the open connection; 0 while cut off."""
        self.links = 0
        self.term = 0
        self.welcomed = False
        self.waits_since: float | None = None
        self.asks_at = 0.0
        self.ordered: dict[str, Ordered] = {}
        self.took: dict[str, int] = {}
        self.gave: set[str] = set()
        """Changes that have given a knob its value here."""
        self.skipped: set[str] = set()
        self.heard: dict[str, int] = {}
        """Changes learnt from a welcome, and how far it was then."""
        self.beats = 0

    @property
    def life(self) -> Life:
        return self.rank, self.incarnation

    # ── link ──

    def connect(self) -> None:
        if self.alive and not self.link:
            self.links += 1
            self.link, self.term, self.welcomed = self.links, 0, False
            self.world.announce(LinkOpened(self.rank, self.incarnation, f"{self.incarnation}:{self.link}"))
            self.introduce()

    def disconnect(self) -> None:
        if self.link:
            gone, self.link = self.link, 0
            self.world.announce(LinkClosed(self.rank, self.incarnation, f"{self.incarnation}:{gone}", "Client Closed"))

    def die(self) -> None:
        self.alive = False
        self.disconnect()

    def introduce(self) -> None:
        self.introduced = self.world.now
        if self.link:
            hello = Hello(incarnation=self.incarnation, node="n", pid=1, devices=(), world_size=len(RANKS))
            self.world.inbox.append((self.rank, hello))
            self.world.inbox.append((self.rank, Knobs(incarnation=self.incarnation, knobs=KNOBS, checkpoints=True)))

    def answer(self, reply: Reply) -> None:
        if self.link:
            self.world.send(lambda: self.world.replied(self.rank, reply), (self, self.link))

    def beat(self) -> None:
        if self.alive and self.link:
            self.beats += 1
            beat = Beat(incarnation=self.incarnation, step=self.step, change=self.steering.in_force)
            self.world.send(lambda: self.world.heard(self.rank, beat), (self, self.link))
            if not self.welcomed and self.world.now - self.introduced > 1:
                self.introduce()

    # ── commands ──

    def hear(self, command: Command) -> None:
        if not self.alive or not self.world.parts.is_for_me(self, command):
            return
        if command.term < self.term:
            self.world.wrong(f"{self.rank} obeys term {command.term} after term {self.term}")
        self.term = max(self.term, command.term)
        reply: Reply | None = None
        match command:
            case Welcome(changes=changes):
                self.welcomed = True
                for change in changes:
                    self.heard.setdefault(change.id, self.step)
                self.steering.welcome(changes)
            case Introduce():
                self.introduce()
            case Muted():
                self.world.wrong(f"{self.rank}: the newest life is muted")
            case QueryStep(id=id):
                reply = StepReport(
                    incarnation=self.incarnation,
                    id=id,
                    step=self.step,
                    step_seconds=STEP_SECONDS,
                    paused=self.steering.paused,
                )
            case Propose():
                reply = self.steering.propose(command, lambda: self.step)
            case Verdict():
                reply = self.steering.hear(command)
            case Order():
                reply = self._carry_out(command)
        if reply is not None:
            self.answer(reply)
        if isinstance(command, Order) and command.verb == "kill":
            self.die()

    def _carry_out(self, order: Order) -> Ordered:
        if order.id not in self.ordered:
            if self.life not in self.world.given.get(order.id, ()):
                self.world.wrong(f"{self.rank} obeys {order.verb} {order.id}, which was for another life")
            if order.verb == "resume":
                self.steering.set_paused(False)
            self.ordered[order.id] = Ordered(incarnation=self.incarnation, id=order.id, outcome="applied")
        return self.ordered[order.id]

    def _accept(self, change: ChangeSpec) -> None:
        if self.rank == RANKS[-1] and UNLUCKY in change.values.values():
            raise BadValue("lr", UNLUCKY, "not here")

    # ── training ──

    def walk(self) -> None:
        """Half a step: count it, or pass its boundary. What is heard may come between the two."""
        if not self.alive:
            return
        if not self.begun:
            if self.welcomed or self.world.now - self.born > SETTINGS.welcome_seconds:
                self.begun = self.counted = True
            return
        if not self.counted:
            self.step += 1
            self.counted = True
        elif self.steering.due_step > self.step:
            self.counted = False
        else:
            self._reach()

    def _reach(self) -> None:
        now = self.world.now
        undecided = self.steering.undecided(self.step)
        if undecided:
            if self.waits_since is None:
                self.waits_since, self.asks_at = now, now + PATIENCE
            if now - self.waits_since > SETTINGS.verdict_seconds:
                for change in undecided:
                    self.steering.skip(change)
                    self.skipped.add(change.id)
            else:
                if now >= self.asks_at and self.link:
                    self.asks_at = now + ASK_AGAIN
                    for change in undecided:
                        self._resolve(change.id)
                return
        self.waits_since = None
        for change in self.steering.due(self.step):
            self._take(change)
        self.counted = self.steering.holds(self.step)

    def _resolve(self, id: str) -> None:
        """Write abort unless a verdict stands, and obey what stands. Question and answer may be lost."""
        on = (self, self.link)

        def write() -> None:
            stands = self.world.verdicts.write(id, False)
            verdict = Verdict(term=self.term, incarnation=self.incarnation, id=id, commit=stands)
            self.world.send(lambda: self._learn(verdict), on)

        self.world.send(write, on)

    def _learn(self, verdict: Verdict) -> None:
        self.steering.hear(verdict)

    def _take(self, change: ChangeSpec) -> None:
        self.world.check_taking(self, change)
        self.took[change.id] = self.step
        if change.values:
            self.gave.add(change.id)
            self.values.update(change.values)
        if change.action == "pause":
            self.steering.set_paused(True)
        self.answer(self.steering.done(change, self.step))

    def passed(self, step: int) -> bool:
        """Whether the training has left this step behind."""
        return self.begun and (self.step > step or (self.step == step and not self.counted))


# ── a weaver ──


class Weaver:
    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.doom: int | None = None
        """Dies after so many of the next things it does; below 0: even before the log has them."""
        self.behind: dict[Life, int] = {}
        """Beats in a row in which a life said that it lacks a change."""
        self.cluster = ClusterState(SETTINGS)
        self.engine = Engine(self.cluster)
        for at, records in world.log.entries:
            self.cluster.fold(records, at)
        self.seq = len(world.log.entries)
        self.read = self.cluster.inbox_seq
        self.happen(TookOver(f"w{len(world.weavers)}"))
        self.engine.restart(world.now)

    def happen(self, event: Event | None, reply: str = "", letter: int = 0) -> None:
        if not self.alive or event is None:
            return
        now = self.world.now
        decision = self.engine.handle(event, now)
        records: tuple[Record, ...] = (*decision.stored, *self.engine.has_read(letter, now))
        acts = bool(decision)
        if acts and self.doom is not None and self.doom < 0:
            self.alive = False
            return
        if records:
            if not self.world.log.append(self.seq, now, records):
                self.alive = False  # fenced: a newer one took over
                return
            self.seq += 1
            self.world.stored(records)
        for effect in self._effects(decision, reply):
            if self.doom == 0:
                break
            if self.doom is not None:
                self.doom -= 1
            effect()
        if acts and self.doom is not None:
            self.alive = False

    def _effects(self, decision: Decision, reply: str) -> Iterable[Callable[[], None]]:
        world = self.world
        for rank, command in decision.commands:
            yield lambda rank=rank, command=command: world.command(rank, command)  # type: ignore[misc]
        replies = decision.replies
        if reply and decision.answer is not None:
            replies = (*replies, (reply, decision.answer))
        for to, answer in replies:
            yield lambda to=to, answer=answer: world.send(lambda: world.answered(to, answer))  # type: ignore[misc]
        for wanted in decision.verdicts:
            yield lambda wanted=wanted: world.send(lambda: self._write(wanted))  # type: ignore[misc]

    def _write(self, wanted: WantedVerdict) -> None:
        if self.alive:
            commit = self.world.verdicts.write(wanted.change, wanted.commit)
            self.world.send(lambda: self.happen(VerdictKnown(wanted.change, commit, wanted.abort)))

    def tick(self) -> None:
        while self.alive and self.read < len(self.world.inbox):
            rank, report = self.world.inbox[self.read]
            self.read += 1
            self.happen(ReportReceived(rank, report), letter=self.read)
        runtime = self.cluster.runtime
        if self.alive and runtime.reunion and self.world.now >= runtime.blind_until:
            linked = {one.life: {f"{one.incarnation}:{one.link}"} for one in self.world.living() if one.link}
            self.happen(self.engine.hear_roll(linked))
        for event in chain(self.engine.tick(self.world.now), *self.engine.check_ranks(self.world.now)):
            self.happen(event)


# ── all of it ──


class World:
    def __init__(self, parts: Parts | None = None) -> None:
        self.parts = parts or Parts()
        self.now = 1000.0
        self.log = self.parts.log()
        self.verdicts = self.parts.verdicts()
        self.inbox: list[tuple[RankId, Report]] = []
        self.net: list[Packet] = []
        self.weavers: list[Weaver] = []
        self.lives: list[Living] = []
        self.requests: dict[str, Request] = {}
        self.proposed: dict[str, ChangeProposed] = {}
        self.decided: dict[str, bool] = {}
        self.owned: dict[str, set[RankId]] = {}
        """Who may lack a change, as its outcome says: gone without a word on it; or all, when nobody took it."""
        self.given: dict[str, tuple[Life, ...]] = {}
        self.incidents: set[str] = set()
        self.problems: list[str] = []
        self.next_tick = self.next_beat = self.now
        self._crown()
        for number, rank in enumerate(RANKS):
            self._start(rank, 10 + number % 2)
        self.flow(6)

    def wrong(self, what: str) -> None:
        self.problems.append(f"at {self.now:.2f}: {what}")

    def living(self) -> list[Living]:
        return [one for one in self.lives if one.alive]

    def of(self, rank: RankId) -> Living:
        """The newest life."""
        return next(one for one in reversed(self.lives) if one.rank == rank)

    # ── the wire ──

    def send(self, arrive: Callable[[], None], link: tuple[Living, int] | None = None) -> None:
        self.net.append(Packet(arrive, link))

    def command(self, rank: RankId, command: Command) -> None:
        for one in self.living():
            if one.rank == rank and one.link:
                self.send(lambda one=one: one.hear(command), (one, one.link))  # type: ignore[misc]
        if isinstance(command, Order):  # a server that was slow: whoever is this rank by then gets it
            self.send(lambda: self.of(rank).hear(command) if self.of(rank).link else None)

    def announce(self, event: LinkOpened | LinkClosed) -> None:
        for weaver in self.weavers:
            if weaver.alive:
                weaver.engine.hear_link(event)
                weaver.happen(event)

    def replied(self, rank: RankId, reply: Reply) -> None:
        for weaver in self.weavers:
            if weaver.alive:
                weaver.happen(weaver.engine.hear_reply(rank, self.parts.read_reply(weaver.cluster, rank, reply)))

    def heard(self, rank: RankId, beat: Beat) -> None:
        for weaver in self.weavers:
            if weaver.alive:
                weaver.happen(weaver.engine.hear(rank, beat, self.now))
            if weaver.alive:
                self._check_beat(weaver, rank, beat)

    def _check_beat(self, weaver: Weaver, rank: RankId, beat: Beat) -> None:
        """One that is cut off at a change is an incident at the second beat that shows it.

        Beats are counted by each weaver, as each sees them. Nothing is expected of one that was replaced and has not
        noticed: it may not know of the change, and could not write the incident, since the log does not take it.
        """
        due = [p.change for p in self.proposed.values() if self.decided.get(p.change.id) and p.change.action == "set"]
        due = [change for change in due if (rank, beat.incarnation) in self.proposed[change.id].lives]
        newest = max(due, key=lambda change: change.number, default=None)  # all that the watch compares with
        behind = newest is not None and beat.change < newest.number and beat.step > newest.step
        life = (rank, beat.incarnation)
        weaver.behind[life] = weaver.behind.get(life, 0) + 1 if behind else 0
        known = weaver.cluster.ranks.get(rank)
        current = known is not None and known.incarnation == beat.incarnation
        told = any(about.rank == rank and about.part for about in self.incidents)
        writes = weaver.alive and weaver.seq == len(self.log.entries)
        if current and writes and weaver.behind[life] >= 2 and not told:
            self.wrong(f"{rank} is behind at step {beat.step} for two beats and nobody knows")

    def answered(self, to: str, answer: Done | No) -> None:
        self.requests[to].answers.append(answer)
        if isinstance(answer, Done) and answer.change:
            if not self.verdicts.stands.get(answer.change):
                self.wrong(f"{answer.change} is said to be made and is not: {answer.text}")
            elif self.proposed[answer.change].change.step != answer.step:
                self.wrong(f"{answer.change} is said to take effect at {answer.step}")
        aborted = isinstance(answer, No) and isinstance(answer.why, Phrase) and answer.why.code == "change_aborted"
        if aborted and self.verdicts.stands.get(answer.why.args["id"]):
            self.wrong(f"it is said that {answer.why}, and it was")

    def _ask(self, request: str) -> None:
        ask: Ask = self.requests[request].ask
        for weaver in self.weavers:
            weaver.happen(RequestReceived(ask, request), reply=request)

    def ask(self, ask: SetKnobs | Revert | Steer) -> None:
        request = ask.request
        self.requests.setdefault(request, Request(ask, self.now)).asked = self.now
        self.send(lambda: self._ask(request))

    # ── what is true ──

    def stored(self, records: tuple[Record, ...]) -> None:
        for record in records:
            match record:
                case ChangeProposed():
                    if record.change.id in self.proposed:
                        self.wrong(f"two changes are called {record.change.id}")
                    self.proposed[record.change.id] = record
                case ChangeDecided(id=id, commit=commit):
                    if self.decided.setdefault(id, commit) != commit:
                        self.wrong(f"{id} is decided both ways")
                    same = [i for i, c in self.decided.items() if c and self._request(i) == self._request(id)]
                    if len(same) > 1:
                        self.wrong(f"one request was done twice: {same}")
                case ChangeSettled(id=id, applied=applied, unknown=unknown):
                    asked = {rank for rank, _ in self.proposed[id].lives}
                    self.owned[id] = set(unknown) if applied or unknown else asked
                    took = [one for one in self.lives if id in one.took and one.life in self.proposed[id].lives]
                    if applied > len(took):
                        self.wrong(f"{id} is settled as applied on {applied}, but {len(took)} took it")
                case OrderGiven(id=id, lives=lives):
                    if id in self.given:
                        self.wrong(f"two orders are called {id}")
                    self.given[id] = lives
                case IncidentOpened(about=about):
                    self.incidents.add(about)

    def _request(self, change: str) -> str:
        return self.proposed[change].request

    def check_taking(self, one: Living, change: ChangeSpec) -> None:
        proposed = self.proposed.get(change.id)
        if proposed is None or proposed.change.step != change.step:
            self.wrong(f"{one.rank} takes {change.id}, which is not in the log")
            return
        if change.id in one.took:
            self.wrong(f"{one.rank} takes {change.id} twice, at {one.took[change.id]} and {one.step}")
        elif one.life in proposed.lives:
            if one.step != change.step:
                self.wrong(f"{one.rank} takes {change.id} at {one.step} instead of {change.step}")
        elif one.step > max(change.step, one.heard.get(change.id, 0) + 1):
            self.wrong(f"{one.rank}, new, takes {change.id} at {one.step} instead of {change.step}")
        if not self.verdicts.stands.get(change.id):
            self.wrong(f"{one.rank} takes {change.id}, on which no commit stands")

    def _check_agreement(self) -> None:
        for id, proposed in self.proposed.items():
            step = proposed.change.step
            members = [one for one in self.lives if one.life in proposed.lives and id not in one.skipped]
            took = [one.rank for one in members if id in one.took]
            not_took = [one.rank for one in members if id not in one.took and one.passed(step)]
            if took and not_took:
                self.wrong(f"{id} at {step}: {took} took it and {not_took} did not")
            if self.decided.get(id) is False and took:
                self.wrong(f"{id} was aborted and {took} took it")
            if self.decided.get(id) and not_took:
                self.wrong(f"{id} was committed and {not_took} passed {step} without it")

    def _check_calm(self) -> None:
        """What holds when the storm is over."""
        silent = [request.ask for request in self.requests.values() if not request.answers]
        if silent:
            self.wrong(f"no answer to {silent[0]}")
        weaver = self.weavers[-1]
        under_way = [c.id for c in weaver.cluster.ledger.changes.values() if c.phase in {"proposed", "committed"}]
        if under_way:
            self.wrong(f"never settled: {under_way}")
        again = ClusterState(SETTINGS)
        for at, records in self.log.entries:
            again.fold(records, at)
        if again.state() != weaver.cluster.state():
            self.wrong("folding the log gives another state")
        made = [p.change for p in self.proposed.values() if self.decided.get(p.change.id) and p.change.action == "set"]
        newest = max((change.number for change in made), default=0)
        agreeing = []
        for one in self.living():
            missed = {change.id for change in made if change.id in one.skipped}
            late = {change.id for change in made if change.withdraws in one.gave}  # it had taken what was withdrawn
            agrees = one.steering.in_force >= newest  # so its beats say
            # Later changes may replace what it missed before two beats have shown that: while it is thought dead, or
            # when all who were asked missed it, so that it had no peer to disagree with. It is no incident then, but
            # the outcome of the change, which the operator is told, must say so.
            owned = {id for id in missed if one.rank in self.owned.get(id, ())}
            told = any(about.rank == one.rank and about.part for about in self.incidents)
            untold = missed - owned if agrees else missed | late
            if untold and not told:
                self.wrong(f"{one.rank} was cut off at {untold} and nobody knows")
            if agrees or not (missed or late):
                agreeing.append(one)
        self._check_values(agreeing)

    def _check_values(self, agreeing: list[Living]) -> None:
        for one in agreeing[1:]:
            if one.values != agreeing[0].values:
                self.wrong(f"{agreeing[0].rank} has {agreeing[0].values}, {one.rank} has {one.values}")

    # ── moves ──

    def play(self, moves: Iterable[tuple[str, int]]) -> list[str]:
        """Make these moves, then let it calm down; what went wrong."""
        for name, number in moves:
            MOVES[name][1](self, number)
            if self.problems:
                return self.problems
        self.calm()
        return self.problems

    def flow(self, number: int) -> None:
        """Everything as it should be, for some steps."""
        for _ in range(number % 12 + 1):
            self._round()

    def _round(self) -> None:
        self._pass(STEP_SECONDS)
        if not self.weavers[-1].alive:
            self._crown()
        for one in self.living():
            one.walk()
            self._deliver_all()
            one.walk()
        self._deliver_all()

    def _deliver_all(self) -> None:
        count = len(self.net)
        for _ in range(count):
            self._deliver(0)

    def _deliver(self, index: int) -> None:
        packet = self.net.pop(index)
        if not packet.lost():
            packet.arrive()

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.next_tick:
            self.next_tick = self.now + 0.25
            for weaver in list(self.weavers):
                weaver.tick()
        if self.now >= self.next_beat:
            self.next_beat = self.now + 1
            for one in self.living():
                one.beat()

    def wait(self, number: int) -> None:
        """Time passes and nothing arrives."""
        for _ in range(number % 6 + 1):
            self._pass(0.25)

    def deliver(self, number: int) -> None:
        """Some packets arrive, in any order."""
        for turn in range(number % 7 + 1):
            if self.net:
                self._deliver(number // 7 * (turn + 1) % len(self.net))

    def lose(self, number: int) -> None:
        if self.net:
            self.net.pop(number % len(self.net))

    def repeat(self, number: int) -> None:
        if self.net:
            self.net.append(self.net[number % len(self.net)])

    def rush(self, number: int) -> None:
        """One rank runs ahead; nothing arrives meanwhile."""
        one = self.of(RANKS[number % len(RANKS)])
        for _ in range(number // len(RANKS) % 7 + 1):
            one.walk()

    def linger(self, number: int) -> None:
        """Time passes for one rank alone, at whatever boundary it is."""
        one = self.of(RANKS[number % len(RANKS)])
        for _ in range(number // len(RANKS) % 24 + 1):
            self.now += 0.06
            one.walk()

    def cut(self, number: int) -> None:
        one = self.of(RANKS[number % len(RANKS)])
        if any(other.link for other in self.living() if other is not one):  # else the whole job would end
            one.disconnect()

    def heal(self, number: int) -> None:
        self.of(RANKS[number % len(RANKS)]).connect()

    def kill(self, number: int) -> None:
        one = self.of(RANKS[number % len(RANKS)])
        if any(other.link for other in self.living() if other is not one):
            one.die()

    def start(self, number: int) -> None:
        """A dead rank begins a new life, at an earlier step."""
        one = self.of(RANKS[number % len(RANKS)])
        if not one.alive:
            self._start(one.rank, max(0, one.step - number // len(RANKS) % 12))

    def _start(self, rank: RankId, step: int) -> None:
        self.lives.append(Living(self, rank, len(self.lives) + 1, step))
        self.lives[-1].connect()

    def mend(self, number: int) -> None:
        """Everyone is back, and known to be."""
        for turn in range(len(RANKS)):
            self.start(turn + number * len(RANKS))
            self.heal(turn)
        for _ in range(8):
            self._round()

    def doom(self, number: int) -> None:
        """The weaver will die in the middle of its next act."""
        self.weavers[-1].doom = number % 6 - 1

    def replace(self, number: int) -> None:
        """The weaver is killed and another begins."""
        self.weavers[-1].alive = False
        self._crown()

    def usurp(self, number: int) -> None:
        """A new weaver begins while the old one still believes that it is the one."""
        self._crown()

    def _crown(self) -> None:
        self.weavers = [weaver for weaver in self.weavers if weaver.alive][-2:]
        self.weavers.append(Weaver(self))

    def _next_request(self) -> str:
        return f"{len(self.requests) + 1:032x}"

    def set_values(self, number: int) -> None:
        value = UNLUCKY if number % 9 == 8 else float(len(self.requests) + 2)
        values: dict[str, Value] = {("lr", "clip")[number % 2]: value}
        if number % 5 == 4:
            values = {"lr": value, "clip": value}
        ahead = None
        if number % 4 == 3:
            ahead = max(one.step for one in self.lives) + number // 4 % 30
        wait = number % 7 != 6
        self.ask(SetKnobs(request=self._next_request(), job=JOB, values=values, at_step=ahead, wait=wait))

    def revert(self, number: int) -> None:
        known = list(self.proposed)
        if known:
            self.ask(Revert(request=self._next_request(), job=JOB, change=known[-1 - number % len(known)]))

    def steer(self, number: int) -> None:
        verb = ("pause", "resume", "checkpoint", "stacks", "resume", "kill")[number % 6]
        rank = number // 6 % len(RANKS) if verb == "kill" else None
        where = {"replica": "r", "rank": rank} if rank is not None else {}
        if verb != "kill" or sum(1 for one in self.living() if one.link) > 1:
            self.ask(Steer(request=self._next_request(), verb=verb, job=JOB, **where))  # type: ignore[arg-type]

    def ask_again(self, number: int) -> None:
        open_ones = [request for request in self.requests.values() if not request.answers]
        if open_ones:
            self.ask(open_ones[number % len(open_ones)].ask)

    # ── calm ──

    def calm(self) -> None:
        """The network works, everyone is connected, a weaver is there; operators ask until they are answered."""
        end, next_ask = self.now + CALM_SECONDS, self.now
        for weaver in self.weavers:
            weaver.doom = None
        for one in self.living():
            one.connect()
            one.beats = 0
        while self.now < end:
            self._round()
            if self.now >= next_ask:
                next_ask = self.now + 2
                for request in list(self.requests.values()):
                    if not request.answers:
                        self.ask(request.ask)
                if any(one.steering.paused for one in self.living()):
                    self.ask(Steer(request=self._next_request(), verb="resume", job=JOB))
            if self._quiet():
                break
        self._check_agreement()
        self._check_calm()

    def _quiet(self) -> bool:
        """Everyone has beaten twice since, is answered, and has reached all that lies ahead."""
        living = self.living()
        ledger = self.weavers[-1].cluster.ledger
        far = max((change.change.step for change in ledger.changes.values()), default=0)
        return (
            not self.net
            and all(one.beats >= 3 and one.passed(far) and not one.steering.pending for one in living)
            and all(request.answers for request in self.requests.values())
            and not any(change.phase in {"proposed", "committed"} for change in ledger.changes.values())
            and not self.weavers[-1].cluster.runtime.reunion
        )


MOVES: dict[str, tuple[int, Callable[[World, int], None]]] = {
    "deliver": (8, World.deliver),
    "set": (6, World.set_values),
    "flow": (4, World.flow),
    "rush": (4, World.rush),
    "linger": (4, World.linger),
    "mend": (4, World.mend),
    "steer": (2, World.steer),
    "wait": (1, World.wait),
    "lose": (1, World.lose),
    "repeat": (1, World.repeat),
    "cut": (1, World.cut),
    "heal": (1, World.heal),
    "kill": (1, World.kill),
    "start": (1, World.start),
    "doom": (1, World.doom),
    "replace": (1, World.replace),
    "usurp": (1, World.usurp),
    "revert": (1, World.revert),
    "again": (1, World.ask_again),
}
"""What can happen, and how often: what keeps things going is more frequent than what disturbs."""
CHOICES = tuple(name for name, (often, _) in MOVES.items() for _ in range(often))


def storm(seed: int, most: int = 160) -> list[tuple[str, int]]:
    """Moves by chance, the same for the same seed."""
    chance = random.Random(seed)
    return [(chance.choice(CHOICES), chance.randrange(1000)) for _ in range(chance.randrange(20, most))]
