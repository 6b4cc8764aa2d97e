"""The state folder: the files of a control plane, private to one user on one machine.

lock              held by the one `loom up`; its text says who
endpoint.json     where the server listens: what every other command reads
authority.json    the keys that sign credentials
creds/ROLE.creds  one secret per role
ingress.json      where the weaver takes alerts
ingress.token     the secret that alerts carry
tls/              authority, certificate and key, where the server listens beyond loopback
nats/             the server's configuration, ports file and JetStream store
logs/             nats.log, weaver.log, up.log
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchloom.errors import BadState
from torchloom.shared.files import replace_file


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know to reach the server of a state folder."""

    url: str
    account: str = ""
    """Public key of torchLoom's account: the server announces its connects and disconnects under this name."""
    tls: bool = False
    listen: str = ""
    """The address the server listens on; empty on a machine that joined another's control plane."""


class StateFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def endpoint(self) -> Path:
        return self.path / "endpoint.json"

    @property
    def authority(self) -> Path:
        return self.path / "authority.json"

    @property
    def ingress(self) -> Path:
        return self.path / "ingress.json"

    @property
    def ingress_token(self) -> Path:
        return self.path / "ingress.token"

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    @property
    def tls(self) -> Path:
        return self.path / "tls"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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
        try:
            return msgspec.json.decode(self.endpoint.read_bytes(), type=Endpoint)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadState(f"cannot read {self.endpoint}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise BadState(
                f"{self.endpoint} is damaged: {error}", hint="remove that file, then run `loom up` again"
            ) from error


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, readable by the owner only."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise BadState(f"cannot write {path}: {error.strerror}") from error
