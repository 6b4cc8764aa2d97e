"""News of checkpoints: kept until stored, in order, each once, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from msgspec.structs import replace as altered

from tests.threadlet.connection.test_link import OTHER_LIFE, join, leave
from tests.threadlet.played import PlayedWeaver, until, until_true
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.codec import decode_report, encode
from torchloom.protocol.rank import Goodbye, Hello, Muted, Report, Resumed, Saved, SaveFailed
from torchloom.protocol.subjects import INBOX_STREAM, Role
from torchloom.settings import Settings
from torchloom.shared.incarnation import new_incarnation
from torchloom.threadlet.connection.outbox import MOST, Outbox, fit_bounds

LIFE = "1" * 24


def saved(step: int) -> Saved:
    return Saved(incarnation=LIFE, step=step, folder="/runs/a", size=1, seconds=1.0)


def said(outbox: Outbox, most: int = 1000, sure: bool = True) -> list[int]:
    """The steps that are reported when the server stores at most `most`."""
    steps: list[int] = []
    while len(steps) < most and (following := outbox.first()) is not None:
        number, news = following
        steps.append(news.step)
        outbox.stored(number, sure)
    return steps


async def test_what_was_not_stored_is_told_again_in_order_and_nothing_twice() -> None:
    outbox = Outbox()
    for step in range(5):
        outbox.put(saved(step))
    assert said(outbox, most=2) == [0, 1]
    outbox.put(saved(5))
    assert said(outbox) == [2, 3, 4, 5]
    assert said(outbox) == []


async def test_the_newest_are_kept_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox()
    for step in range(MOST + 3):
        outbox.put(saved(step))
    assert said(outbox) == list(range(3, MOST + 3))
    assert outbox.dropped == 3
    assert [record.getMessage() for record in caplog.records] == [
        "torchLoom: the weaver cannot be reached; reports dropped so far: 1"
    ]
    for step in range(2 * MOST):
        outbox.put(saved(step))
    assert outbox.dropped == MOST + 3
    assert f"dropped so far: {MOST}\n" in caplog.text


async def test_what_was_said_under_a_name_that_did_not_last_is_said_again() -> None:
    outbox = Outbox()
    outbox.put(saved(1))
    assert said(outbox, sure=False) == [1]
    assert said(outbox) == []
    outbox.send_again()
    outbox.put(saved(2))
    assert said(outbox) == [1, 2]
    outbox.send_again()
    assert said(outbox) == []


async def test_what_is_stored_makes_room_without_being_missed(caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox()
    for step in range(3 * MOST):
        outbox.put(saved(step))
        assert said(outbox, sure=False) == [step]
    assert (outbox.dropped, caplog.records) == (0, [])


async def test_many_threads_may_tell_at_once() -> None:
    outbox = Outbox()
    threads = [threading.Thread(target=lambda n=n: [outbox.put(saved(n)) for _ in range(9)]) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said(outbox)) == sorted(list(range(10)) * 9)


def test_news_are_made_to_fit_a_report() -> None:
    odd = os.fsdecode(b"/runs/\xff")
    long = Resumed(incarnation=LIFE, step=1, path=odd, rejected={f"{n}" * 300: "w" * 3000 for n in range(1000, 1200)})
    told = decode_report(encode(fit_bounds(long)))
    assert isinstance(told, Resumed)
    assert told.path == "/runs/?"
    assert len(told.rejected) == 100
    assert {(len(name), len(why)) for name, why in told.rejected.items()} == {(255, 2000)}
    assert fit_bounds(saved(1)) == saved(1)
    outbox = Outbox()
    outbox.put(long)
    assert outbox.first() == (1, told)


async def test_what_nobody_could_read_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox()
    outbox.put(altered(saved(1), seconds=-1.0))
    outbox.put(altered(saved(2), seconds=float("nan")))
    outbox.put(altered(saved(3), folder=None))
    outbox.put("news")  # type: ignore[arg-type]
    outbox.put(saved(4))
    assert said(outbox) == [4]
    assert len([r for r in caplog.records if "cannot be reported" in r.getMessage()]) == 4


# ── on a real server ──


async def letters(weaver: PlayedWeaver, enough: Callable[[list[Report]], object]) -> list[Report]:
    """All that is stored, once it is enough."""
    stored: list[Report] = []

    async def look() -> bool:
        stored[:] = await weaver.letters()
        return bool(enough(stored))

    await until(look, "the letters")
    return stored


@contextlib.asynccontextmanager
async def late_weaver(settings: Settings) -> AsyncIterator[PlayedWeaver]:
    """One that has not begun: there is no inbox yet."""
    client = await connect(find(settings, Role.WEAVER), name="late", keep_trying=True)
    yield PlayedWeaver(client)
    await client.close()


def news_of(stored: list[Report]) -> list[int]:
    return [report.step for report in stored if isinstance(report, Saved | SaveFailed | Resumed)]


async def test_news_come_after_the_hello_in_order_and_before_the_goodbye(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    loom = join(replace(lively, goodbye_seconds=60.0))
    loom.tell(saved(1))
    loom.tell(SaveFailed(incarnation=LIFE, step=2, folder="/runs/a", why="full"))
    await letters(weaver, lambda stored: len(news_of(stored)) == 2)
    for step in (3, 4, 5):  # in the very moment of the goodbye
        loom.tell(saved(step))
    incarnation = loom.incarnation
    await leave(loom)
    stored = await letters(weaver, lambda stored: any(isinstance(report, Goodbye) for report in stored))
    assert news_of(stored) == [1, 2, 3, 4, 5]
    assert isinstance(stored[0], Hello)
    assert isinstance(stored[-1], Goodbye)
    assert {report.incarnation for report in stored} == {incarnation}
    loom.tell(saved(6))  # nobody is left to tell it, and that is no error


async def test_news_told_before_there_is_a_server_are_stored_once_there_is_one(
    server: EmbeddedServer, lively: Settings
) -> None:
    server.stop()
    loom = join(lively)
    loom.tell(saved(1))
    await asyncio.sleep(0.2)
    loom.tell(saved(2))
    server.start()
    async with late_weaver(lively) as late:
        await late.begin()
        assert news_of(await letters(late, lambda stored: len(news_of(stored)) == 2)) == [1, 2]


async def test_while_the_hello_is_not_stored_news_wait(lively: Settings) -> None:
    async with late_weaver(lively) as late:
        loom = join(lively)
        await until_true(lambda: loom.connected, "the link")
        await asyncio.sleep(0.25)  # between two attempts to say hello
        loom.tell(saved(1))
        await asyncio.sleep(0.35)
        await late.begin()
        stored = await letters(late, lambda stored: len(stored) >= 2)
        assert isinstance(stored[0], Hello)


async def test_what_the_server_does_not_take_is_offered_again(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = join(lively)
    await weaver.report(Hello)
    await weaver.client.jetstream().delete_stream(INBOX_STREAM.name)
    loom.tell(saved(1))
    loom.tell(saved(2))
    await asyncio.sleep(0.1)
    await weaver.begin()
    assert news_of(await letters(weaver, lambda stored: len(news_of(stored)) == 2)) == [1, 2]


async def test_news_told_while_the_server_is_away_arrive_once(
    server: EmbeddedServer, weaver: PlayedWeaver, lively: Settings
) -> None:
    loom = join(lively)
    loom.tell(saved(1))
    await letters(weaver, lambda stored: news_of(stored) == [1])
    assert server.process
    server.process.kill()
    server.process.wait()
    loom.tell(saved(2))
    await until_true(lambda: not loom.connected, "the loss of the link")
    loom.tell(saved(3))
    server.start()
    await weaver.report(Hello, 1)
    await asyncio.sleep(0.3)  # for a repetition to show
    stored = await letters(weaver, lambda stored: len(news_of(stored)) >= 3)
    assert news_of(stored) == [1, 2, 3]
    again = [number for number, report in enumerate(stored) if isinstance(report, Hello)][1]
    assert again < [number for number, report in enumerate(stored) if isinstance(report, Saved)][1]


async def test_what_is_repeated_because_its_receipt_got_lost_is_stored_once(
    weaver: PlayedWeaver, lively: Settings
) -> None:
    loom = join(lively)
    loom.tell(saved(1))
    await letters(weaver, lambda stored: news_of(stored) == [1])
    assert loom._link
    loom._link.state.outbox.send_again()
    loom.tell(saved(2))
    assert news_of(await letters(weaver, lambda stored: len(news_of(stored)) >= 2)) == [1, 2]


async def test_a_rank_that_takes_another_name_tells_its_news_under_that(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = join(lively)
    first = loom.incarnation
    loom.tell(saved(1))
    await letters(weaver, lambda stored: news_of(stored) == [1])
    newest = new_incarnation(int(first[:12], 16) + 60_000)
    await weaver.say(Muted(term=1, incarnation=first, newest=newest))
    loom.tell(saved(2))
    await until_true(lambda: loom.incarnation > newest, "the new name")
    stored = await letters(weaver, lambda stored: [r.incarnation for r in stored].count(loom.incarnation) >= 3)
    assert news_of([report for report in stored if report.incarnation == loom.incarnation]) == [1, 2]


async def test_a_silenced_rank_keeps_nothing_back(
    weaver: PlayedWeaver, lively: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    weaver.welcomes = True
    loom = join(replace(lively, welcome_seconds=0.0))
    await weaver.beat()
    await weaver.say(Muted(term=1, incarnation=loom.incarnation, newest=OTHER_LIFE, pid=7, node="n2"))
    await until_true(lambda: not loom.connected, "the end of the link")
    assert loom._link
    assert loom._link._gone.wait(60)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step in range(3 * MOST):
            loom.tell(saved(step))
    assert caplog.records == []
