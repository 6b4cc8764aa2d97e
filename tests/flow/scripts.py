"""Two scripts that train and can be hit: GLOO averages gradients over its ranks, LIGHT starts in a blink.

LIGHT needs no torch; its state is a chain of hashes. Both write down each life (`lives`), the step they are at
(`step-N`) and what they end with (`end-N`), and do what a file `do-N` tells them: exit, raise, eat memory, start a
child, or hang and be deaf to SIGTERM. A life of LIGHT makes 15 steps and then waits for the file `finish`, so that
whoever hits it is never too late. GLOO goes on until it has made its steps, or finds the file `last`: its ranks agree
on the step after which they end.
"""

from __future__ import annotations

import hashlib

_BOTH = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1

def live(first):
    port = int(os.environ["MASTER_PORT"])
    life = {"attempt": attempt, "rank": rank, "pid": os.getpid(), "first": first, "port": port}
    with (folder / "lives").open("a") as lives:
        lives.write(json.dumps(life) + "\\n")

def note(step):
    # Whole at once, whoever looks and whenever this is killed.
    (folder / f"noting-{rank}").write_text(str(step))
    (folder / f"noting-{rank}").rename(folder / f"step-{rank}")

def obey(step):
    note(step)
    order = folder / f"do-{rank}"
    if not order.exists():
        return
    told = order.read_text()
    if told:
        order.unlink()
    if told == "exit":
        os._exit(1)
    if told == "raise":
        raise ValueError("as it was told")
    if told == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"deaf-{rank}").touch()
        while True:
            time.sleep(1)
    if told == "child":
        child = subprocess.Popen(["sleep", "600"])
        (folder / f"child-{rank}").write_text(str(child.pid))
    if told == "eat":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 8)

def end(value):
    (folder / f"end-{rank}").write_text(value)
"""
LIGHT = (
    _BOTH
    + """
import hashlib, zipfile

kept, value, first = folder / "kept", "", 0
resume = os.environ["TORCHLOOM_RESUME_FROM"]
if resume:
    with zipfile.ZipFile(resume) as archive:
        first, value = json.loads(archive.read("a/data.pkl"))
live(first)
kept.mkdir(exist_ok=True)
for step in range(first + 1, steps + 1):
    time.sleep(0.01)
    value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
    if rank == 0 and step % 5 == 0:
        beside = folder / "beside"
        with zipfile.ZipFile(beside, "w") as archive:
            archive.writestr("a/data.pkl", json.dumps([step, value]))
        beside.rename(kept / f"checkpoint_step_{step}.pt")
    obey(step)
    while step >= first + 15 and not (folder / "finish").exists():
        time.sleep(0.01)
        obey(step)
end(value)
"""
)
TOGETHER = """
def is_last():
    # Whether one of the ranks was told to end: all know it after the same step.
    told = torch.tensor(float((folder / "last").exists()))
    dist.all_reduce(told)
    return bool(told)
"""
GLOO = (
    _BOTH
    + TOGETHER
    + """
import hashlib
import torch
import torch.distributed as dist
import torchloom

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
checkpoints = torchloom.Checkpoints(folder / "kept", every=5, keep=4)
state = {"model": model}
first = checkpoints.resume(state)
live(first)
with torchloom.attach() as loom:
    for step in range(first + 1, steps + 1):
        chance = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        loss = model(torch.randn(4, 8, generator=chance)).square().mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.01 * parameter.grad / dist.get_world_size()
        time.sleep(0.01)
        checkpoints.save(step, state)
        loom.step(step=step, loss=loss)
        obey(step)
        if loom.stopping or is_last():
            break
checkpoints.close()
end(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
dist.barrier()
dist.destroy_process_group()
"""
)


def trained(steps: int, ranks: int = 2) -> str:
    """What GLOO ends with if nothing disturbs it: the same sums, in one process."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    for step in range(1, steps + 1):
        model.zero_grad()
        for rank in range(ranks):
            chance = torch.Generator().manual_seed(step * ranks + rank)
            model(torch.randn(4, 8, generator=chance)).square().mean().backward()  # adds up
        for parameter in model.parameters():
            parameter.data -= 0.01 * parameter.grad / ranks
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def chain(steps: int) -> str:
    """What LIGHT ends with if nothing disturbs it."""
    value = ""
    for step in range(1, steps + 1):
        value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
    return value
