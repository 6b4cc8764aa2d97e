"""The same replicas at torchft's lighthouse and at ours, in real time: random histories, and whether the rules explain
what each of the two answered.

A history says which replicas live when (they send heartbeats) and when they ask. It is played against a real server
through torchft's own client, with the times at which things really happened written down. From these the core foretells
the answers, again and again with all times shifted a little, within what is uncertain about them. An answer that comes
out the same each time does not hang on a few milliseconds: it must be what the server said. All others are passed over.
A history that fails is played twice more, since a busy machine may have held up a call for longer than was thought,
and if it fails still, by itself when all others are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import grpc

from torchloom.lighthouse import torchft_messages
from torchloom.lighthouse.grpc_server import BindAddress, serve_grpc
from torchloom.lighthouse.quorum import LighthouseState, Member, Quorum, Rules, decide
from torchloom.lighthouse.quorum_service import QuorumService
from torchloom.lighthouse.quorum_store import QuorumStore

BEAT = 0.08
"""Between two heartbeats of a replica."""
SLOT = 0.11
SLOTS = 12
TICK = 0.02
SLACK = 0.03
"""Seconds within which a server has taken note of a call, and kept its own times; more where heartbeats took longer."""
MOST_SLACK = 0.15
"""With more than this nothing can be concluded."""
SHIFTS = 12
MORE_SHIFTS = 150
"""Where an answer was another than all of these foretell: two calls a millisecond apart may come in either order."""
TRIES = 3
AT_ONCE = 16

Outcome = tuple[int, tuple[str, ...]] | None
"""Number and members of the quorum in an answer; None: there was none."""


@dataclass(frozen=True)
class Life:
    id: str
    begin: float
    end: float


@dataclass(frozen=True)
class Ask:
    at: float
    id: str
    shrink_only: bool = False
    commit_failures: int = 0

    @property
    def member(self) -> Member:
        data = torchft_messages.bytes_field(1, self.id.encode())
        data += torchft_messages.as_varint(6 << 3) + torchft_messages.as_varint(self.shrink_only)
        data += torchft_messages.as_varint(8 << 3) + torchft_messages.as_varint(self.commit_failures)
        return Member(self.id, data, self.shrink_only, self.commit_failures)


@dataclass(frozen=True)
class History:
    seed: int
    rules: Rules
    lives: tuple[Life, ...]
    asks: tuple[Ask, ...]
    seconds: float = SLOT * (SLOTS + 1)


def draw(seed: int) -> History:
    chance = random.Random(seed)
    ids = "abcd"[: chance.randint(2, 4)]
    rules = Rules(chance.choice([1, 1, 2]), chance.choice([0.2, 0.35]), chance.choice([0.35, 0.5]), heir_seconds=0.0)
    eager = chance.uniform(0.15, 0.5)
    lives, asks = [], []
    for id in ids:
        mute = chance.random() < 0.15  # is heard only when it asks
        begin = 0 if chance.random() < 0.6 else chance.randrange(SLOTS)
        end = SLOTS + 9 if chance.random() < 0.5 else chance.randrange(begin, SLOTS + 1)
        if not mute:
            lives.append(Life(id, begin * SLOT, end * SLOT))
        for slot in range(begin, min(end, SLOTS)):
            if chance.random() < eager:
                shrink, failures = chance.random() < 0.12, int(chance.random() < 0.12)
                asks.append(Ask((slot + chance.uniform(0.2, 0.4)) * SLOT, id, shrink, failures))
    return History(seed, rules, tuple(lives), tuple(sorted(asks, key=lambda ask: ask.at)))


# ── playing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Played:
    """What was done, when, and what came of it. Times are those of one clock."""

    history: History
    beats: list[tuple[str, float, float]] = field(default_factory=list)
    """Who, and between which times it was heard."""
    asked: dict[int, float] = field(default_factory=dict)
    """When each was begun."""
    answers: dict[int, Outcome] = field(default_factory=dict)
    ended: float = 0.0
    noise: str = ""
    """Why nothing can be concluded from it."""

    @property
    def slack(self) -> float:
        """A call that waits does not tell when it was taken note of: as soon as heartbeats were."""
        return max(SLACK, *(1.5 * (t1 - t0) for _, t0, t1 in self.beats), 0.0)


class Player:
    """Plays a history against the server at an address."""

    def __init__(self, history: History, address: str) -> None:
        from torchft._torchft import LighthouseClient

        self._client = LighthouseClient(address, timedelta(seconds=5))
        self._channel = grpc.insecure_channel(address.removeprefix("http://"))
        self._raw = self._channel.unary_unary("/torchft.LighthouseService/Quorum")
        self.played = Played(history)

    def play(self) -> Played:
        history, played = self.played.history, self.played
        plan = sorted(self._plan(), key=lambda item: item[0])
        self._raw_connected()
        with ThreadPoolExecutor(len(history.asks) + 1) as pool:
            began = time.monotonic()
            end = began + history.seconds
            for at, what in plan:
                time.sleep(max(0.0, began + at - time.monotonic()))
                now = time.monotonic()
                if now > end:
                    break
                if isinstance(what, str):
                    self._client.heartbeat(what, timedelta(seconds=5))
                    played.beats.append((what, now, time.monotonic()))
                else:
                    pool.submit(self._ask, history.asks.index(what), what, end)
            time.sleep(max(0.0, end - time.monotonic()))
            played.ended = end
        self._channel.close()
        if played.slack > MOST_SLACK:
            played.noise = f"calls took {played.slack:.2f} s"
        return played

    def _plan(self) -> Iterator[tuple[float, str | Ask]]:
        history = self.played.history
        for life in history.lives:
            at = life.begin
            while at < min(life.end, history.seconds):
                yield at, life.id
                at += BEAT
        for ask in history.asks:
            yield ask.at, ask

    def _raw_connected(self) -> None:
        with contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(self._channel).result(timeout=2)

    def _ask(self, index: int, ask: Ask, end: float) -> None:
        now = self.played.asked[index] = time.monotonic()
        left = max(end - now, 0.001)
        try:
            if ask.commit_failures:
                self.played.answers[index] = read_response(
                    self._raw(torchft_messages.bytes_field(1, ask.member.data), timeout=left)
                )
            else:
                found = self._client.quorum(ask.id, timedelta(seconds=left), shrink_only=ask.shrink_only)
                ids = tuple(member.replica_id for member in found.participants)
                self.played.answers[index] = (found.quorum_id, ids)
        except (TimeoutError, grpc.RpcError):
            self.played.answers[index] = None


def read_response(data: bytes) -> Outcome:
    (_, quorum), *_ = torchft_messages._fields(data)
    assert isinstance(quorum, bytes)
    number, ids = 0, []
    for field_number, value in torchft_messages._fields(quorum):
        if field_number == 1:
            assert isinstance(value, int)
            number = value
        elif field_number == 2:
            assert isinstance(value, bytes)
            ids.append(torchft_messages.read_quorum_request(torchft_messages.bytes_field(1, value)).id)
    return number, tuple(ids)


# ── foretelling ──────────────────────────────────────────────────────────────────────────────────────────────────────


def foretold(played: Played, chance: random.Random, stricter: Callable[[], None]) -> dict[int, Outcome]:
    """What each call is answered if everything happened at some moment at which it may have. `stricter` is told if
    we wait where torchft would not."""
    history = played.history
    slack = played.slack
    rules = Rules(
        history.rules.min_replicas,
        history.rules.join_seconds + chance.uniform(-slack / 2, slack),
        history.rules.heartbeat_seconds + chance.uniform(-slack / 2, slack),
        history.rules.heir_seconds,
    )
    end = played.ended + chance.uniform(-slack, 0)
    events: list[tuple[float, int, str]] = [(chance.uniform(t0, t1), -1, id) for id, t0, t1 in played.beats]
    events += [(t0 + chance.uniform(0, slack), index, "") for index, t0 in played.asked.items()]
    tick = played.ended - history.seconds + chance.uniform(0, TICK)
    while tick < end:
        events.append((tick, -2, ""))
        tick += TICK
    state = LighthouseState()
    calls: dict[int, int] = {}
    result: dict[int, Outcome] = dict.fromkeys(played.asked)
    for now, index, id in sorted(events):
        if now > end:
            break
        if index == -1:
            state.record_heartbeat(id, now)
            continue
        if index >= 0:
            calls[state.request_quorum(history.asks[index].member, now)] = index
        found = decide(state, rules, now)
        if isinstance(found, Quorum):
            for call in state.announce(found, rules, now):
                result[calls[call]] = (found.number, found.ids)
        elif found.why.code in {"quorum_too_few_of_last", "quorum_without_last"}:
            stricter()
    return result


@dataclass
class Verdict:
    compared: int = 0
    asked: int = 0
    noise: str = ""
    stricter: bool = False
    """It has a quorum that torchft would form and we would not: nothing can be compared, however often it is played."""
    wrong: list[str] = field(default_factory=list)


def judged(played: Played, whose: str) -> Verdict:
    """The real answers against the foretold, where these do not hang on a moment."""
    verdict = Verdict(asked=len(played.asked), noise=played.noise)
    if verdict.noise:
        return verdict
    chance = random.Random(played.history.seed)
    ours_alone: list[None] = []

    def guesses(count: int) -> list[dict[int, Outcome]]:
        return [foretold(played, chance, lambda: ours_alone.append(None)) for _ in range(count)]

    possible = guesses(SHIFTS)
    if any(answer not in {one[index] for one in possible} for index, answer in played.answers.items()):
        possible += guesses(MORE_SHIFTS)
    if ours_alone:
        verdict.stricter = True
        return verdict
    for index, answer in sorted(played.answers.items()):
        outcomes = {one[index] for one in possible}
        if len(outcomes) > 1:
            continue
        verdict.compared += 1
        if outcomes != {answer}:
            ask = played.history.asks[index]
            verdict.wrong.append(
                f"history {played.history.seed}, {ask.id} at {ask.at:.2f}: {whose} said {answer}, not {outcomes.pop()}"
            )
    return verdict


# ── many ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Total:
    histories: int = 0
    passed_over: int = 0
    again: int = 0
    compared: int = 0
    asked: int = 0
    wrong: list[str] = field(default_factory=list)


async def play_theirs(history: History) -> Verdict:
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=history.rules.min_replicas,
        join_timeout_ms=round(history.rules.join_seconds * 1000), quorum_tick_ms=round(TICK * 1000),
        heartbeat_timeout_ms=round(history.rules.heartbeat_seconds * 1000),
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
        played = await _in_thread(lambda: Player(history, address).play())
    finally:
        server.shutdown()
    return await _judged(played, "torchft's")


async def play_ours(history: History) -> Verdict:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(QuorumStore(Path(folder))) as keeping:
        service = QuorumService(history.rules, keeping, TICK)
        async with serve_grpc(service, BindAddress("127.0.0.1", 0)) as place:
            played = await _in_thread(lambda: Player(history, place.url).play())
            if service.naps:
                played.noise = "our lighthouse stood still"
    return await _judged(played, "ours")


@functools.cache
def _judge() -> ProcessPoolExecutor:
    """Elsewhere, since foretelling takes its time, in which no lighthouse here would answer."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


async def _judged(played: Played, whose: str) -> Verdict:
    return await asyncio.get_running_loop().run_in_executor(_judge(), judged, played, whose)


async def _in_thread(work: Callable[[], Played]) -> Played:
    """A thread of its own: the pool of the loop has few."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Played] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  it is raised again where it is awaited
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def _settled(play: Callable[[History], object], history: History, total: Total) -> Verdict:
    """As it is played; again if it was noisy or seems wrong."""
    for attempt in range(TRIES):
        verdict = await play(history)  # type: ignore[misc]
        assert isinstance(verdict, Verdict)
        if not verdict.noise and not verdict.wrong:
            break
        total.again += attempt < TRIES - 1
    return verdict


async def many(seed: int, count: int, at_once: int = AT_ONCE, end: float = float("inf")) -> Total:
    """So many histories, each against both; those passed over because the machine was too busy are replaced."""
    chance = random.Random(seed)
    total, room = Total(), asyncio.Semaphore(at_once)
    suspects: list[History] = []

    async def one(history: History) -> None:
        async with room:
            if total.histories >= count or len(suspects) > 10 or time.monotonic() > end:
                return
            verdicts = []
            for play in (play_theirs, play_ours):
                verdict = await _settled(play, history, total)
                if verdict.noise or verdict.stricter:
                    total.passed_over += 1
                    return
                verdicts.append(verdict)
        total.histories += 1
        if any(verdict.wrong for verdict in verdicts):
            suspects.append(history)
        for verdict in verdicts:
            total.compared += verdict.compared
            total.asked += verdict.asked

    await asyncio.gather(*(one(draw(chance.randrange(2**32))) for _ in range(4 * count)))
    for history in suspects:  # by itself, and later: what was wrong because of the rules is wrong again
        for play in (play_theirs, play_ours):
            total.wrong += (await _settled(play, history, total)).wrong
    return total
