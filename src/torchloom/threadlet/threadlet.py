"""The public face of a threadlet: attach() at the beginning, step() at the end of each step.

    loom = torchloom.attach()
    for batch in loader:
        loss = train(batch)
        loom.step(loss=loss, samples=len(batch))

attach() raises for names that cannot be meant. After that nothing here raises, and only the goodbye waits: briefly, or
for a checkpoint that is being written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from torchloom.checkpoints import attached
from torchloom.errors import BadInput, BadSetting
from torchloom.messages import Resumed, Saved, SaveFailed, Value, check_name
from torchloom.settings import Settings
from torchloom.threadlet import counting, hooks
from torchloom.threadlet.batches import Skipping, batches
from torchloom.threadlet.commits import Commits
from torchloom.threadlet.ending import Ending, ending_of
from torchloom.threadlet.helm import Helm
from torchloom.threadlet.incarnation import first_incarnation
from torchloom.threadlet.knob import INTERVAL, Knob, log_level_knob, make_knob
from torchloom.threadlet.link import Link
from torchloom.threadlet.meter import Meter
from torchloom.threadlet.names import Host, Names, find_names
from torchloom.threadlet.optimizers import optimizer_knobs
from torchloom.threadlet.phases import DATA, check_phase
from torchloom.threadlet.signs import Signs

logger = logging.getLogger("torchloom")
T = TypeVar("T")
MAX_DEVICES = 64
UNATTACHED = "its script does not call torchloom.attach()"
FINISH_SECONDS = 30.0
"""Longest a goodbye waits for a checkpoint that is being written."""


class Threadlet:
    """A training process's side of torchLoom. Make it with attach()."""

    def __init__(self, names: Names, meter: Meter, helm: Helm, link: Link | None) -> None:
        self.job, self.replica, self.rank = names.rank
        self.world_size = names.world_size
        self._names = names
        self._meter: Meter | None = meter
        self._helm = helm
        self._steering = helm.steering
        self._link = link
        self._skipping: Skipping | None = None
        self._commits: Commits | None = None
        if link is None:
            self._meter = None

    def step(self, /, loss: Any = None, samples: Any = None, *, step: int | None = None, **metrics: Any) -> None:
        """One training step is finished. Writes to memory, never waits, never raises; call it from one thread.

        `loss` and metrics may be tensors: they are read later, elsewhere. `samples` is how many this step trained on;
        `step` sets the step number, for example after a resume, otherwise steps are counted.
        """
        meter = self._meter
        if self._commits is not None:
            self._commits.note(loss, samples, metrics)
        elif meter is not None and (number := meter.step(loss, samples, step, metrics)) >= self._steering.boundary:
            self._helm.reach(number)

    @property
    def stopping(self) -> bool:
        """Whether the training was asked to stop after this step."""
        if self._commits is not None:
            self._commits.attend()
        return self._helm.stopping

    @property
    def step_number(self) -> int:
        """Steps finished so far."""
        return 0 if self._meter is None else self._meter.step_number

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say what is done other than training: `with loom.phase("eval"):`. The time inside is no step's.

        It may stand within another. For a loader of your own it is "data": that is waiting for the next batch. Call it
        on the thread that trains; elsewhere it changes nothing.
        """
        check_phase(name)
        link = self._link
        return contextlib.nullcontext() if link is None else link.signs.phases.within(name)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of the loader that you train on: `for batch in loom.batches(loader):`.

        Those that a rollback is to leave out are dropped, on all ranks alike. Waiting for one counts as waiting for
        data, whatever the loader is.
        """
        if self._meter is None:
            return iter(loader)
        return batches(
            loader, lambda: self.phase(DATA), lambda: self.step_number, self._skipping, self._batches_of_a_step
        )

    def _batches_of_a_step(self) -> int:
        knob = self._helm.knobs.get("accumulation")
        return int(knob.value) if knob is not None else 1

    # ── what may be changed ──────────────────────────────────────────────────────────────────────────────────────────

    def knob(self, name: str, value: Any = None, **about: Any) -> Knob:
        """Let a value be changed while the job runs. Read it as `.value`; it changes only inside step().

        `value` is what it begins with; or `get` and `set` are functions that reach it where it is. `type`, `low`,
        `high`, `choices`, `unit` and `help` say what it may be; `per="rank"` lets it differ between ranks.
        """
        return self._helm.add(make_knob(name, value, **about))

    def watch(self, optimizer: Any, scheduler: Any = None, name: str = "") -> None:
        """Offer lr, momentum, betas and weight decay of an optimizer. A change of lr survives the scheduler.

        Where there are several optimizers, `name` tells their knobs apart: with "critic" it is `critic:lr`.
        """
        for knob in optimizer_knobs(optimizer, scheduler, name):
            self._helm.add(knob)

    @property
    def knobs(self) -> Mapping[str, Knob]:
        return self._helm.knobs

    def clip(self, value: float = 1.0) -> Knob:
        """A knob for the norm at which gradients are clipped: `clip_grad_norm_(parameters, clip.value)`."""
        return self.knob("clip", float(value), low=0.0, help="gradient norm to clip at")

    def accumulation(self, value: int = 1) -> Knob:
        """A knob for how many batches make one optimizer step."""
        return self.knob("accumulation", int(value), low=1, help="batches for each optimizer step")

    def log_interval(self, value: int = 10) -> Knob:
        return self.knob("log_interval", int(value), low=1, unit="steps", help="steps between two log lines")

    def checkpoint_interval(self, value: int = 1000) -> Knob:
        return self.knob(INTERVAL, int(value), low=1, unit="steps", help="steps between two checkpoints")

    def on_checkpoint(self, save: Callable[[int], object]) -> Callable[[int], object]:
        """Call this when someone asks for a checkpoint, on every rank at the same step; it returns the path."""
        self._helm.save = save
        self._helm.offer()
        return save

    def resume_at(self, step: int) -> None:
        """Training goes on after this step of an earlier run: changes made up to it are in force at once."""
        self._helm.resume_at(step)

    def state_dict(self) -> dict[str, Any]:
        """Values in force and the changes behind them, for your checkpoint."""
        return {} if self._helm.refusal else self._helm.state_dict()  # a counted step is not the script's own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._helm.load_state_dict(state)

    # ── the checkpoints of this process ──────────────────────────────────────────────────────────────────────────────

    def keep(self, kept: attached.Kept) -> None:
        """Offer these checkpoints to the operator; what the script registers itself goes before."""
        try:
            self._helm.keep(kept)
        except Exception as error:  # noqa: BLE001  training goes on, and so do its checkpoints
            logger.warning("torchLoom: the checkpoints cannot be offered: %s", error)

    def tell(self, news: Saved | SaveFailed | Resumed) -> None:
        """Let the weaver know what became of a checkpoint: now, or when there is a link again."""
        link = self._link
        if link is not None:
            with contextlib.suppress(Exception):
                link.tell(news)

    def values(self) -> dict[str, Value]:
        """Knobs as they are now."""
        return self._helm.values()

    # ── beginning and end ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.up

    @property
    def incarnation(self) -> str:
        """Which life of the rank this is; empty for a threadlet that is off."""
        return "" if self._link is None else self._link.life.incarnation

    def close(self) -> None:
        """Say goodbye. What is left of the training goes unreported."""
        self.end(Ending())

    def end(self, ending: Ending) -> None:
        """Say goodbye in these words, after what is being saved is saved; only the first goodbye counts."""
        if self._link is None:
            return
        try:
            with contextlib.suppress(Exception):
                self._link.signs.say_leaving()
                attached.finish(FINISH_SECONDS)
        finally:  # also if someone is tired of waiting
            link, self._link, self._meter = self._link, None, None
            if link is not None:
                attached.left(self)
                hooks.leave(self._names.rank)
                commits, self._commits = self._commits, None
                if commits is not None:
                    commits.end()
                link.goodbye(ending)
                link.signs.end()

    def _own(self, devices: tuple[str, ...] | None) -> bool:
        """The script attaches after its steps were counted: what was counted is forgotten. False if none were."""
        link, meter = self._link, self._meter
        if link is None or meter is None or not link.counted:
            return False
        meter.resume_at(0)
        self._helm.refusal = ""
        self._helm.add(log_level_knob())
        link.counted = False
        link.set_devices(devices)
        link.introduce()
        attached.left(self)
        attached.came(self)  # its checkpoints can be offered now
        return True

    def disown(self) -> None:
        """In a forked child: this is the parent's rank. Say nothing, measure nothing."""
        link, self._link, self._meter = self._link, None, None
        self._commits = None
        attached.left(self)
        if link is not None:
            link.disown()

    def __enter__(self) -> Threadlet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Let this process take part. What is not given is taken from the launcher's environment, or picked and told."""
    host = Host(socket.gethostname(), os.getpid(), sys.argv[0] if getattr(sys, "argv", None) else "")
    names = find_names(os.environ, host, job=job, replica=replica, rank=rank, world_size=world_size)
    given = _check_devices(devices)
    for warning in names.warnings:
        logger.warning("torchLoom: %s", warning)
    settings = settings or _settings(os.environ)
    counting.retire()
    known = hooks.live.get(names.rank)
    if isinstance(known, Threadlet):
        if not known._own(given):
            logger.warning("torchLoom: %s is attached already; this is the same threadlet", names.rank)
        return known
    threadlet = _begin(names, settings, given)
    if threadlet._link is not None:
        attached.came(threadlet)
        _announce(names)
        threadlet._link.await_welcome()
    return threadlet


def current() -> Threadlet | None:
    """The one threadlet that the script of this process has attached, if nobody counts its steps yet."""
    found = [known for known in hooks.live.values() if isinstance(known, Threadlet) and known._commits is None]
    own = [known for known in found if known._link is not None and not known._link.counted]
    return own[0] if len(own) == 1 else None


def follow(threadlet: Threadlet, commits: Callable[[Meter, Helm, Link], Commits]) -> bool:
    """Let someone else count the steps: step() then only says how one went. False for a threadlet that is off."""
    meter, link = threadlet._meter, threadlet._link
    if meter is None or link is None:
        return False
    threadlet._commits = commits(meter, threadlet._helm, link)
    return True


class Counted:
    """The threadlet of a script that has not attached: its steps are told, and what it saves; nothing is offered."""

    def __init__(self, threadlet: Threadlet, resumed: int) -> None:
        self._resumed = resumed
        self._threadlet = threadlet

    def step(self) -> None:
        self._threadlet.step()

    def skip(self, steps: int) -> None:
        meter = self._threadlet._meter
        if meter is not None:
            meter.resume_at(self._resumed + steps)
            meter.start(threading.main_thread().ident or 0)  # probably: the next step tells


def attach_counted(environ: Mapping[str, str]) -> Counted:
    """For a script that has not attached itself. Nothing is printed, nothing is waited for."""
    names = find_names(environ, Host(socket.gethostname(), os.getpid(), ""))
    threadlet = _begin(names, _settings(environ), None, counted=True)
    if threadlet._link is not None:
        attached.came(threadlet)
    resumed = environ.get("TORCHLOOM_RESUME_STEP", "")
    return Counted(threadlet, int(resumed) if resumed.isdecimal() else 0)


def _begin(names: Names, settings: Settings, devices: tuple[str, ...] | None, *, counted: bool = False) -> Threadlet:
    """A threadlet with its link under way; without one where it is off, in the wrong process, or cannot be."""
    meter = Meter()
    incarnation = first_incarnation(os.environ.get("TORCHLOOM_INCARNATION", ""))
    helm = Helm(incarnation, meter, settings)
    if settings.off or _is_bystander(names):
        return Threadlet(names, meter, helm, None)
    signs = Signs(meter)
    try:
        link = Link(names, incarnation, meter, helm, settings, devices, signs)
        threadlet = Threadlet(names, meter, helm, link)
        threadlet._skipping = Skipping.told(os.environ)
        link.counted = counted
        if counted:
            helm.refusal = UNATTACHED
        else:
            helm.add(log_level_knob())
        link.start()
    except Exception as error:  # noqa: BLE001  no thread, no descriptor left: training starts anyway
        logger.warning("torchLoom: cannot attach, training goes on without it: %r", error)
        signs.end()
        return Threadlet(names, meter, helm, None)
    hooks.enter(names.rank, threadlet)
    return threadlet


def _settings(environ: Mapping[str, str]) -> Settings:
    """Those of the environment; a variable that makes no sense is told and left out."""
    usable = dict(environ)
    while True:
        try:
            return Settings.from_env(usable)
        except BadSetting as error:
            logger.warning("torchLoom: %s; the default is used", error.message)
            if usable.pop(error.name, None) is None:
                return Settings()


def _check_devices(devices: Iterable[str] | None) -> tuple[str, ...] | None:
    if devices is None:
        return None
    if isinstance(devices, str):
        raise BadInput(f"devices={devices!r} is one text", hint="pass a list of device ids")
    found = tuple(check_name("device", device) for device in devices)
    if len(found) > MAX_DEVICES:
        raise BadInput(f"{len(found)} devices are more than one rank can have ({MAX_DEVICES})")
    return found


def _is_bystander(names: Names) -> bool:
    """Whether this process only came by here: a child that must not speak for its parent's rank."""
    if names.rank in hooks.inherited:
        logger.warning("torchLoom: %s is the parent process's rank; this forked child stays silent", names.rank)
        return True
    # A spawned DataLoader process runs the top level of the script again before its own work begins.
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and bool(getattr(processes.current_process(), "_inheriting", False))


def _announce(names: Names) -> None:
    line = f"torchLoom: this is rank {names.rank.rank} of {names.rank.of}"
    logger.info(line)
    if names.chosen and names.rank.rank == 0 and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal is no reason to stop
            print(f"{line} (name it with attach(job, replica) or TORCHLOOM_JOB, TORCHLOOM_REPLICA)", file=sys.stderr)
