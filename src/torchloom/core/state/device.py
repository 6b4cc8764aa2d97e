"""A device, and the sources that report it failed. The durable part."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from torchloom.protocol.phrase import Prose
from torchloom.protocol.records import DeviceBlamed, DeviceCleared, DeviceMarkedFailed, DeviceMarkedRecovered

BLAMES_KEPT = 64
"""Failure reports of one device; beyond, the oldest is forgotten."""


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """A source reports that a device has failed."""

    by: str
    cause: Prose
    began: float = 0.0
    alert: bool = False
    """An alert, which its source repeats while it lasts."""
    overruled: bool = False
    """An operator has reported since that the device works."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    node: str
    failed: bool = False
    since: float = 0.0
    cause: Prose = ""
    incident: str = ""
    blames: tuple[Blame, ...] = ()
    """All failure reports, also those that an operator has overruled."""


def fold_device(
    device: Device, record: DeviceBlamed | DeviceCleared | DeviceMarkedFailed | DeviceMarkedRecovered, at: float
) -> Device:
    match record:
        case DeviceBlamed(by=by, cause=cause, began=began, alert=alert):
            others = tuple(blame for blame in device.blames if blame.by != by)
            blame = Blame(by=by, cause=cause, began=began, alert=alert)
            return replace(device, blames=(*others, blame)[-BLAMES_KEPT:])
        case DeviceCleared(by=by):
            left = tuple(blame for blame in device.blames if blame.by != by)
            cause = next((blame.cause for blame in left if device.failed and not blame.overruled), device.cause)
            return replace(device, blames=left, cause=cause)
        case DeviceMarkedFailed(cause=cause):
            return replace(device, failed=True, since=at, cause=cause)
        case DeviceMarkedRecovered():
            kept = tuple(replace(blame, overruled=True) for blame in device.blames if blame.alert)
            return replace(device, failed=False, since=at, cause="", incident="", blames=kept)
