"""Which devices an alert means: one by its name, or all of a machine by one of the machine's names."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom.core.state.cluster import ClusterState
from torchloom.shared.addresses import split_address


class AlertTargets:
    """The devices of each machine, under every name that a monitoring system may have for it.

    `node7` and `node7.example.org` are one machine, and so is `node7-example-org`, which is its name in a subject. But
    two names with dots are one machine only if they are equal.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._whole: dict[str, set[str]] = {}
        self._short: dict[str, set[str]] = {}
        self._ids = set(cluster.devices)
        for device in cluster.devices.values():
            self._add(device.node, (device.id,))
        for node, seen in cluster.runtime.nodes.items():
            self._ids.update(seen.beat.devices)
            there = self._whole.get(_key(node), set()) | set(seen.beat.devices)
            for name in {node, seen.beat.host}:
                self._add(name, there)

    def _add(self, name: str, devices: Iterable[str]) -> None:
        if name:
            self._whole.setdefault(_key(name), set()).update(devices)
            self._short.setdefault(_key(name.partition(".")[0]), set()).update(devices)

    def devices(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the machine that is meant; of several names for it, the first that is known decides."""
        for name in map(_bare, names):
            short, dot, _ = name.partition(".")
            devices = self._whole.get(_key(name)) or (self._whole if dot else self._short).get(_key(short))
            if devices:
                return tuple(sorted(devices))
        return ()

    def named(self, part: str) -> tuple[str, ...]:
        """The device of this name, if there is one."""
        return (part,) if part in self._ids else ()


def devices_blamed_by(cluster: ClusterState, alerts: Iterable[str]) -> dict[str, list[str]]:
    """For each alert, the devices that it reports failed."""
    devices: dict[str, list[str]] = {alert: [] for alert in alerts}
    for device in cluster.devices.values() if devices else ():
        for blame in device.blames:
            if blame.by in devices:
                devices[blame.by].append(device.id)
    return devices


def _key(name: str) -> str:
    return name.lower().replace(".", "-")


def _bare(host: str) -> str:
    """Without the port that an exporter listens on."""
    address = split_address(host)
    return address[0] if address else host.strip("[]")
