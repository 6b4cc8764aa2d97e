"""`loom weaver`: the service as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable

import nats.errors
from nats.aio.client import Client

from torchloom.bus.connection import Address, close_quietly, connect, find, find_system, is_denied
from torchloom.bus.credentials import ensure_authority
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.tasks import on_stop_signal
from torchloom.bus.weaver_client import ask_for_plane
from torchloom.errors import AlreadyUp, TorchLoomError, Unreachable
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings
from torchloom.weaver.alert_webhook import Ingress
from torchloom.weaver.connection_monitor import ConnectionAdvisories
from torchloom.weaver.gc_tuning import short_collections
from torchloom.weaver.health import Clock, Health, log
from torchloom.weaver.service import Weaver
from torchloom.weaver.storage import Store

START_SECONDS = 30.0
"""Time that a starting weaver waits for its server."""


def run(settings: Settings, takeover: bool = False) -> int:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", force=True
    )
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # its problems reach us through callbacks
    asyncio.run(serve(settings, takeover))
    return 0


async def serve(settings: Settings, takeover: bool = False) -> None:
    """Run the weaver until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    async with contextlib.AsyncExitStack() as stack:
        weaver = await begin(settings, stack, takeover)
        service = asyncio.create_task(weaver.run())
        service.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if service.done():
            service.result()  # it ends only by an error
        service.cancel()  # once only: a second time would disturb it while it ends its own tasks
        with contextlib.suppress(asyncio.CancelledError):
            await service
        with contextlib.suppress(nats.errors.Error, TorchLoomError, OSError):
            await asyncio.wait_for(weaver.write_snapshot(), 2)
        log.info("stopped")


async def begin(settings: Settings, stack: contextlib.AsyncExitStack, takeover: bool) -> Weaver:
    """Connect, load the stored state, and take over."""
    health = Health(Clock())
    stack.enter_context(short_collections())
    name = f"{socket.gethostname()}:{os.getpid()}"
    weaver: Weaver | None = None

    async def on_back() -> None:
        if weaver is not None:
            weaver.on_back()

    async def on_error(error: Exception) -> None:
        if is_denied(error):
            log.error("%s", error)
        elif isinstance(error, nats.errors.SlowConsumerError):
            health.refuse(phrase("beats_dropped"))

    async def open_link(address: Address, role: str) -> Client:
        deadline = health.clock() + START_SECONDS
        while True:
            try:
                client = await connect(
                    address, name=f"{role} {name}", keep_trying=True, on_back=on_back, on_error=on_error
                )
                stack.push_async_callback(close_quietly, client)
                return client
            except Unreachable:
                if health.clock() > deadline:
                    raise
                await asyncio.sleep(0.1)

    client = await open_link(find(settings, Role.WEAVER), "weaver")
    if not takeover:
        await _refuse_second(client)
    store = Store(client, health)
    await store.open()
    cluster = await store.load(settings)
    advisories = None
    system = find_system(settings)
    if system is not None:
        advisories = ConnectionAdvisories(await open_link(system, "system"), system.account)
        if not await advisories.works():
            advisories = None
    if advisories is None:
        log.warning("no system account: deaths show only as silence. TORCHLOOM_SYSTEM_CREDS would tell them at once")
    ingress = Ingress(settings, client, cluster, health) if settings.ingress else None
    weaver = Weaver(client, store, cluster, advisories, name, health, ingress)
    weaver.sender.mint = rank_minter(settings)
    await weaver.take_over()
    if ingress is not None:
        stack.push_async_callback(ingress.close)
        await ingress.open()
    return weaver


def rank_minter(settings: Settings) -> Callable[[RankId], str] | None:
    """The function that makes credentials for one rank, if this machine has the keys of the server."""
    folder = StateFolder(settings.state_folder)
    if not find(settings, Role.WEAVER).account or not folder.authority.exists():
        return None
    authority = ensure_authority(folder)
    return lambda rank: authority.mint(Role.THREADLET, rank).decode()


async def _refuse_second(client: Client) -> None:
    """Two weavers would take turns fencing each other; a second one starts only with --takeover."""
    plane = await ask_for_plane(client, timeout=0.5)
    if plane is not None:
        raise AlreadyUp(
            f"a weaver runs already: {plane.weaver}, term {plane.term}",
            hint="`loom status` shows it; `loom weaver --takeover` replaces it",
        )
