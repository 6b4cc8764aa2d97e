"""Counting the steps of a script that never calls attach(): one for each step() of its first optimizer.

`loom run` has this installed in its ranks before the script begins. It costs nothing where torch is never imported.
Once torch's optimizers are there, a hook is called after each of their steps; at the first one this rank joins, marked
as counted: it says how far it is, and nothing else is known of it. The script's own attach() ends all of this, whenever
it comes. Nothing here may raise, print or compute: whatever goes wrong, the steps are not known and training goes on.

One optimizer counts, so that a step of two (a GAN) is one, as is one of many batches (accumulation) or of many trials
(a closure). It is another one's turn when it is gone, or when it has long stood still while others go on.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from torchloom.threadlet.importing import when_imported

OPTIMIZERS = "torch.optim.optimizer"
STILL = 1000
"""Steps of others without one of the optimizer that counts."""
SETTLE_SECONDS = 2.0


class Steps(Protocol):
    def step(self) -> None: ...
    def skip(self, steps: int) -> None:
        """So many were made before."""


class Counter:
    def __init__(self, join: Callable[[], Steps]) -> None:
        self.on = False
        """It is installed."""
        self.over = False
        self._join = join
        self._joining: threading.Thread | None = None
        self._lock = threading.Lock()
        self._before = 0
        """Steps made while joining: it takes a moment, for which training does not wait."""
        self._steps: Steps | None = None
        self._first: weakref.ref[Any] | None = None
        """The optimizer that counts."""
        self._others = 0

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step."""
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
            if self._steps is not None or not self._joins():
                self._steps.step()  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001  uncounted, then
            self.over = True

    def _joins(self) -> bool:
        """Whether the step was noted for when this rank has joined."""
        with self._lock:
            if self._steps is not None:
                return False
            self._before += 1
        if self._joining is None:
            self._joining = threading.Thread(target=self._begin, name="torchloom-join", daemon=True)
            self._joining.start()
        return True

    def _begin(self) -> None:
        try:
            steps = self._join()
            with self._lock:
                steps.skip(self._before)
                self._steps = steps
        except Exception:  # noqa: BLE001  uncounted, then
            self.over = True

    def settle(self) -> None:
        """Wait for one that is joining: a child forked in the middle of an import could never do it itself."""
        if self._joining is not None and self._joining is not threading.current_thread():
            self._joining.join(SETTLE_SECONDS)

    def retire(self) -> None:
        """Never count again: the script speaks for itself."""
        self.over = True
        self.settle()

    def forget(self) -> None:
        """In a forked child: a loader process is not the rank."""
        self.over = True
        self._joining = None


def _join() -> Steps:
    from torchloom.threadlet.threadlet import attach_counted

    return attach_counted(os.environ)


_counter = Counter(_join)
retire = _counter.retire


def install() -> None:
    """Count from the first optimizer step on; before the script begins, in the process that is the rank."""
    if _counter.on:
        return
    _counter.on = True
    os.register_at_fork(before=_counter.settle, after_in_child=_counter.forget)
    when_imported(OPTIMIZERS, lambda optimizers: hook(optimizers, _counter))


def hook(optimizers: ModuleType, counter: Counter) -> Callable[[], None]:
    """Have torch tell the counter of every step; what is returned ends that."""
    torch = sys.modules["torch"]

    def stepped(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a step that is being compiled must not have us in it
            counter.stepped(optimizer)

    try:
        # In a rank it stays when all is over: torch may be going through its hooks just then.
        end: Callable[[], None] = optimizers.register_optimizer_step_post_hook(stepped).remove
    except Exception:  # noqa: BLE001  a torch that has no such hook
        counter.retire()
        return lambda: None
    return end
