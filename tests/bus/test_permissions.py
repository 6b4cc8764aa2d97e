"""Who may do what, on a real server: nothing is allowed that the table of subjects does not say.

The expectation is taken from the table (speakers, listeners, readers), not from `permissions()`, which is under test.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from uuid import uuid4

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.connection import connect, find
from torchloom.bus.credentials import ensure_authority
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.bus.state_folder import write_private
from torchloom.errors import BadState
from torchloom.protocol.ids import RankId
from torchloom.protocol.permissions import inbox_prefix
from torchloom.protocol.subjects import STREAMS, SUBJECTS, Role
from torchloom.settings import Settings

ME = RankId("mnist", "hi", 0)
OTHERS = (RankId("mnist", "hi", 1), RankId("mnist", "ho", 0), RankId("other", "hi", 0))
TOKENS = {"job": "mnist", "replica": "hi", "rank": 0, "source": "dcgm"}
FORBIDDEN_SUBSCRIPTIONS = (">", "*", "loom.>", "loom.beat.>", "loom.command.>", "_INBOX.>", "$SYS.>", "$JS.>")


class Tried:
    """A client that notes what the server forbids."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.client = Client()
        self._canary = ""
        self._sung = asyncio.Event()

    async def note(self, error: Exception) -> None:
        self.refusals.append(str(error).lower())
        if f'"{self._canary}"' in self.refusals[-1]:
            self._sung.set()

    async def may_publish(self, subject: str) -> bool:
        self.refusals.clear()
        await self.client.publish(subject, b"{}")
        return not await self._refused("publish", subject)

    async def may_subscribe(self, subject: str) -> bool:
        self.refusals.clear()
        subscription = await self.client.subscribe(subject, cb=_ignore)
        refused = await self._refused("subscription", subject)
        if not refused:
            await subscription.unsubscribe()
        return not refused

    async def _refused(self, verb: str, subject: str) -> bool:
        """Refusals come in order: once that of something nobody may do is here, an earlier one is too."""
        self._canary = f"canary.{uuid4()}"
        self._sung.clear()
        await self.client.publish(self._canary, b"")
        await asyncio.wait_for(self._sung.wait(), 60)
        assert all("permissions violation" in text for text in self.refusals), self.refusals
        return any(f'permissions violation for {verb} to "{subject.lower()}"' in text for text in self.refusals)


async def _ignore(_: Msg) -> None:
    pass


async def connected(settings: Settings, role: Role, rank: RankId | None = None) -> Tried:
    tried = Tried()
    tried.client = await connect(find(settings, role, rank), name="matrix", on_error=tried.note)
    return tried


def concrete(template: str) -> str:
    return re.sub(r"{(\w+)}", lambda token: str(TOKENS.get(token[1], "some")), template)


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_speaks_and_listens_as_the_table_says(settings: Settings, role: Role) -> None:
    tried = await connected(settings, role)
    allowed = []
    for subject in SUBJECTS:
        name = concrete(subject.template)
        assert await tried.may_publish(name) == (role in subject.speakers), f"{role} publish {name}"
        assert await tried.may_subscribe(name) == (role in subject.listeners), f"{role} subscribe {name}"
        assert await tried.may_subscribe(subject.pattern()) == (role in subject.listeners), subject.pattern()
        allowed.append(role in subject.speakers or role in subject.listeners)
    assert any(allowed), "the test is blind: this role may do nothing"
    await tried.client.close()


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_reads_the_streams_it_may_and_keeps_none_but_the_weaver(settings: Settings, role: Role) -> None:
    tried = await connected(settings, role)
    weaver = role is Role.WEAVER
    for stream in STREAMS:
        reads = weaver or role in stream.readers
        for verb in ("DIRECT.GET", "STREAM.INFO"):
            name = f"$JS.API.{verb}.{stream.name}"
            assert await tried.may_publish(name) == reads, f"{role} {name}"
        for verb in ("STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.UPDATE", "CONSUMER.CREATE"):
            name = f"$JS.API.{verb}.{stream.name}"
            assert await tried.may_publish(name) == weaver, f"{role} {name}"
    assert await tried.may_publish("$JS.API.INFO") == weaver
    await tried.client.close()


@pytest.mark.parametrize("role", list(Role))
async def test_no_role_hears_more_than_its_own(settings: Settings, role: Role) -> None:
    tried = await connected(settings, role)
    for subject in FORBIDDEN_SUBSCRIPTIONS:
        assert not await tried.may_subscribe(subject), f"{role} subscribe {subject}"
    for other in Role:
        inbox = f"{inbox_prefix(other)}.x"
        assert await tried.may_subscribe(inbox) == (other is role), f"{role} subscribe {inbox}"
        assert await tried.may_publish(inbox) == (role is Role.WEAVER), f"{role} publish {inbox}"  # it answers
    for subject in ("$SYS.REQ.SERVER.PING", "$SYS.ACCOUNT.X.DISCONNECT", "anything", "loom.unheard.of"):
        assert not await tried.may_publish(subject), f"{role} publish {subject}"
    await tried.client.close()


async def test_a_rank_with_a_credential_of_its_own_speaks_only_as_itself(
    server: EmbeddedServer, settings: Settings, tmp_path: Path
) -> None:
    creds = tmp_path / "rank.creds"
    write_private(creds, ensure_authority(server.folder).mint(Role.THREADLET, rank=ME))
    narrowed = Settings(state=settings.state, creds=str(creds))
    tried = await connected(narrowed, Role.THREADLET, ME)
    for subject in SUBJECTS:
        speaks, listens = Role.THREADLET in subject.speakers, Role.THREADLET in subject.listeners
        assert await tried.may_publish(concrete(subject.template)) == speaks
        assert await tried.may_subscribe(concrete(subject.template)) == listens
        if subject.pattern() != subject.template:
            assert not await tried.may_subscribe(subject.pattern())
        for other in OTHERS:
            if "{rank}" in subject.template:
                assert not await tried.may_publish(subject.for_rank(other))
                assert not await tried.may_subscribe(subject.for_rank(other))
    assert await tried.may_subscribe(f"{inbox_prefix(Role.THREADLET, ME)}.x")
    assert not await tried.may_subscribe(f"{inbox_prefix(Role.THREADLET, OTHERS[0])}.x")
    assert not await tried.may_subscribe(f"{inbox_prefix(Role.THREADLET)}.x")
    await tried.client.close()


async def test_a_refusal_leaves_the_connection_working(settings: Settings) -> None:
    tried = await connected(settings, Role.VIEWER)
    assert not await tried.may_publish("loom.ask")
    assert await tried.may_publish("loom.look")
    assert tried.client.is_connected
    await tried.client.close()


async def test_a_credential_that_ends_is_thrown_out_and_not_let_in_again(
    server: EmbeddedServer, settings: Settings, tmp_path: Path
) -> None:
    creds = tmp_path / "short.creds"
    write_private(creds, ensure_authority(server.folder).mint(Role.VIEWER, lifetime=4))
    address = find(Settings(state=settings.state, creds=str(creds)), Role.VIEWER)
    closed = asyncio.Event()

    async def end() -> None:
        closed.set()

    client = await connect(address, name="short", on_closed=end)
    await asyncio.wait_for(closed.wait(), 60)
    assert not client.is_connected

    async def come_back_until_refused() -> None:
        while True:  # the end has a granularity of one second, within which the server still lets in
            again = await connect(address, name="short again")
            await again.close()

    with pytest.raises(BadState, match="does not accept the credential"):
        await asyncio.wait_for(come_back_until_refused(), 60)


async def test_without_a_credential_nobody_gets_in(server: EmbeddedServer, tmp_path: Path) -> None:
    endpoint = server.folder.read_endpoint()
    assert endpoint
    stranger = Settings(addr=endpoint.url, state=str(tmp_path / "empty"))
    for role in Role:
        with pytest.raises(BadState, match="does not accept"):
            await connect(find(stranger, role), name="stranger")
