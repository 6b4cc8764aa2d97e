"""The embedded server starts on any folder that a user may choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.bus.state_folder import StateFolder


@pytest.mark.parametrize("name", ["with spaces", 'quo"te', "back\\slash", "$HOME", "größe 日本"])
def test_every_name_of_a_folder_can_be_configured(tmp_path: Path, name: str) -> None:
    folder = StateFolder(tmp_path / name)
    folder.make()
    server = EmbeddedServer(folder, Listen(port=0))
    server.start()
    server.stop()
    assert (folder.nats / "jetstream").is_dir()
