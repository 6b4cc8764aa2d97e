"""Ranks forked from a supervisor that has imported torch: they train, load data, draw their own numbers, and meet."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.agent.harness import SupervisorHarness
from torchloom.agent.supervisor.protocol import Begun
from torchloom.protocol.phrase import phrase


async def test_torch_is_there_already_and_computes(torch_harness: SupervisorHarness) -> None:
    torch_harness.script("""
import sys
print("torch" in sys.modules)
import torch
model = torch.nn.Linear(64, 64)
loss = model(torch.randn(512, 64)).square().sum()
loss.backward()
print(bool(model.weight.grad.isfinite().all()), torch.get_num_threads())
""")
    life = await torch_harness.live("train.py", warm=True)
    assert life.end == (0, None, "True\nTrue 1\n", "")


async def test_loaders_work_forked_and_spawned(torch_harness: SupervisorHarness) -> None:
    torch_harness.script("""
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i * i)
if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=context)
        print([batch.tolist() for batch in loader])
""")
    life = await torch_harness.live("train.py", warm=True)
    assert life.end == (0, None, "[[0, 1, 4, 9], [16, 25, 36, 49]]\n" * 2, "")


async def test_chance_differs_between_ranks_unless_seeded(torch_harness: SupervisorHarness) -> None:
    torch_harness.script("""
import random, multiprocessing, uuid, tempfile, numpy, torch
print(random.random(), numpy.random.random(), torch.rand(1).item(), torch.initial_seed(), uuid.uuid4(),
      multiprocessing.current_process().authkey.hex(), tempfile.mktemp())
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
print(random.random(), numpy.random.random(), torch.rand(1).item())
""")
    lives = await asyncio.gather(*(torch_harness.live("train.py", warm=True) for _ in range(2)))
    (free, seeded), (other, other_seeded) = (life.out.splitlines() for life in lives)
    assert all(mine != theirs for mine, theirs in zip(free.split(), other.split(), strict=True))
    assert seeded == other_seeded


async def test_two_ranks_meet_and_reduce(torch_harness: SupervisorHarness) -> None:
    torch_harness.script("""
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(x.tolist(), os.environ["LOCAL_RANK"])
dist.destroy_process_group()
""")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    lives = await asyncio.gather(
        *(
            torch_harness.live("train.py", warm=True, env=meeting | {"RANK": str(n), "LOCAL_RANK": str(n)})
            for n in range(2)
        )
    )
    assert [life.end[:3] for life in lives] == [(0, None, f"[3.0, 3.0, 3.0] {n}\n") for n in range(2)]


async def test_a_rank_cannot_have_other_thread_counts_than_its_supervisor(torch_harness: SupervisorHarness) -> None:
    torch_harness.script("import os, torch\nprint(torch.get_num_threads())")
    begin = torch_harness.order("train.py", warm=True, env={"OMP_NUM_THREADS": "2"})
    begun = await torch_harness.link.begin(begin)
    assert isinstance(begun, Begun)
    assert not begun.warm
    assert begun.why_cold == phrase("environment_differs", name="OMP_NUM_THREADS")
    assert (await torch_harness.end_of(begin.key)).code == 0
    assert torch_harness.text(begin.stdout) == "2\n"


async def test_the_error_torch_records_is_found(torch_harness: SupervisorHarness) -> None:
    from torchloom.agent.monitor.exit_evidence import cause_of, how_it_ended, last_lines, raised, recorded_error

    torch_harness.script("""
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main(): raise ValueError("diverged at step 7")
main()
""")
    file = torch_harness.home / "error.json"
    begin = torch_harness.order("train.py", warm=True, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    await torch_harness.begin(begin)
    ended = await torch_harness.end_of(begin.key)
    assert recorded_error(file) == raised(last_lines(begin.stderr)) == "ValueError: diverged at step 7"
    assert how_it_ended(ended) == phrase("exit_code", status=1)
    assert cause_of(ended, recorded_error(file)) == ("exception", "ValueError: diverged at step 7")


@pytest.mark.parametrize("warm", [True, False])
async def test_a_rank_of_ours_has_its_optimizer_steps_counted(torch_harness: SupervisorHarness, warm: bool) -> None:
    torch_harness.script("""
import torch
from torch.optim import optimizer
from torchloom.threadlet.process.step_counter import _counter
model = torch.nn.Linear(1, 1)
print(len(optimizer._global_optimizer_post_hooks), _counter.over)
torch.optim.SGD(model.parameters()).step()
print(optimizer.__spec__.loader is optimizer.__loader__, type(optimizer.__loader__).__name__, _counter.over)
""")
    env = {"TORCHLOOM_LAUNCHER": "loom", "TORCHLOOM_OFF": "1"}
    life = await torch_harness.live("train.py", warm=warm, env=env)
    assert life.begun.warm == warm
    assert life.end == (0, None, "1 False\nTrue SourceFileLoader False\n", "")
