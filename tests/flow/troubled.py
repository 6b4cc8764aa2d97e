"""A training that gets into trouble when it is told to, and what is known of it at the control plane.

TROUBLED trains as GLOO does, to the same bits (`trained`), and obeys a file `do-N` at the beginning of its next step:

    gil         C code waits for ever and does not let go of the interpreter
    spin S      the same, but it computes, and ends after about S seconds
    sleep       forward sleeps for ever
    quiet S     forward sleeps for S seconds
    eval S      it says that it evaluates, and takes S seconds for it
    gc M        a collection of M million objects that hold each other
    slow, well  its own work takes three times as long from now on; as long as before again
    nan         the loss of this step is no number; which step that was stands in `nan-N`
    ramp S      its memory grows by 60 MB a second for S seconds, to 2 GB at most; then it is given back
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from tests.flow.faults import Run, Up
from tests.flow.records import codes, of_incident, ranks_with_stacks
from tests.flow.scripts import _BOTH, TOGETHER
from torchloom.bus.weaver_client import WeaverClient
from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.errors import TorchLoomError
from torchloom.protocol.records import Record
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import IncidentView

LEARNT = 200
"""Steps of a life after which it is known how long its steps take: some beats, each a second."""
PATIENCE = 120.0
"""Seconds within which what is wrong must be known, on a machine that has much else to do."""
TROUBLES = frozenset(KINDS)
MILD = frozenset({"slowdown", "straggler", "overdue", "starved"})
"""What a machine that has much else to do does to a training. It is told, and nobody is ended for it."""
TROUBLED = (
    _BOTH
    + TOGETHER
    + """
import ctypes, gc, hashlib
import torch
import torch.distributed as dist
import torchloom

MB = 1 << 20

def ordered():
    order = folder / f"do-{rank}"
    if not order.exists():
        return "", 0.0
    what, _, amount = order.read_text().partition(" ")
    order.unlink()
    return what, float(amount or 0)

def hold_the_interpreter():
    nothing, _ = os.pipe()
    ctypes.PyDLL(None).read(nothing, ctypes.create_string_buffer(1), 1)

def compute_and_hold_the_interpreter(seconds):
    began = time.perf_counter()
    sum(range(10**6))
    sum(range(int(10**6 * seconds / (time.perf_counter() - began))))  # one call: nobody else gets in between

def collect(millions):
    made = [[] for _ in range(int(millions * 10**6))]
    for one in made:
        one.append(one)
    del made, one
    gc.collect()

def forward(batch, what, amount):
    if what == "gil":
        hold_the_interpreter()
    while what == "sleep":
        time.sleep(1)
    if what == "quiet":
        time.sleep(amount)
    if what == "spin":
        compute_and_hold_the_interpreter(amount)
    if what == "gc":
        collect(amount)
    loss = model(batch).square().mean()
    return loss * float("nan") if what == "nan" else loss

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
checkpoints = torchloom.Checkpoints(folder / "kept", every=5, keep=50)
state = {"model": model}
first = checkpoints.resume(state)
live(first)
work, hoard, growing_until = 0.02, [], 0.0
with torchloom.attach() as loom:
    for step in range(first + 1, steps + 1):
        what, amount = ordered()
        if what == "nan":
            (folder / f"nan-{rank}").write_text(str(step))
        if what in {"slow", "well"}:
            work = 0.06 if what == "slow" else 0.02
        if what == "ramp":
            growing_from, growing_until = time.monotonic(), time.monotonic() + amount
        if what == "eval":
            with loom.phase("eval"):
                time.sleep(amount)
        now = time.monotonic()
        if now < growing_until:
            while len(hoard) < min(2000, 60 * (now - growing_from)):
                hoard.append(b"x" * MB)
        else:
            hoard.clear()
        chance = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        loss = forward(torch.randn(4, 8, generator=chance), what, amount)
        model.zero_grad()
        loss.backward()
        norm = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
        time.sleep(work)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.01 * parameter.grad / dist.get_world_size()
        checkpoints.save(step, state)
        loom.step(step=step, loss=loss, grad_norm=norm)
        note(step)
        if loom.stopping or is_last():
            break
checkpoints.close()
end(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
dist.barrier()
dist.destroy_process_group()
"""
)


class Told:
    """What the control plane knows of one run."""

    def __init__(self, run: Run, up: Up) -> None:
        self.run = run
        self.up = up
        self._latest: list[IncidentView] = []

    def incidents(self, *kinds: str) -> list[IncidentView]:
        """Of these kinds, or of any; the oldest first. While no weaver answers, as they were last.

        That a link was lost and came back is none: a rank that holds its interpreter for some seconds loses it.
        """

        async def look() -> list[IncidentView]:
            async with WeaverClient(self.up.settings, Role.VIEWER, timeout=10.0, connect_timeout=10.0) as weaver:
                return [i for i in (await weaver.cluster(most=0)).incidents if i.job == self.run.job]

        with contextlib.suppress(TorchLoomError):
            self._latest = sorted(asyncio.run(look()), key=lambda incident: int(incident.id[1:]))
        return [incident for incident in self._latest if incident.kind in (kinds or TROUBLES)]

    def grave(self) -> list[IncidentView]:
        """Without what a busy machine does: it is mild, or goes on by itself."""
        others = [incident for incident in self.incidents() if incident.kind not in MILD]
        return [incident for incident in others if not self.went_on_by_itself(incident)]

    def until(self, wanted: Callable[[IncidentView], bool], seconds: float = PATIENCE) -> IncidentView:
        """The first incident of the run that is as wanted, as soon as there is one."""
        found: list[IncidentView] = []

        def there() -> bool:
            found[:] = [incident for incident in self.incidents() if wanted(incident)]
            return bool(found)

        try:
            self.run.until(there, seconds)
        except AssertionError as error:
            known = "\n".join(f"{i.id} {i.about}: {i.decision}; {i.outcome}; {i.evidence}" for i in self._latest)
            raise AssertionError(f"{error}\nincidents:\n{known or 'none'}") from None
        return found[0]

    def until_learnt(self, attempt: int = 1, further: int = LEARNT) -> None:
        """All ranks of this attempt run, and it is known how."""

        def there() -> bool:
            firsts = {life["rank"]: life["first"] for life in self.run.lives() if life["attempt"] == attempt}
            return len(firsts) == self.run.ranks and all(self.run.step(r) >= firsts[r] + further for r in firsts)

        self.run.until(there, PATIENCE)

    def records(self) -> list[Record]:
        """What the log holds of the run, where it names it."""
        return [record for record in self.all_records() if getattr(record, "job", "") == self.run.job]

    def all_records(self) -> list[Record]:
        """Of every run at this control plane."""

        return self.up.records()

    def codes(self, incident: IncidentView) -> set[str]:
        """Of all that was recorded of an incident."""
        return codes(*of_incident(self.all_records(), incident.id))

    def outcome(self, incident: IncidentView) -> set[str]:
        """The codes of what became of it."""
        return codes(*(getattr(record, "outcome", "") for record in of_incident(self.all_records(), incident.id)))

    def went_on_by_itself(self, incident: IncidentView) -> bool:
        return bool(incident.outcome) and "went_on_by_itself" in self.outcome(incident)

    def shows_stacks(self, incident: IncidentView) -> bool:
        """Whether it holds where each rank was."""
        return set(range(self.run.ranks)) <= ranks_with_stacks(self.all_records(), incident.id)


def blames(incident: IncidentView, kind: str, rank: int) -> bool:
    """Whether it is of this kind and names this rank and no other."""
    return incident.kind == kind and incident.about.rank is not None and incident.about.rank.rank == rank
