"""Fixtures every part shares: a real nats-server on a folder of its own, and the settings that find it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings as examples

from torchloom.bus.folder import Folder
from torchloom.bus.server import EmbeddedServer, Listen
from torchloom.settings import Settings

examples.register_profile("repeatable", deadline=None, derandomize=True)  # what fails is the change, not the draw
examples.register_profile("drawn", deadline=None, print_blob=True)  # `make campaign`, with its seed
examples.load_profile("repeatable")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A started nats-server on a port it chose."""
    server = EmbeddedServer(Folder(tmp_path / "state"), Listen(port=0))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def settings(server: EmbeddedServer) -> Settings:
    """Settings that lead to `server`, whatever the environment says."""
    return Settings(state=str(server.folder.path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no core is idle in the end: tests with real ranks and nodes."""
    items.sort(key=lambda item: "flow" not in item.path.parts)
