"""What Alertmanager posts to a webhook, as facts about devices.

An alert is ours if it says which device or machine it is about and how bad it is:

    which    label UUID, uuid or gpu_uuid: a GPU as dcgm-exporter and the driver name it
             else label device, where a device of that name is known (not dcgm-exporter's `nvidia0`)
             else label Hostname, node, host or instance: every device of that machine
    how bad  label torchloom: `fail`, `warn` or `ignore`
             else label severity: `critical` fails, `warning` warns
             else the name of the alert, where it is one of ours

An alert that names a part of a machine, but not by a uuid, is not taken to mean the whole of it. What it is called when
it fires it is called when it is over: by its fingerprint. The same fingerprint fires again with another `startsAt`.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from torchloom.errors import BadInput
from torchloom.protocol.facts import DeviceFailed, DeviceRecovered, DeviceWarned
from torchloom.protocol.ids import NAME
from torchloom.shared.json_decoding import decoder

MOST_ALERTS = 2000
"""Most alerts in one post."""
UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
HOST_LABELS = ("Hostname", "node", "host", "instance")
PART_LABELS = ("gpu", "device", "pci_bus_id", "GPU_I_ID")
"""An alert with one of these labels is about a part of a machine."""
Effect = Literal["fail", "warn", "ignore"]
BY_LABEL: dict[str, Effect] = {"fail": "fail", "warn": "warn", "ignore": "ignore"}
BY_SEVERITY: dict[str, Effect] = {"critical": "fail", "warning": "warn"}
BY_NAME: dict[str, Effect] = {
    "GpuXid": "fail",
    "GpuEccDoubleBit": "fail",
    "GpuRowRemapFailed": "fail",
    "GpuLost": "fail",
    "GpuXidWarning": "warn",
    "GpuTooHot": "warn",
    "GpuThrottled": "warn",
}
"""The alerts of docs/prometheus-rules.yaml."""

Label = Annotated[str, Meta(max_length=4096)]
Labels = Annotated[dict[Annotated[str, Meta(max_length=256)], Label], Meta(max_length=128)]


class _Alert(msgspec.Struct, frozen=True, rename="camel"):
    status: Literal["firing", "resolved"]
    labels: Labels = {}
    annotations: Labels = {}
    starts_at: Annotated[str, Meta(max_length=64)] = ""
    fingerprint: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = ""


class _Post(msgspec.Struct, frozen=True):
    version: str
    alerts: Annotated[tuple[_Alert, ...], Meta(max_length=MOST_ALERTS)]


_decode = decoder(_Post)


class Alarm(NamedTuple):
    """One alert, and what it concerns as far as its labels say."""

    id: str
    name: str
    began: float
    firing: bool
    effect: Effect
    cause: str
    uuid: str = ""
    part: str = ""
    """The label `device`, which may or may not be a name that torchLoom knows."""
    hosts: tuple[str, ...] = ()
    """Names of its machine, the most specific first; empty if it is about a part without a uuid."""

    @property
    def key(self) -> str:
        """Identifies this state of the alert: equal for repeated posts."""
        return f"{self.id}@{self.began:.3f}-{'firing' if self.firing else 'resolved'}"

    def about(self, device: str) -> DeviceFailed | DeviceRecovered | DeviceWarned:
        """The fact that it states about one device."""
        source = f"Alertmanager ({self.name})"
        if self.effect == "warn":
            over = not self.firing
            return DeviceWarned(device=device, what=self.name[:64], detail=self.cause, source=source, over=over)
        if self.firing:
            return DeviceFailed(device=device, cause=self.cause, source=source, alert=self.id, began=self.began)
        return DeviceRecovered(device=device, source=source, alert=self.id, began=self.began)


def read(body: bytes) -> list[Alarm]:
    """The alerts of a post that have an effect. Raises BadInput for anything that Alertmanager would not send.

    Resolved alerts come before firing ones, so that one post leaves a device in the worst state it reports.
    """
    try:
        post = _decode(body)
    except msgspec.MsgspecError as error:
        raise BadInput(f"this is not what Alertmanager posts: {error}") from None
    if post.version != "4":
        raise BadInput(f"this is version {post.version[:20]!r} of Alertmanager's webhook; version 4 is understood")
    alarms = [_alarm(alert) for alert in post.alerts]
    return sorted((alarm for alarm in alarms if alarm.effect != "ignore"), key=lambda alarm: alarm.firing)


def _alarm(alert: _Alert) -> Alarm:
    labels = alert.labels
    name = " ".join(labels.get("alertname", "").split()) or "alert"
    uuid = next((labels[label] for label in UUID_LABELS if NAME.fullmatch(labels.get(label, ""))), "")
    part = labels.get("device", "")
    is_part = any(labels.get(label) for label in (*UUID_LABELS, *PART_LABELS))
    hosts = () if is_part else tuple(labels[label] for label in HOST_LABELS if labels.get(label))
    return Alarm(
        id=alert.fingerprint or _fingerprint(labels),
        name=name[:200],
        began=_seconds(alert.starts_at),
        firing=alert.status == "firing",
        effect=_effect(labels, is_part),
        cause=_cause(name, alert.annotations),
        uuid=uuid,
        part=part if NAME.fullmatch(part) else "",
        hosts=hosts,
    )


def _effect(labels: dict[str, str], is_part: bool) -> Effect:
    """By its label, else its severity, else its name. A critical alert about a machine (a full disk) only warns."""
    if "torchloom" in labels:
        return BY_LABEL.get(labels["torchloom"].lower(), "ignore")
    by_name = BY_NAME.get(labels.get("alertname", ""), "ignore")
    if not labels.get("severity"):
        return by_name
    effect = BY_SEVERITY.get(labels["severity"].lower(), "ignore")
    return effect if is_part or effect != "fail" or by_name == "fail" else "warn"


def _cause(name: str, annotations: dict[str, str]) -> str:
    text = annotations.get("summary") or annotations.get("description") or annotations.get("message") or ""
    return (f"{name}: {text}" if text else name)[:2000]


def _seconds(stamp: str) -> float:
    """Seconds since 1970; 0 if the stamp is missing or invalid."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return 0.0
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _fingerprint(labels: dict[str, str]) -> str:
    """For senders that leave it out: the labels identify an alert."""
    return hashlib.blake2b(msgspec.json.encode(sorted(labels.items())), digest_size=8).hexdigest()
