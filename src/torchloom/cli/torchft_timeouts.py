"""The checks of `loom doctor` on torchft: what is installed, and whether each waits longer than what it waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchloom.cli.doctor_checks import Finding, installed
from torchloom.core.torchft.replica_groups import timeouts
from torchloom.protocol.job import Torchft

HEARTBEAT_SECONDS = 0.1
"""Between two heartbeats of a replica: torchft's own default."""


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


def examine(environ: Mapping[str, str]) -> list[Finding]:
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
