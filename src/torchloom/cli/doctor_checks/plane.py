"""The checks of `loom doctor` that need the control plane: does it answer, does it sync, do our clocks agree."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from torchloom.bus.join_token import listens
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.weaver_client import WeaverClient
from torchloom.cli.doctor_checks.diagnosis import Finding
from torchloom.errors import TorchLoomError, Unreachable
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import ClusterView
from torchloom.settings import Settings
from torchloom.views.format.numbers import duration

_CLOCK = 1.0
"""Seconds by which two clocks may differ before times on a screen mislead."""


async def examine(settings: Settings, folder: StateFolder) -> list[Finding]:
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
        found = "whether this server syncs every write cannot be seen from here"
        remedy = "its configuration should have `sync_interval: always`, or be a cluster of three"
        return [Finding("jetstream", "ok", "present"), Finding("jetstream sync", "warn", found, remedy)]
    try:
        always = "sync_interval: always" in config.read_text()
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
        found = f"the weaver's clock differs from ours by {duration(offset)}"
        return Finding("clock", "warn", found, "run an NTP client (chrony, systemd-timesyncd) on both machines")
    return Finding("clock", "ok", "agrees with the weaver's")


def certificate(folder: StateFolder) -> list[Finding]:
    """Only where our own server uses one."""
    cert = listens(folder)[1]
    if cert is None:
        return []
    try:
        from torchloom.bus.tls import RENEW, expires

        left = expires(cert) - datetime.now(UTC)
    except TorchLoomError as error:
        return [Finding("certificate", "warn", error.message, error.hint)]
    text = f"{cert} is valid for {left.days} more days"
    if left.total_seconds() <= 0:
        return [Finding("certificate", "fail", f"{cert} has expired", "`loom down`, then `loom up --listen …` again")]
    if left < RENEW:
        return [Finding("certificate", "warn", text, "`loom down`, then `loom up --listen …` renews it")]
    return [Finding("certificate", "ok", text)]
