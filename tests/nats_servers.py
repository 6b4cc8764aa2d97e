"""One nats-server for many tests: started once in each test process, empty for each test.

A test may do to its server what it likes. If the server was stopped, killed or restarted, if a connection stays open,
or if a file of its state folder was changed, the next test gets a new one.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from nats.aio.client import Client

from torchloom.bus.connection import connect, find, find_system
from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.bus.state_folder import StateFolder
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

NAME = "cleaner"
LEAVE_SECONDS = 2.0
"""How long the connections of a finished test may take to close."""
PRIVATE = ("nats", "logs")
"""Folders that belong to the server itself."""


NOBODY = "nats://127.0.0.1:1"
"""An address at which no server answers, whatever runs on this machine."""


class Servers:
    """Hands out a running, empty nats-server."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._started = 0
        self._ready: Cleaner | None = None
        self._in_use: Cleaner | None = None

    def take(self) -> EmbeddedServer:
        if self._ready is None:
            self._started += 1
            self._ready = Cleaner(self._home / f"server{self._started}")
        self._in_use, self._ready = self._ready, None
        return self._in_use.server

    def give_back(self) -> None:
        assert self._in_use is not None
        cleaner, self._in_use = self._in_use, None
        if cleaner.clean():
            self._ready = cleaner
        else:
            cleaner.stop()

    def stop(self) -> None:
        if self._ready is not None:
            self._ready.stop()


class Cleaner:
    """A server, and two connections on a thread of their own that remove what a test has left on it."""

    def __init__(self, home: Path) -> None:
        self.server = EmbeddedServer(StateFolder(home / "state"), Listen(port=0))
        self.server.start()
        assert self.server.process
        self._pid = self.server.process.pid
        self._files = self._listing()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._weaver, self._system = self._do(self._connect())

    def clean(self) -> bool:
        """Make it as good as new; whether that was possible."""
        process = self.server.process
        if process is None or process.pid != self._pid or process.poll() is not None:
            return False
        self._remove_new_files()
        if self._listing() != self._files:
            return False
        try:
            return bool(self._do(self._clean()))
        except Exception:  # noqa: BLE001  whatever it is, a new server has not got it
            return False

    def stop(self) -> None:
        self._do(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self.server.stop()

    def _listing(self) -> dict[Path, tuple[int, int]]:
        """The state folder and what is in it, but for the server's own files: modes, and when files were written."""
        root = self.server.folder.path
        # Not even looked into: the server may remove a folder of a deleted stream at that moment.
        own = [path for path in root.iterdir() if path.name not in PRIVATE]
        paths = [*own, *(path for folder in own if folder.is_dir() for path in folder.rglob("*"))]
        stats = {path: path.stat() for path in (root, *paths)}
        return {path: (s.st_mode, 0 if path.is_dir() else s.st_mtime_ns) for path, s in stats.items()}

    def _remove_new_files(self) -> None:
        for path in self._listing().keys() - self._files.keys():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _connect(self) -> tuple[Client, Client]:
        settings = Settings(state=str(self.server.folder.path))
        system = find_system(settings)
        assert system is not None
        weaver = await connect(find(settings, Role.WEAVER), name=NAME)
        return weaver, await connect(system, name=NAME)

    async def _disconnect(self) -> None:
        for client in (self._weaver, self._system):
            await client.close()

    async def _clean(self) -> bool:
        deadline = time.monotonic() + LEAVE_SECONDS
        while await self._others():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)
        streams = self._weaver.jetstream()
        for stream in await streams.streams_info():
            await streams.delete_stream(stream.config.name or "")
        return True

    async def _others(self) -> bool:
        """Whether anyone else is connected."""
        options = msgspec.json.encode({"limit": 10})
        answer = await self._system.request("$SYS.REQ.SERVER.PING.CONNZ", options, timeout=5)
        connections = msgspec.json.decode(answer.data)["data"]["connections"]
        return any(connection.get("name") != NAME for connection in connections)
