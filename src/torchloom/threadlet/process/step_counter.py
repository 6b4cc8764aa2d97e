"""Counts the steps of a script that never calls attach(): one for each step() of its first optimizer.

`loom run` installs this in its ranks before the script starts. It costs nothing if torch is never imported. Once
torch's optimizers are imported, a hook runs after each of their steps; at the first one this rank joins, marked as
counted, and reports only its step. If the script calls attach(), counting ends. Nothing here may raise or print: if
anything fails, the steps stay unknown and training continues.

Only one optimizer counts, so that a step of two optimizers (a GAN), of many batches (accumulation) or of many trials
(a closure) is one step. Another optimizer takes over when that one was deleted, or has made no step for long.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from torchloom.shared.import_hook import when_imported

OPTIMIZERS = "torch.optim.optimizer"
STILL = 1000
"""Steps of other optimizers after which another one counts, if the counting one made none."""
SETTLE_SECONDS = 2.0


class StepSink(Protocol):
    def step(self) -> None: ...
    def _count_earlier(self, steps: int) -> None:
        """Add steps that were made before it existed."""


class Counter:
    def __init__(self, join: Callable[[], StepSink] | None = None) -> None:
        self.over = False
        self.join = join
        """Makes this process a rank that reports the counted steps; None until it is installed."""
        self._joining: threading.Thread | None = None
        self._lock = threading.Lock()
        self._before = 0
        """Steps made while joining, for which training does not wait."""
        self._steps: StepSink | None = None
        self._first: weakref.ref[Any] | None = None
        """The optimizer that counts."""
        self._others = 0

    def stepped(self, optimizer: Any) -> None:
        """Called after each step of an optimizer."""
        if self.over:
            return
        try:
            first = None if self._first is None else self._first()
            if first is not optimizer:
                self._others += 1
                if first is not None and self._others < STILL:
                    return
                self._first = weakref.ref(optimizer)
            self._others = 0
            steps = self._steps or self._note()
            if steps is not None:
                steps.step()
        except Exception:  # noqa: BLE001  uncounted, then
            self.over = True

    def _note(self) -> StepSink | None:
        """Note a step, and join at the first one. Returns where to report it if this rank has joined meanwhile."""
        with self._lock:
            if self._steps is None:
                self._before += 1
                if self._joining is None:
                    self._joining = threading.Thread(target=self._begin, name="torchloom-join", daemon=True)
                    self._joining.start()
            return self._steps

    def _begin(self) -> None:
        try:
            assert self.join is not None
            steps = self.join()
            with self._lock:
                steps._count_earlier(self._before)
                self._steps = steps
        except Exception:  # noqa: BLE001  uncounted, then
            self.over = True

    def settle(self) -> None:
        """Wait for the thread that joins: a child forked in the middle of its imports could never import itself."""
        if self._joining is not None and self._joining is not threading.current_thread():
            self._joining.join(SETTLE_SECONDS)

    def retire(self) -> None:
        """Stop counting permanently: the script attaches itself."""
        self.over = True
        self.settle()

    def forget(self) -> None:
        """In a forked child, such as a loader process: it is not the rank."""
        self.over = True
        self._joining = None


_counter = Counter()
retire = _counter.retire


def install(join: Callable[[], StepSink]) -> None:
    """Count from the first optimizer step on; `join` is called at that step, on a thread of its own.

    To be called before the script starts, in the process that is the rank.
    """
    if _counter.join is None:
        _counter.join = join
        os.register_at_fork(before=_counter.settle, after_in_child=_counter.forget)
        when_imported(OPTIMIZERS, lambda optimizers: hook(optimizers, _counter))


def hook(optimizers: ModuleType, counter: Counter) -> Any:
    """Have torch call the counter after every optimizer step; returns torch's handle, which can undo this."""
    torch = sys.modules["torch"]

    def stepped(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # keep this hook out of compiled graphs
            counter.stepped(optimizer)

    # A rank never removes it: torch may be iterating over its hooks at that moment.
    return optimizers.register_optimizer_step_post_hook(stepped)
