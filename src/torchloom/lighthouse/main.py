"""A lighthouse as a process of its own: `loom lighthouse`, or `python -m torchloom.lighthouse`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from functools import partial

from torchloom.bus.tasks import end_all, on_stop_signal
from torchloom.errors import TorchLoomError
from torchloom.lighthouse.options import Options
from torchloom.lighthouse.quorum import Rules
from torchloom.lighthouse.quorum_store import QuorumStore
from torchloom.settings import Settings


def run(settings: Settings, options: Options) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its problems reach us as exceptions
    try:
        import grpc.aio  # noqa: F401
    except ImportError as error:
        raise TorchLoomError(
            f"a lighthouse needs grpcio: {error}", hint="pip install 'torchloom[lighthouse]'"
        ) from error
    asyncio.run(serve(settings, options))
    return 0


def run_stock(options: Options) -> int:
    """Serve torchft's own lighthouse, as a process that obeys signals.

    `loom run --torchft --lighthouse stock` starts it, for comparison and to rule out a fault in torchLoom's lighthouse.
    It detects a dead replica only by the heartbeat timeout, and loses its state when it is killed.
    """
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # for its threads too, so that the wait below alone hears them
    try:
        from torchft.coordination import LighthouseServer  # type: ignore[import-untyped]
    except ImportError as error:
        raise TorchLoomError(f"it needs torchft: {error}", hint="pip install 'torchloom[torchft]'") from error
    timeouts = {"join_timeout_ms": options.join_timeout_ms, "heartbeat_timeout_ms": options.heartbeat_timeout_ms}
    try:
        server = LighthouseServer(bind=options.bind, min_replicas=options.min_replicas, **timeouts)
    except RuntimeError as error:
        raise TorchLoomError(f"{options.bind}: {error}") from error
    print(f"torchft's own lighthouse at {server.address()}", flush=True)
    signal.sigwait(ends)
    server.shutdown()
    print("stopped", flush=True)
    return 0


async def serve(settings: Settings, options: Options) -> None:
    from torchloom.lighthouse.grpc_server import parse_bind, serve_grpc
    from torchloom.lighthouse.nats_reporter import NatsReporter
    from torchloom.lighthouse.quorum_service import QuorumService

    say = partial(print, flush=True)
    bind = parse_bind(options.bind)
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    folder = options.folder or settings.state_folder / "lighthouses" / options.job
    with contextlib.closing(QuorumStore(folder.absolute())) as store:
        rules = Rules(options.min_replicas, options.join_timeout_ms / 1000, options.heartbeat_timeout_ms / 1000)
        service = QuorumService(rules, store, options.quorum_tick_ms / 1000)
        async with serve_grpc(service, bind, store.last_port()) as address:
            logging.basicConfig(
                stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", force=True
            )
            logging.getLogger("nats").setLevel(logging.CRITICAL)  # its problems reach us through callbacks
            store.note_port(address.port)
            say(f"lighthouse of {options.job} at {address.url}: TORCHFT_LIGHTHOUSE={address.url}")
            where = "EVERY interface of this machine" if address.everywhere else f"{address.host} only"
            say(f"it listens on {where}; the protocol has no authentication: keep the port out of reach of others")
            if store.durable.quorum:
                say(f"the last quorum was {store.durable.quorum}: {', '.join(store.durable.members)}")
            reporter = asyncio.create_task(NatsReporter(settings, options.job, service, address.url).run())
            await stop.wait()
            await end_all([reporter])
    say("stopped")
