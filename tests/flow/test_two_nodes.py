"""Two machines: each node a network namespace with its own address, joined to a control plane on the host with TLS.

What this shows and one machine cannot: ranks find each other over a network, output comes from where it was printed,
and a cable may be pulled.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flow.agents import needs_nodes
from tests.flow.namespaces import NODES, Site, two_nodes, why_not
from tests.flow.records import BY_SIGKILL, KILLED, phrases, rank_failed
from torchloom.protocol.phrase import phrase

STEPS = 100
TRAIN = f"""
import hashlib, os, sys, time
import torch, torch.distributed as dist
import torchloom

folder, resume = sys.argv[1], os.environ["TORCHLOOM_RESUME_FROM"]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)  # no optimizer, plain files: other imports would take longer than all the rest
first = 0
if resume:
    kept = torch.load(resume)
    first = kept["step"]
    model.load_state_dict(kept["model"])
print(f"rank {{rank}} goes on from {{first}}", flush=True)
with torchloom.attach() as loom:
    for step in range(first + 1, {STEPS} + 1):
        chance = torch.Generator().manual_seed(step * world + rank)
        model.zero_grad()
        model(torch.randn(4, 8, generator=chance)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.05 * parameter.grad
        loom.step()
        if rank == 0 and step % 20 == 0:
            torch.save({{"step": step, "model": model.state_dict()}}, f"{{folder}}/half")
            os.replace(f"{{folder}}/half", f"{{folder}}/checkpoint_step_{{step}}.pt")
        while step == {STEPS // 2} and not os.path.exists(f"{{folder}}/go on"):
            time.sleep(0.01)  # whoever hits it is never too late
content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"rank {{rank}} ends with {{hashlib.sha256(content).hexdigest()}}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if why := why_not():
        pytest.skip(why)
    with two_nodes(tmp_path_factory.mktemp("site")) as site:
        for node in NODES:
            site.begin_agent(node)
        site.until(lambda: {view.node for view in site.nodes()} == set(NODES), "two agents")
        yield site


def train(site: Site, job: str) -> Path:
    """Submit real training, a rank on each node; the folder of its checkpoints. Halfway it waits for `go on` there."""
    kept = site.folder / job
    kept.mkdir()
    (site.folder / "ddp.py").write_text(TRAIN)
    site.submit(job=job, script="ddp.py", args=[str(kept)], nnodes=2, checkpoint_dir=str(kept))
    return kept


def simulate(site: Site, job: str, **settings: Any) -> Path:
    """Submit ranks that only count; the folder they write into."""
    folder = site.folder / job
    folder.mkdir()
    site.submit(job=job, args=[str(folder), "100000"], **settings)
    return folder


def printed(site: Site, job: str, what: str) -> list[tuple[str, str]]:
    """What followed these words, and the rank that printed it."""
    shown = site.loom("logs", job)
    assert shown.returncode == 0, shown.stderr
    return sorted(re.findall(rf"\[(\d)\] rank \d {what} (\w+)", shown.stdout))


def over(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def calm(site: Site) -> Site:
    """After a run that nothing has disturbed."""
    (train(site, "calm") / "go on").touch()
    ended = site.loom("wait", "calm")
    assert ended.returncode == 0, ended.stderr + site.log()
    return site


def test_ranks_on_two_nodes_train_together_and_their_output_comes_from_both(calm: Site) -> None:
    assert {view.beat.host for view in calm.nodes()} == {calm.network.address(node) for node in NODES}
    assert all(any(calm.folder.glob(f"{node}/agents/{node}/jobs/calm/logs/**/rank-*.out")) for node in NODES)
    (first, digest), (second, same) = printed(calm, "calm", "ends with")
    assert (first, second) == ("0", "1")
    assert digest == same


def test_what_is_logged_with_tls_is_what_matters(calm: Site) -> None:
    log = (calm.folder / "started.log").read_text()
    assert "up at tls://" in log
    assert "asyncio" not in log
    assert "eof_received" not in log


@pytest.mark.long
def test_a_rank_killed_on_one_node_costs_no_bit(calm: Site) -> None:
    kept = train(calm, "hurt")
    calm.until((kept / f"checkpoint_step_{STEPS // 2 // 20 * 20}.pt").exists, "checkpoints")
    calm.until(lambda: 1 in calm.pids("node-b", "hurt"), "rank 1 on node-b")
    os.kill(calm.pids("node-b", "hurt")[1], signal.SIGKILL)
    (kept / "go on").touch()
    ended = calm.loom("wait", "hurt")
    assert ended.returncode == 0, ended.stderr + calm.log()
    assert f"1 restart ({rank_failed(1, BY_SIGKILL)})" in ended.stderr
    assert KILLED in phrases(*calm.records("hurt"))
    assert {int(step) >= 20 for _, step in printed(calm, "hurt", "goes on from")} == {True}
    assert printed(calm, "hurt", "ends with") == printed(calm, "calm", "ends with")


def test_ranks_outlive_the_agent_of_one_node_and_the_next_agent_has_them_again(site: Site) -> None:
    folder = simulate(site, "orphaned", nnodes=2)
    site.until(lambda: site.pids("node-a", "orphaned") and site.pids("node-b", "orphaned"), "ranks on both")
    before = site.pids("node-b", "orphaned")
    os.kill(site.agent("node-b"), signal.SIGKILL)
    site.start_agent("node-b")
    site.until(lambda: site.pids("node-b", "orphaned") == before, "the same ranks")
    assert psutil.pid_exists(before[1])
    (folder / "finish").touch()
    ended = site.loom("wait", "orphaned")
    assert ended.returncode == 0, ended.stderr
    assert "restart" not in ended.stderr


@pytest.mark.long
def test_what_a_cut_off_node_ran_goes_on_elsewhere_or_waits_and_what_it_still_runs_ends_when_it_is_back(
    site: Site,
) -> None:
    wide = simulate(site, "wide", nnodes=2)
    site.until(lambda: site.pids("node-a", "wide") and site.pids("node-b", "wide"), "wide on both nodes")
    site.loom("drain", "node-a")
    narrow = simulate(site, "narrow")
    site.until(lambda: site.pids("node-b", "narrow"), "narrow on node-b")
    site.loom("drain", "node-a", "--undo")
    lost = [*site.pids("node-b", "narrow").values(), *site.pids("node-b", "wide").values()]
    site.cut("node-b")
    try:
        site.until(lambda: site.pids("node-a", "narrow"), "narrow on node-a")
        count = next(len(view.beat.devices) or view.beat.cores for view in site.nodes() if view.node == "node-a")
        offers = [phrase("room_free", free=free, count=count, failed=None) for free in range(count + 1)]
        there = {needs_nodes(2, 1, node_a=offer, node_b=phrase("room_silent")) for offer in offers}
        site.until(lambda: site.waits_for("wide") in there, "wide waits")
        assert all(psutil.pid_exists(pid) for pid in lost)
    finally:
        site.mend("node-b")
    site.until(lambda: over(lost), "the old ranks end")
    site.until(lambda: len(site.pids("node-a", "wide") | site.pids("node-b", "wide")) == 2, "wide on both again")
    for job, folder in (("narrow", narrow), ("wide", wide)):
        (folder / "finish").touch()
        ended = site.loom("wait", job)
        assert ended.returncode == 0, ended.stderr
        assert ("agent_silent", {"node": "node-b"}) in phrases(*site.records(job))
