"""What a lighthouse tells of itself, looked at without a NATS server."""

from __future__ import annotations

import asyncio

import pytest

from tests.lighthouse.conftest import Here, Start
from torchloom.lighthouse.nats_reporter import MOST_MEMBERS, NatsReporter
from torchloom.protocol.codec import decode_lighthouse_beat, encode
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.settings import Settings


def told(voice: NatsReporter) -> LighthouseBeat:
    """A beat, as whoever hears it understands it."""
    return decode_lighthouse_beat(encode(voice.beat()))


async def formed(here: Here, *ids: str) -> NatsReporter:
    for id in ids:
        await here.replica.heartbeat(id)
    voice = NatsReporter(Settings(), "job", here.service, here.url)
    await asyncio.gather(*(here.replica.quorum(id) for id in ids))
    return voice


async def test_a_new_quorum_and_an_eviction_are_told_at_once_and_a_step_is_not(begin: Start) -> None:
    async with begin() as here:
        voice = await formed(here, "a", "b")
        assert voice._news.is_set()
        voice._news.clear()
        await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b"))
        assert not voice._news.is_set()
        here.service.evict(["b"])
        assert voice._news.is_set()
        voice._news.clear()
        here.service.evict(["b"])
        assert not voice._news.is_set()


async def test_members_that_were_evicted_are_not_told_as_members(begin: Start) -> None:
    async with begin() as here:
        voice = await formed(here, "a", "b")
        assert told(voice).members == ("a", "b")
        here.service.evict(["b"])
        beat = told(voice)
        assert (beat.quorum, beat.members, beat.evicted, beat.broken) == (1, ("a",), ("b",), (1,))


async def test_an_eviction_that_is_not_on_disk_is_not_told_as_done(begin: Start) -> None:
    async with begin() as here:
        voice = await formed(here, "a", "b")
        folder, away = here.service.store.folder, here.service.store.folder.with_name("away")
        folder.rename(away)
        here.service.evict(["b"])
        assert told(voice).evicted == ()
        away.rename(folder)
        here.service.update()
        assert told(voice).evicted == ("b",)


async def test_a_name_that_no_message_can_carry_is_left_out_and_said_once(
    begin: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with begin() as here:
        voice = await formed(here, "a", "b.c/d")
        assert told(voice).members == told(voice).members == ("a",)
        assert caplog.text.count("cannot be reported") == 1


async def test_lists_are_cut_to_the_latest(begin: Start) -> None:
    async with begin() as here:
        voice = await formed(here, "a")
        here.service.evict([f"r{number}" for number in range(MOST_MEMBERS + 5)])
        assert len(told(voice).evicted) == MOST_MEMBERS
        assert told(voice).evicted[-1] == f"r{MOST_MEMBERS + 4}"
