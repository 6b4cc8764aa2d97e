"""The public class of the rank's side: attach() at the start, step() at the end of each step.

    loom = torchloom.attach()
    for inputs, targets in loader:
        loss = train(inputs, targets)
        loom.step(loss=loss, samples=len(inputs))

attach() raises BadInput for invalid names, and so does what describes the training before it begins, such as watch().
After that nothing here raises. step() waits in two cases only (see its docstring), and the goodbye waits briefly, or
until a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from torchloom.checkpoints import threadlet_bridge
from torchloom.data import training_loader
from torchloom.protocol.rank import Value
from torchloom.settings import Settings, usable_settings
from torchloom.shared.incarnation import first_incarnation
from torchloom.threadlet import process_hooks
from torchloom.threadlet.changes.knob import INTERVAL, Knob, log_level_knob, make_knob
from torchloom.threadlet.changes.loader_knobs import BatchSizeAt, batch_size_knob, check_watched, loaders_knob
from torchloom.threadlet.changes.optimizer_knobs import optimizer_knobs
from torchloom.threadlet.changes.skipped_batches import SkippedBatches, batches, resumed_step
from torchloom.threadlet.changes.step_boundary import StepBoundary
from torchloom.threadlet.connection.link import Link
from torchloom.threadlet.connection.rank_state import RankState
from torchloom.threadlet.metrics.liveness import DATA, LivenessPageWriter, check_phase
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.process import step_counter
from torchloom.threadlet.process.exit_reason import Ending, ending_of
from torchloom.threadlet.process.identity import Host, Names, check_devices, find_names

logger = logging.getLogger("torchloom")
T = TypeVar("T")
FINISH_SECONDS = 30.0
"""Longest a goodbye waits for a checkpoint that is being written."""


class StepSource(Protocol):
    """Counts the steps of the training in place of step(), as torchft's commits do. Its methods never raise."""

    def note(self, loss: Any, samples: Any, metrics: dict[str, Any]) -> None:
        """What the script reports about the latest step."""

    def attend(self) -> None:
        """The script asks for whatever is due after the latest step."""

    def end(self) -> None:
        """The threadlet has said goodbye."""


class Threadlet:
    """A training process's side of torchLoom. Make it with attach()."""

    def __init__(self, names: Names, boundary: StepBoundary) -> None:
        self.job, self.replica, self.rank = names.rank
        self.world_size = names.world_size
        self._names = names
        self._meter: Meter | None = None
        self._link: Link | None = None
        """Both None for a threadlet that is off or has said goodbye."""
        self._boundary = boundary
        self._participant = boundary.participant
        self._skipping: SkippedBatches | None = None
        self._step_source: StepSource | None = None

    def step(self, /, loss: Any = None, samples: Any = None, *, step: int | None = None, **metrics: Any) -> None:
        """Report that a training step is finished. Never raises; call it from one thread.

        It writes to memory and returns. What all ranks have agreed to do at this step (a change of knobs, a checkpoint)
        is done here. It waits in two cases: while such an agreement has no verdict yet, for at most
        `TORCHLOOM_VERDICT_SECONDS`; and from `loom pause` to `loom resume`, or until there was no connection for
        `TORCHLOOM_PAUSE_ORPHAN_SECONDS`.

        `loss` and metrics may be tensors: another thread reads them later. `samples` is the number of samples in this
        step. `step` sets the step number, for example after a resume; otherwise steps are counted.
        """
        meter = self._meter
        if self._step_source is not None:
            self._step_source.note(loss, samples, metrics)
        elif meter is not None and (number := meter.step(loss, samples, step, metrics)) >= self._participant.due_step:
            self._boundary.on_step(number)

    def _count_earlier(self, steps: int) -> None:
        """Add steps that a script which has not attached made before this threadlet existed."""
        if self._meter is not None:
            self._meter.resume_at(self._meter.step_number + steps)
            self._meter.start(threading.main_thread().ident or 0)  # probably; the next step corrects it

    @property
    def stopping(self) -> bool:
        """Whether an operator has asked the training to stop after this step."""
        if self._step_source is not None:
            self._step_source.attend()
        return self._boundary.stopping

    @property
    def step_number(self) -> int:
        """Steps finished so far."""
        return 0 if self._meter is None else self._meter.step_number

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark work other than training: `with loom.phase("eval"):`. Its time is not counted as part of a step.

        Phases may be nested. Use "data" around your own loader: it counts as waiting for the next batch. Call it on the
        training thread; on other threads it has no effect.
        """
        check_phase(name)
        link = self._link
        return contextlib.nullcontext() if link is None else link.state.liveness.within(name)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of the training loader: `for batch in loom.batches(loader):`.

        Batches that a rollback leaves out are dropped, the same ones on all ranks. Waiting for a batch counts as
        waiting for data, whatever the type of the loader.
        """
        if self._meter is None:
            return iter(loader)
        return batches(
            loader, lambda: self.phase(DATA), lambda: self.step_number, self._skipping, self._batches_of_a_step
        )

    def _batches_of_a_step(self) -> int:
        knob = self._boundary.knobs.get("accumulation")
        return int(knob.value) if knob is not None else 1

    # ── what may be changed ──────────────────────────────────────────────────────────────────────────────────────────

    def knob(self, name: str, value: Any = None, **about: Any) -> Knob:
        """Let operators change a value while the job runs. Read it as `.value`; it changes only inside step().

        `value` is the initial value; or pass functions `get` and `set` that read and write it where it is kept. `type`,
        `low`, `high`, `choices`, `unit` and `help` describe valid values; `per="rank"` lets it differ between ranks.
        """
        return self._boundary.add(make_knob(name, value, **about))

    def watch(
        self,
        what: Any,
        scheduler: Any = None,
        name: str = "",
        *,
        batch_size_at: BatchSizeAt = "batch",
    ) -> None:
        """Make knobs of an optimizer's lr, momentum, betas and weight decay. A scheduler does not undo a change of lr.

        With several optimizers, `name` distinguishes their knobs: with "critic" it is `critic:lr`.

        Given the ElasticLoader that feeds the training, make knobs of its loader processes and its batch size. For a
        trainer that reads the length of a loader once an epoch, let a new size wait for the next: `batch_size_at`.
        """
        check_watched(what, batch_size_at)
        if not hasattr(what, "change_batch_size"):
            for knob in optimizer_knobs(what, scheduler, name):
                self._boundary.add(knob)
            return
        training_loader.set_loader(what)
        if not what.fixed_batch_size:
            self._boundary.add(batch_size_knob(what, batch_size_at))

    def use_loader(self, loader: training_loader.LoaderPort) -> None:
        """This ElasticLoader feeds the training: let operators change the number of its processes."""
        if not self._boundary.counted:
            self._boundary.replace(loaders_knob(loader))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return self._boundary.knobs

    def clip(self, value: float = 1.0) -> Knob:
        """A knob for the norm at which gradients are clipped: `clip_grad_norm_(parameters, clip.value)`."""
        return self.knob("clip", float(value), low=0.0, help="gradient norm to clip at")

    def accumulation(self, value: int = 1) -> Knob:
        """A knob for the number of batches per optimizer step."""
        return self.knob("accumulation", int(value), low=1, help="batches for each optimizer step", role="accumulation")

    def log_interval(self, value: int = 10) -> Knob:
        return self.knob("log_interval", int(value), low=1, unit="steps", help="steps between two log lines")

    def checkpoint_interval(self, value: int = 1000) -> Knob:
        return self.knob(INTERVAL, int(value), low=1, unit="steps", help="steps between two checkpoints")

    def on_checkpoint(self, save: Callable[[int], object]) -> Callable[[int], object]:
        """Call `save` when an operator asks for a checkpoint, on every rank at the same step. It returns the path."""
        self._boundary.save = save
        self._boundary.offer()
        return save

    def resume_at(self, step: int) -> None:
        """Continue after this step of an earlier run. Changes made up to that step take effect at once."""
        self._boundary.resume_at(step)

    def state_dict(self) -> dict[str, Any]:
        """The current values and the changes that set them, for your checkpoint."""
        return {} if self._boundary.counted else self._boundary.state_dict()  # a counted step is not the script's own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._boundary.load_state_dict(state)

    # ── the checkpoints of this process ──────────────────────────────────────────────────────────────────────────────

    def keep(self, kept: threadlet_bridge.CheckpointPort) -> None:
        """Offer these checkpoints to operators, unless the script has registered a function of its own."""
        try:
            self._boundary.add_checkpoints(kept)
        except Exception as error:  # noqa: BLE001  training continues, and so do its checkpoints
            logger.warning("torchLoom: the checkpoints cannot be offered: %s", error)

    def tell(self, news: threadlet_bridge.CheckpointNews) -> None:
        """Report a checkpoint to the weaver: now, or when the link is back."""
        with contextlib.suppress(Exception):
            if self._link is not None:
                self._link.tell(news)

    def values(self) -> dict[str, Value]:
        """The current value of each knob."""
        return self._boundary.values()

    # ── beginning and end ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.up

    @property
    def incarnation(self) -> str:
        """The incarnation of the rank; empty for a threadlet that is off."""
        return "" if self._link is None else self._link.state.incarnation

    def close(self) -> None:
        """Say goodbye. The rest of the training is not reported."""
        self.end(Ending())

    def end(self, ending: Ending) -> None:
        """Say goodbye for this reason, after pending saves are written. Only the first goodbye counts."""
        if self._link is None:
            return
        try:
            with contextlib.suppress(Exception):
                self._link.state.liveness.leave()
                threadlet_bridge.wait_for_checkpoints(FINISH_SECONDS)
        finally:  # also after a Ctrl-C during the wait
            link, self._link, self._meter = self._link, None, None
            if link is not None:
                threadlet_bridge.unregister_threadlet(self)
                training_loader.unregister_threadlet(self)
                process_hooks.unregister(self._names.rank)
                step_source, self._step_source = self._step_source, None
                if step_source is not None:
                    step_source.end()
                link.goodbye(ending)
                link.state.liveness.end()

    def _hand_over(self, devices: tuple[str, ...] | None) -> bool:
        """Hand over to the script, which attaches after its steps were counted. False if they were not counted."""
        link, meter = self._link, self._meter
        if link is None or meter is None or not self._boundary.counted:
            return False
        meter.resume_at(0)
        self._boundary.counted = False
        self._boundary.add(log_level_knob())
        link.state.devices = devices or link.state.devices
        link.introduce()
        threadlet_bridge.unregister_threadlet(self)
        threadlet_bridge.register_threadlet(self)  # its checkpoints can be offered now
        training_loader.unregister_threadlet(self)
        training_loader.register_threadlet(self)
        return True

    def disown(self) -> None:
        """In a forked child: the rank is the parent's. Send nothing, measure nothing."""
        link, self._link, self._meter = self._link, None, None
        self._step_source = None
        threadlet_bridge.unregister_threadlet(self)
        training_loader.unregister_threadlet(self)
        if link is not None:
            link.disown()

    def __enter__(self) -> Threadlet:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(ending_of(error))

    def __repr__(self) -> str:
        return f"<Threadlet {self._names.rank} {'connected' if self.connected else 'not connected'}>"


def attach(
    job: str | None = None,
    replica: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    devices: Iterable[str] | None = None,
    settings: Settings | None = None,
) -> Threadlet:
    """Attach this process as a rank. Missing arguments are taken from the launcher's environment, or chosen here."""
    host = Host(socket.gethostname(), os.getpid(), sys.argv[0] if getattr(sys, "argv", None) else "")
    names = find_names(os.environ, host, job=job, replica=replica, rank=rank, world_size=world_size)
    device_ids = check_devices(devices)
    for warning in names.warnings:
        logger.warning("torchLoom: %s", warning)
    settings = settings or usable_settings(os.environ)
    step_counter.retire()
    existing = process_hooks.live.get(names.rank)
    if isinstance(existing, Threadlet):
        if not existing._hand_over(device_ids):
            logger.warning("torchLoom: %s is attached already; this is the same threadlet", names.rank)
        return existing
    threadlet = _start_threadlet(names, settings, device_ids)
    if threadlet._link is not None:
        _announce(names)
        # Briefly, so that the first step has the current knob values; not at all if there is no server.
        threadlet._link.state.started.wait(settings.welcome_seconds)
    return threadlet


def attach_counted(environ: Mapping[str, str]) -> Threadlet:
    """Attach a process whose script has not attached itself. Prints nothing and never blocks."""
    names = find_names(environ, Host(socket.gethostname(), os.getpid(), ""))
    threadlet = _start_threadlet(names, usable_settings(environ), None, counted=True)
    if threadlet._meter is not None:
        threadlet._meter.resume_at(resumed_step(environ))
    return threadlet


def current() -> Threadlet | None:
    """The one threadlet that the script of this process has attached, if it still counts its own steps."""
    own = [
        threadlet
        for threadlet in process_hooks.live.values()
        if isinstance(threadlet, Threadlet) and threadlet._step_source is None and not threadlet._boundary.counted
    ]
    return own[0] if len(own) == 1 else None


def follow(threadlet: Threadlet, step_source: Callable[[Meter, StepBoundary, Link], StepSource]) -> None:
    """Let a step source count the steps, unless the threadlet is off; step() then only reports values."""
    if threadlet._meter is not None and threadlet._link is not None:
        threadlet._step_source = step_source(threadlet._meter, threadlet._boundary, threadlet._link)


def _start_threadlet(
    names: Names, settings: Settings, devices: tuple[str, ...] | None, counted: bool = False
) -> Threadlet:
    """A threadlet with its link started; without a link if it is off, in a child process, or cannot be started."""
    meter = Meter()
    boundary = StepBoundary(first_incarnation(os.environ.get("TORCHLOOM_INCARNATION", "")), meter, settings)
    threadlet = Threadlet(names, boundary)
    if settings.off or _is_bystander(names):
        return threadlet
    liveness = LivenessPageWriter(meter)
    try:
        link = Link(RankState(names, boundary, liveness, settings.beat_seconds, devices), settings)
        boundary.counted = counted
        if not counted:
            boundary.add(log_level_knob())
        link.start()
    except Exception as error:  # noqa: BLE001  no thread, no descriptor left: training starts anyway
        logger.warning("torchLoom: cannot attach, training continues without it: %r", error)
        liveness.end()
        return threadlet
    threadlet._meter, threadlet._link = meter, link
    threadlet._skipping = SkippedBatches.from_environ(os.environ)
    process_hooks.register(names.rank, threadlet)
    threadlet_bridge.register_threadlet(threadlet)
    training_loader.register_threadlet(threadlet)
    return threadlet


def _is_bystander(names: Names) -> bool:
    """Whether this process is a child of the rank, which must not report in its name."""
    if names.rank in process_hooks.inherited:
        logger.warning("torchLoom: %s is the parent process's rank; this forked child stays silent", names.rank)
        return True
    # A spawned DataLoader process runs the top level of the script again before it starts its own work.
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and bool(getattr(processes.current_process(), "_inheriting", False))


def _announce(names: Names) -> None:
    line = f"torchLoom: this is rank {names.rank.rank} of {names.rank.replica_id}"
    logger.info(line)
    if names.chosen and names.rank.rank == 0 and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal is no reason to stop
            print(f"{line} (name it with attach(job, replica) or TORCHLOOM_JOB, TORCHLOOM_REPLICA)", file=sys.stderr)
