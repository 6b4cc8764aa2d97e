"""Certificates: made once, renewed in time, private, and accepted by a client that trusts our authority only."""

from __future__ import annotations

import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from torchloom.bus import tls
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.tls import covers, ensure_tls, expires, names_of
from torchloom.errors import BadState
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

SHORT = tls.RENEW - timedelta(days=1)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def test_made_once_and_then_kept(folder: StateFolder) -> None:
    cert, key = ensure_tls(folder, "10.1.2.3")
    before = (cert.read_bytes(), key.read_bytes(), (folder.tls / "ca.pem").read_bytes())
    assert ensure_tls(folder, "10.1.2.3") == (cert, key)
    assert (cert.read_bytes(), key.read_bytes(), (folder.tls / "ca.pem").read_bytes()) == before
    assert timedelta(days=364) < expires(cert) - datetime.now(UTC) <= timedelta(days=365)


def test_every_file_is_private(folder: StateFolder) -> None:
    ensure_tls(folder, "10.1.2.3")
    files = list(folder.tls.iterdir())
    assert {file.name for file in files} == {"ca.pem", "ca.key", "server.pem", "server.key"}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_a_new_host_gets_a_new_certificate_of_the_same_authority(folder: StateFolder) -> None:
    cert, _ = ensure_tls(folder, "10.1.2.3")
    authority = (folder.tls / "ca.pem").read_bytes()
    assert not covers(cert, "node7.example.org")
    ensure_tls(folder, "node7.example.org")
    assert covers(cert, "node7.example.org")
    assert covers(cert, "localhost")
    assert (folder.tls / "ca.pem").read_bytes() == authority


@pytest.mark.parametrize("lasts", [SHORT, timedelta(seconds=-5)])
def test_a_certificate_about_to_end_is_renewed(
    folder: StateFolder, lasts: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tls, "VALID", lasts)
        cert, _ = ensure_tls(folder, "10.1.2.3")
    old = expires(cert)
    ensure_tls(folder, "10.1.2.3")
    assert expires(cert) > old + timedelta(days=300)


def test_a_damaged_certificate_is_made_anew_and_a_damaged_authority_is_said(folder: StateFolder) -> None:
    cert, _ = ensure_tls(folder, "10.1.2.3")
    cert.write_bytes(b"rubbish")
    ensure_tls(folder, "10.1.2.3")
    assert covers(cert, "10.1.2.3")
    (folder.tls / "ca.key").write_bytes(b"rubbish")
    with pytest.raises(BadState, match="authority"):
        ensure_tls(folder, "10.1.2.3")


def test_listening_everywhere_names_every_address_but_not_the_wildcard() -> None:
    assert "0.0.0.0" not in names_of("0.0.0.0")
    assert {"127.0.0.1", "localhost"} <= set(names_of("0.0.0.0"))


async def test_a_client_that_trusts_our_authority_gets_in_and_another_does_not(
    folder: StateFolder, tmp_path: Path
) -> None:
    cert, key = ensure_tls(folder, "127.0.0.1")
    server = EmbeddedServer(folder, Listen(port=0, cert=cert, key=key))
    server.start()
    try:
        endpoint = folder.read_endpoint()
        assert endpoint is not None
        assert endpoint.url.startswith("tls://")
        client = await connect(find(Settings(state=str(folder.path)), Role.VIEWER), name="trusting")
        assert client.is_connected
        await client.close()
        foreign = StateFolder(tmp_path / "foreign")
        ensure_tls(foreign, "127.0.0.1")
        distrusting = Settings(state=str(folder.path), tls_ca=str(foreign.tls / "ca.pem"))
        with pytest.raises(BadState, match="TLS"):
            await connect(find(distrusting, Role.VIEWER), name="distrusting")
    finally:
        server.stop()


def test_without_cryptography_the_remedy_is_said(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from torchloom.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--state", str(tmp_path / "state"), "up", "--listen", "10.1.2.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "pip install 'torchloom[tls]'" in done.stderr


def test_a_command_over_tls_says_nothing_but_its_answer(folder: StateFolder) -> None:
    cert, key = ensure_tls(folder, "127.0.0.1")
    server = EmbeddedServer(folder, Listen(port=0, cert=cert, key=key))
    server.start()
    try:
        command = [sys.executable, "-m", "torchloom.cli.main", "--state", str(folder.path), "events"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        server.stop()
    assert done.stderr.splitlines()[0] == "loom: there is no stream LOOM_LOG yet"
