"""Fixtures of the threadlet's tests: a played weaver, and settings for links that do not take their time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from tests.threadlet.played import BEAT_SECONDS, PlayedWeaver
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings
from torchloom.threadlet import process_hooks
from torchloom.threadlet.process.exit_reason import Ending


@pytest.fixture
async def weaver(settings: Settings) -> AsyncIterator[PlayedWeaver]:
    client = await connect(find(settings, Role.WEAVER), name="played weaver", keep_trying=True)
    played = PlayedWeaver(client)
    await played.begin()
    yield played
    await client.close()


@pytest.fixture
def lively(settings: Settings) -> Settings:
    """The same server, with beats often enough for a test."""
    # The played weaver shares a thread with the test: it can welcome nobody while attach() waits.
    return replace(
        settings, beat_seconds=BEAT_SECONDS, goodbye_seconds=0.3, reconnect_seconds=0.1, welcome_seconds=0.05
    )


@pytest.fixture
def server(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Threadlets of this process leave before their server is used by the next test."""
    yield server
    _end_threadlets()


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    """Each test ends without a threadlet in this process."""
    yield
    _end_threadlets()


def _end_threadlets() -> None:
    for threadlet in list(process_hooks.live.values()):
        threadlet.end(Ending())
