"""A lighthouse on a real socket: it answers at once, refuses what it must, and never gives a number twice."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.damaged_json import damage
from tests.lighthouse.conftest import Start, until
from tests.lighthouse.test_torchft_messages import GARBAGE
from torchloom.errors import AlreadyUp, BadInput, BadState
from torchloom.lighthouse import quorum_store as keeping_module
from torchloom.lighthouse.grpc_server import BindAddress, parse_bind
from torchloom.lighthouse.quorum import DurableState, NotYet, decide
from torchloom.lighthouse.quorum_store import STATE, QuorumStore
from torchloom.protocol.phrase import phrase
from torchloom.shared.addresses import check_free

QUORUM = "/torchft.LighthouseService/Quorum"
HEARTBEAT = "/torchft.LighthouseService/Heartbeat"


async def refused(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), caught.value.details() or ""


async def test_two_replicas_get_one_quorum(begin: Start) -> None:
    async with begin() as here:
        await here.replica.heartbeat("b")
        answers = await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b"))
        assert answers == [(1, ("a", "b"))] * 2
        assert here.service.store.durable == DurableState(quorum=1, members=("a", "b"))


async def test_fifty_replicas_get_one_quorum_again_and_again(begin: Start) -> None:
    async with begin() as here:
        ids = tuple(f"r{number:02}" for number in range(50))
        await asyncio.gather(*(here.replica.heartbeat(id) for id in ids))
        for _ in range(5):
            answers = await asyncio.gather(*(here.replica.quorum(id) for id in ids))
            assert answers == [(1, ids)] * 50


async def test_the_join_timeout_ends_without_any_further_word(begin: Start) -> None:
    async with begin(join=0.05, tick=60.0) as here:
        await here.replica.heartbeat("c")
        await here.replica.heartbeat("b")
        assert await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b")) == [(1, ("a", "b"))] * 2


async def test_the_heartbeat_timeout_ends_without_any_further_word(begin: Start) -> None:
    async with begin(heartbeat=0.3, tick=60.0) as here:
        await here.replica.heartbeat("b")
        answer = asyncio.create_task(here.replica.quorum("a"))
        while not answer.done():
            await here.replica.heartbeat("a")
            await asyncio.sleep(0.02)
        assert answer.result() == (1, ("a",))


async def test_a_late_heartbeat_of_one_that_waits_counts_at_once(begin: Start) -> None:
    async with begin(min_replicas=2, tick=60.0) as here:
        first = asyncio.create_task(here.replica.quorum("a"))
        await here.waits("a")
        here.service.state.heartbeats["a"] -= 60.0  # long silent
        second = asyncio.create_task(here.replica.quorum("b"))
        await here.waits("a", "b")
        await here.replica.heartbeat("a")
        assert await first == await second == (1, ("a", "b"))


async def test_who_hangs_up_or_runs_out_of_time_does_not_wait(begin: Start) -> None:
    async with begin() as here:
        await here.replica.heartbeat("b")
        hangs_up = asyncio.create_task(here.replica.quorum("a"))
        await here.waits("a")
        hangs_up.cancel()
        await here.waits()
        assert (await refused(here.replica.quorum("a", timeout=0.2)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await here.waits()
        assert here.service._answers == {}


async def test_an_evicted_one_that_waits_is_refused_and_the_other_goes_on(begin: Start) -> None:
    async with begin() as here:
        await here.replica.heartbeat("b")
        await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b"))
        dead = asyncio.create_task(refused(here.replica.quorum("b")))
        await here.waits("b")
        here.service.evict(["b"], "killed by SIGKILL")
        code, said = await dead
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert said.startswith("b was evicted")
        assert await here.replica.quorum("a") == (2, ("a",))
        assert (await refused(here.replica.quorum("b")))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert (await refused(here.replica.heartbeat("b")))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_survivor_that_waits_is_answered_the_moment_the_other_is_evicted(begin: Start) -> None:
    async with begin() as here:
        await here.replica.heartbeat("b")
        await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b"))
        survivor = asyncio.create_task(here.replica.quorum("a"))
        await here.waits("a")
        here.service.evict(["b"])
        assert await survivor == (2, ("a",))


async def test_a_restart_goes_on_and_forgets_nobody(begin: Start) -> None:
    async with begin() as here:
        for id in "abc":
            await here.replica.heartbeat(id)
        await asyncio.gather(*(here.replica.quorum(id) for id in "abc"))
        here.service.evict(["c"])
    async with begin() as here:
        assert (await refused(here.replica.quorum("c")))[0] is grpc.StatusCode.FAILED_PRECONDITION
        alone = asyncio.create_task(here.replica.quorum("a"))
        await here.waits("a")
        decision = decide(here.service.state, here.service.rules, here.service._loop.time())
        assert isinstance(decision, NotYet)
        assert decision.why == phrase("quorum_no_majority", ready=1, alive=2)
        assert await here.replica.quorum("b") == await alone == (2, ("a", "b"))


async def test_a_lighthouse_that_ends_says_so_to_those_who_wait(begin: Start) -> None:
    async with begin() as here:
        await here.replica.heartbeat("b")
        waits = asyncio.create_task(refused(here.replica.quorum("a")))
        await here.waits("a")
        here.service.close()
        code, said = await waits
        assert (code, said) == (grpc.StatusCode.UNAVAILABLE, "this lighthouse is being stopped")


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_refused_and_changes_nothing(begin: Start, name: str) -> None:
    async with begin() as here:
        code, said = await refused(here.replica.raw(QUORUM, GARBAGE[name][0]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert GARBAGE[name][1] in said
        assert (await refused(here.replica.raw(HEARTBEAT, b"\xff")))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert not here.service.state.heartbeats
        assert (await refused(here.replica.raw("/torchft.Other/Call", b"")))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert await here.replica.quorum("a") == (1, ("a",))


async def test_what_is_too_large_is_refused(begin: Start) -> None:
    async with begin() as here:
        code, _ = await refused(here.replica.raw(QUORUM, b"\x0a" * (2 * 1024 * 1024)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_without_a_disk_no_new_number_is_given_and_the_old_one_goes_on(
    begin: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with begin() as here:
        await here.replica.heartbeat("b")
        await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b"))
        folder, away = here.service.store.folder, here.service.store.folder.with_name("away")
        folder.rename(away)
        assert await asyncio.gather(here.replica.quorum("a"), here.replica.quorum("b")) == [(1, ("a", "b"))] * 2
        waits = asyncio.gather(here.replica.quorum("a", failures=1), here.replica.quorum("b"))
        await until(lambda: "no new quorum is announced until it can" in caplog.text)
        assert here.service.state.durable.quorum == 1
        away.rename(folder)
        assert await waits == [(2, ("a", "b"))] * 2


async def test_without_a_disk_evictions_hold_and_are_kept_later(begin: Start) -> None:
    async with begin() as here:
        await here.replica.quorum("a")
        folder, away = here.service.store.folder, here.service.store.folder.with_name("away")
        folder.rename(away)
        here.service.evict(["x"])
        assert (await refused(here.replica.quorum("x")))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert await here.replica.quorum("a") == (1, ("a",))
        assert here.service.store.durable.evicted == ()
        away.rename(folder)
        await until(lambda: here.service.store.durable.evicted == ("x",))


async def test_a_number_is_on_disk_before_it_is_heard_of(begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = keeping_module.os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        order.append("on disk")

    monkeypatch.setattr(keeping_module.os, "fsync", fsync)
    async with begin() as here:
        settle = here.service._settle
        here.service._settle = lambda calls, with_: (order.append("told"), settle(calls, with_))[1]  # type: ignore[method-assign]
        await here.replica.quorum("a")
        await here.replica.quorum("a")
    assert order[:4] == ["on disk", "on disk", "told", "told"], "file, folder; and nothing for a quorum like the last"


async def test_a_pause_of_the_lighthouse_itself_kills_nobody(begin: Start) -> None:
    async with begin(heartbeat=0.4) as here:
        await here.replica.heartbeat("b")
        here.service._awake -= 60.0  # as if it had been stopped
        here.service.state.heartbeats["b"] -= 60.0
        here.service.update()
        assert here.service.naps == 1
        assert "b" in here.service.state.alive(here.service.rules, here.service._loop.time())


async def test_a_port_that_is_taken_is_named(begin: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AlreadyUp, match=f"port {port} on 127.0.0.1 is in use") as caught:
            async with begin(port=port):
                pass
        assert "--bind 127.0.0.1:0" in caught.value.hint


async def test_it_listens_on_the_interface_it_was_given_and_no_other(begin: Start) -> None:
    async with begin() as here:
        port = int(here.url.rpartition(":")[2])
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_addresses() -> None:
    assert parse_bind("127.0.0.1:29510") == BindAddress("127.0.0.1", 29510)
    assert parse_bind("[::1]:0") == BindAddress("::1", 0)
    assert BindAddress("::1", 7).url == "http://[::1]:7"
    assert BindAddress("0.0.0.0", 7).url == f"http://{socket.gethostname()}:7"
    for text in ("29510", ":29510", "host:", "host:x", "host:65536", "::1:7", "[::1]"):
        with pytest.raises(BadInput, match="not an address"):
            parse_bind(text)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(BadInput, match="not an address of this machine"):
        check_free("192.0.2.1", 0, "")
    with pytest.raises(BadInput, match="no host"):
        check_free("nobody.invalid", 0, "")


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    kept = DurableState(quorum=7, members=("a", "b"), evicted=("c",), broken=(6,))
    first = QuorumStore(tmp_path / "new" / "folder")
    first.write(kept)
    first.note_port(1234)
    first.close()
    second = QuorumStore(tmp_path / "new" / "folder")
    assert second.durable == kept
    assert second.last_port() == 1234
    second.close()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0


def test_two_lighthouses_do_not_share_a_folder(tmp_path: Path) -> None:
    first = QuorumStore(tmp_path)
    with pytest.raises(AlreadyUp, match="another lighthouse has"):
        QuorumStore(tmp_path)
    first.close()
    QuorumStore(tmp_path).close()


@pytest.mark.parametrize("data", damage(b'{"quorum":7,"members":["a"]}'))
def test_a_damaged_memory_is_not_begun_anew(tmp_path: Path, data: bytes) -> None:
    (tmp_path / STATE).write_bytes(data)
    with pytest.raises(BadState, match="damaged") as caught:
        QuorumStore(tmp_path)
    assert "no replica of the job runs" in caught.value.hint
