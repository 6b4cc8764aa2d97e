"""Jobs of replicas under torchft, and their members, for the tests of this folder."""

from __future__ import annotations

from tests.core.site import JOB, Site
from torchloom.core.events import LighthouseBeatReceived, LinkOpened, ReportReceived
from torchloom.core.state.run_states import Run
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Torchft
from torchloom.protocol.lighthouse import Evict, LighthouseBeat
from torchloom.protocol.operator import Done
from torchloom.protocol.rank import Hello, Joined
from torchloom.protocol.records import MembersEvicted, Record


def group(replicas: int = 2, **more: object) -> Site:
    site = Site(cores=16)
    done = site.submit(torchft=Torchft(replicas=replicas, **more), per_node=1)  # type: ignore[arg-type]
    assert isinstance(done, Done)
    site.settle(1.0)
    return site


def run_of(site: Site, part: object) -> Run:
    return site.loom.cluster.runs.by_name[f"{JOB}:{part}"]


def phases(site: Site) -> dict[str, str]:
    return {name.rpartition(":")[2]: run.phase.value for name, run in site.loom.cluster.runs.by_name.items()}


def member(number: int, life: int = 1) -> str:
    return f"{JOB}_{number}:life-{life}"


def join(site: Site, number: int, life: int = 1) -> RankId:
    """The rank of a replica attaches, and says who it is in torchft."""
    run = run_of(site, number)
    rank, place = run.rank(0), run.places[0]
    site.loom.happen(LinkOpened(rank, place.incarnation, "link"))
    site.loom.happen(ReportReceived(rank, Hello(incarnation=place.incarnation, node=place.node, pid=1, devices=())))
    site.loom.happen(ReportReceived(rank, Joined(incarnation=place.incarnation, member=member(number, life))))
    return rank


def shine(site: Site, *members: str, evicted: tuple[str, ...] = (), quorum: int = 1) -> tuple[tuple[str, Evict], ...]:
    """The lighthouse speaks; what it is told."""
    beat = LighthouseBeat(incarnation="0" * 24, address="n1:1", quorum=quorum, members=members, evicted=evicted)
    site.loom.cluster.runtime.hear_lighthouse(JOB, beat)
    return site.loom.happen(LighthouseBeatReceived(JOB)).evictions


def records(site: Site, kind: type[Record]) -> list[Record]:
    return [record for _, some in site.loom.log for record in some if isinstance(record, kind)]


def evicted(site: Site) -> list[tuple[str, ...]]:
    return [record.members for record in records(site, MembersEvicted) if isinstance(record, MembersEvicted)]


def outside(lighthouse: bool, *members: str) -> Site:
    """Replicas that somebody else has started."""
    site = Site()
    for number, name in enumerate(members):
        rank = RankId("theirs", f"r{number}", 0)
        site.loom.join(rank, number + 1, devices=(f"GPU-{number}",))
        if name:
            life = site.loom.cluster.ranks[rank].incarnation
            site.loom.happen(ReportReceived(rank, Joined(incarnation=life, member=name)))
    if lighthouse:
        site.loom.cluster.runtime.hear_lighthouse("theirs", LighthouseBeat(incarnation="0" * 24, address="a:1"))
    return site
