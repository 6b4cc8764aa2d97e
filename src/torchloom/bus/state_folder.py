"""The state folder: the files of a control plane, private to one user on one machine.

lock              held by `loom up`; contains its process id
endpoint.json     where the server listens; every other command reads it
authority.json    the keys that sign credentials
creds/ROLE.creds  one secret per role
ingress.json      where the weaver receives alerts
ingress.token     the secret that alerts must contain
tls/              authority, certificate and key, where the server listens beyond loopback
nats/             the server's configuration, ports file and JetStream store
logs/             nats.log, weaver.log, up.log
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchloom.errors import BadState
from torchloom.shared.addresses import split_url
from torchloom.shared.files import replace_file
from torchloom.shared.json_decoding import read_file


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know to reach the server of a state folder."""

    url: str
    account: str = ""
    """Public key of torchLoom's account: the server announces its connects and disconnects under this name."""
    listen: str = ""
    """The address the server listens on, which may mean all; empty on a machine that joined another's control plane."""
    cert: str = ""
    """The certificate of the server, if it listens with TLS on this machine."""

    def __post_init__(self) -> None:
        split_url(self.url)


class StateFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "lock"
        self.endpoint = path / "endpoint.json"
        self.authority = path / "authority.json"
        self.ingress = path / "ingress.json"
        self.ingress_token = path / "ingress.token"
        self.nats = path / "nats"
        self.tls = path / "tls"
        self.logs = path / "logs"

    def creds(self, name: str) -> Path:
        return self.path / "creds" / f"{name}.creds"

    def make(self) -> None:
        """Create it, private; refuse a folder that others can read, since secrets live there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for sub in (self.path / "creds", self.nats, self.logs, self.tls):
                sub.mkdir(exist_ok=True, mode=0o700)
            probe = self.path / ".probe"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            raise BadState(
                f"cannot use the state folder {self.path}: {error.strerror}",
                hint="choose another with --state or TORCHLOOM_STATE, or mend its permissions and space",
            ) from error
        info = self.path.stat()
        if info.st_mode & 0o077:
            raise BadState(
                f"the state folder {self.path} is open to other users (mode {info.st_mode & 0o777:o})",
                hint=f"chmod 700 {self.path}",
            )

    def read_endpoint(self) -> Endpoint | None:
        """The endpoint of the server, or None if no control plane was ever up here."""
        return read_file(self.endpoint, Endpoint, "remove that file, then run `loom up` or `loom join` again")


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, readable by the owner only."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise BadState(f"cannot write {path}: {error.strerror}") from error
