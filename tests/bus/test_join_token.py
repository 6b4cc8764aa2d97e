"""The join token: what it holds, where it is refused, and that a second machine gets in with it and no further."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.damaged_json import GARBAGE
from torchloom.bus.connection import connect, find
from torchloom.bus.credentials import ensure_authority
from torchloom.bus.join_token import join, make_token, read_token
from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.tls import ensure_tls
from torchloom.errors import BadInput, BadState
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

ROLES = [Role.THREADLET, Role.VIEWER]


def encoded(**more: Any) -> str:
    known = {"v": 1, "url": "tls://10.0.0.1:4222", "account": "A", "creds": {"viewer": "x"}, "ca": ""}
    return base64.urlsafe_b64encode(msgspec.json.encode(known | more)).decode()


async def test_a_second_machine_joins_with_tls(tmp_path: Path) -> None:
    first = StateFolder(tmp_path / "first")
    cert, key = ensure_tls(first, "127.0.0.1")
    server = EmbeddedServer(first, Listen(port=0, cert=cert, key=key))
    server.start()
    try:
        token = make_token(first, ROLES, lifetime=3600, host="127.0.0.1")
        second = StateFolder(tmp_path / "second")
        join(second, read_token(token))
        assert {file.name for file in (second.path / "creds").iterdir()} == {"threadlet.creds", "viewer.creds"}
        secrets = [second.endpoint, *(second.path / "creds").iterdir()]
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in secrets)
        ours, theirs = first.read_endpoint(), second.read_endpoint()
        assert ours
        assert theirs
        assert (theirs.url, theirs.account) == (ours.url, ours.account)
        assert theirs.url.startswith("tls://")
        settings = Settings(state=str(second.path))
        client = await connect(find(settings, Role.VIEWER), name="second machine")
        await client.close()
        with pytest.raises(BadState, match="credential"):
            await connect(find(settings, Role.OPERATOR), name="not invited")
    finally:
        server.stop()


def test_joining_again_leaves_nothing_of_the_first_time(server: EmbeddedServer, tmp_path: Path) -> None:
    second = StateFolder(tmp_path / "second")
    join(second, read_token(make_token(server.folder, ROLES, None, host="127.0.0.1")))
    join(second, read_token(make_token(server.folder, [Role.AGENT], None, host="127.0.0.1")))
    assert [file.name for file in (second.path / "creds").iterdir()] == ["agent.creds"]


def test_a_folder_with_a_control_plane_of_its_own_is_not_overwritten(server: EmbeddedServer, tmp_path: Path) -> None:
    token = read_token(make_token(server.folder, ROLES, None, host="127.0.0.1"))
    own = StateFolder(tmp_path / "own")
    own.make()
    ensure_authority(own)
    before = own.creds(Role.VIEWER).read_bytes()
    with pytest.raises(BadState, match="control plane of its own"):
        join(own, token)
    assert own.creds(Role.VIEWER).read_bytes() == before
    assert not own.endpoint.exists()


def test_a_server_on_loopback_has_no_address_to_give(server: EmbeddedServer) -> None:
    with pytest.raises(BadInput, match="this machine only"):
        make_token(server.folder, ROLES, None)
    with pytest.raises(BadInput, match="no TLS"):
        make_token(server.folder, ROLES, None, host="10.0.0.9")


def test_a_server_that_listens_everywhere_needs_a_name(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    cert, key = ensure_tls(folder, "0.0.0.0")
    server = EmbeddedServer(folder, Listen(host="0.0.0.0", port=0, cert=cert, key=key))
    server.start()
    try:
        with pytest.raises(BadInput, match="which one") as caught:
            make_token(folder, ROLES, None)
        assert "--host" in caught.value.hint
        assert read_token(make_token(folder, ROLES, None, host="127.0.0.1")).ca.startswith("-----BEGIN")
        with pytest.raises(BadInput, match="certificate does not name"):
            make_token(folder, ROLES, None, host="203.0.113.9")
    finally:
        server.stop()


def test_nothing_to_join(tmp_path: Path) -> None:
    with pytest.raises(BadState, match="nothing to join"):
        make_token(StateFolder(tmp_path), ROLES, None)


def test_a_line_broken_by_a_mail_program_is_mended() -> None:
    token = encoded()
    assert read_token(f"  {token[:20]}\r\n{token[20:]}\n").url == "tls://10.0.0.1:4222"


@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "hello", "💥", "A" * 300_000, base64.urlsafe_b64encode(b"{}").decode(), encoded(v=2),
        *(base64.urlsafe_b64encode(data).decode() for data in GARBAGE),
        encoded(url="http://x:1"), encoded(url="tls://user:secret@x:1"), encoded(url="tls://x"),
        encoded(url="nats://10.0.0.1:4222"), encoded(creds={"../../etc/passwd": "x"}), encoded(creds={"viewer": 3}),
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_what_is_not_a_token_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        read_token(text)
