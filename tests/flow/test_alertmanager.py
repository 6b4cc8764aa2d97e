"""A GPU falls off the bus: exporter, Prometheus, Alertmanager, webhook, weaver. All real but the GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.flow.monitoring import Exporter, Monitoring, missing, monitoring
from tests.flow.plane import Plane, plane
from tests.flow.records import phrases
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.operator import Done, Recover
from torchloom.protocol.records import About, DeviceMarkedFailed
from torchloom.protocol.views import IncidentView
from torchloom.weaver.alert_webhook import read_token

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

BROKEN, WELL = "GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28", "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
SECONDS = 120.0


class Site:
    def __init__(self, up: Plane, exporter: Exporter, watching: Monitoring) -> None:
        self.up = up
        self.exporter = exporter
        self.watching = watching

    async def until_failed(self, *devices: str) -> None:
        async def so() -> bool:
            return {d.device for d in (await self.up.look()).devices if d.health == "failed"} == set(devices)

        try:
            await self.up.until(so, SECONDS, f"failed: {devices}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.watching.log()}") from None

    async def incident(self) -> IncidentView:
        (incident,) = await self.up.incidents()
        return incident


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """Two replicas on the GPU that will break, one on the other."""
    async with plane(tmp_path / "state") as up:
        for replica, device in (("a", BROKEN), ("b", BROKEN), ("c", WELL)):
            up.start_rank(replica, devices=device)
        for replica in ("a", "b", "c"):
            await up.until_beating(replica)
        where = (await up.look()).plane.ingress
        exporter = Exporter([BROKEN, WELL])
        with monitoring(tmp_path / "monitoring", exporter, where, read_token(up.settings)) as watching:
            yield Site(up, exporter, watching)


async def test_an_xid_fails_exactly_that_device_and_its_end_recovers_it(site: Site) -> None:
    site.exporter.xid[BROKEN] = 79
    await site.until_failed(BROKEN)
    incident = await site.incident()
    assert incident.about == About(device=BROKEN)
    assert incident.affected == (ReplicaId("job", "a"), ReplicaId("job", "b"))
    (failed,) = [record for record in await site.up.records() if isinstance(record, DeviceMarkedFailed)]
    assert failed.cause == "GpuXid: XID 79 on GPU 0 of gpu-host"
    assert incident.closed is None
    site.exporter.xid[BROKEN] = 0
    await site.until_failed()
    closed = await site.incident()
    assert ("source_says_works", {"source": "Alertmanager (GpuXid)"}) in phrases(*await site.up.records())
    assert closed.closed is not None


async def test_an_alert_is_not_lost_when_the_weaver_is_away_as_it_comes(site: Site) -> None:
    assert site.up.weaver is not None
    site.up.weaver.kill()
    site.up.weaver.wait()
    site.exporter.xid[BROKEN] = 48
    await site.up.until(site.watching.told_in_vain, SECONDS, "a post that nobody takes")
    site.up.start_weaver()
    await site.until_failed(BROKEN)


async def test_what_a_person_says_holds_while_the_alert_goes_on(site: Site) -> None:
    site.exporter.xid[BROKEN] = 79
    await site.until_failed(BROKEN)
    assert isinstance(await site.up.ask(Recover(device=BROKEN, operator="ada")), Done)
    site.exporter.xid[WELL] = 79  # the same group: both are told again
    await site.until_failed(WELL)
