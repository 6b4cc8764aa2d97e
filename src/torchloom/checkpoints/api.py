"""The public class: save in the background, find the newest valid checkpoint, resume from it.

    checkpoints = torchloom.Checkpoints("runs/a", every=500, keep=3)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    step = checkpoints.resume(state)             # 0 if there is none yet
    while step < steps:
        ...
        step += 1
        checkpoints.save(step, state)            # every 500 steps, or when `loom checkpoint` asks

save() copies the state and returns; a thread writes it, and the interpreter does not exit before it has. With several
ranks of torch.distributed, each rank makes these calls at the same steps.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Thread, get_ident, main_thread
from typing import Any, Literal

import torch

from torchloom.checkpoints import load, stateful_objects, threadlet_bridge
from torchloom.checkpoints.coordination import Coordinator, all_or_none, update_coordinator
from torchloom.checkpoints.pending_save import PendingSave, PreparedSave, SingleFileSave, describe_error, error_class
from torchloom.checkpoints.rng_state import capture, restore
from torchloom.checkpoints.staging import StagingBuffers
from torchloom.checkpoints.store import commit, search
from torchloom.checkpoints.store.checksums import Signature, signature
from torchloom.checkpoints.store.locks import WriterLock, reading
from torchloom.checkpoints.store.manifest import Manifest, folder_name
from torchloom.checkpoints.store.retention import Keep, prune
from torchloom.checkpoints.store.search import ValidCheckpoint
from torchloom.errors import AlreadyUp, BadInput, BadState, Damaged, NoValidCheckpoint
from torchloom.protocol.rank import Resumed, Saved, SaveFailed

logger = logging.getLogger("torchloom")
THREAD = "torchloom-writer"
WAIT_SECONDS = 600.0
"""Longest wait for the previous save. A disk that hangs stops training this long, once; then saves are skipped."""


class Checkpoints:
    """The checkpoints of one job in one folder.

    With `every`, save() may be called at each step and saves at some; without it each call saves. `keep` is the number
    of checkpoints to keep, or a Keep. While one is being written, the next save waits for it or, with `busy="skip"`, is
    skipped.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None = None,
        keep: int | Keep | None = None,
        *,
        busy: Literal["wait", "skip"] = "wait",
        pattern: str | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.every = None if every is None else _positive("every", every)
        self.keep = keep if isinstance(keep, Keep) else Keep(last=None if keep is None else _positive("keep", keep))
        if busy not in {"wait", "skip"}:
            raise BadInput(f"busy={busy!r}", hint='what to do while one is being written: "wait" or "skip"')
        self.busy = busy
        self.pattern = pattern
        self.saving: PendingSave | None = None
        """The current or the last save."""
        self._copier = StagingBuffers()
        self._coordinator = Coordinator()
        self._lock: WriterLock | None = None
        self._live: Mapping[str, Any] | None = None
        """A state that can be saved at any time: see _know."""
        self._seen: Mapping[str, Any] | None = None
        self._guard = Lock()
        self._inside = 0
        """The thread that is in save()."""
        self._wanted = False
        self._stuck = False
        """The wait for the last save timed out."""
        self._claimed = False
        self._last: int | None = None
        """The step of the last call of save()."""
        self._saved: int | None = None
        self._trusted: dict[Path, Signature] = {}
        """Checkpoints that this process wrote, with their signature when they were durable."""
        threadlet_bridge.register_checkpoints(self)

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, step: int, state: Mapping[str, Any], *, now: bool = False) -> PendingSave | None:
        """Save if it is due (`every`, or an operator's request) or `now` is set; returns None if it was not.

        Training stands still while the state is copied. A disk error is logged and does not raise; a state that cannot
        be saved, and a folder that another job writes into, do.
        """
        step = _step(step)
        if not self._is_time(step) and not now:
            return None
        if self._inside == get_ident():
            raise BadState("save() was called inside save(), by a signal's handler", hint="set a flag there instead")
        with self._guard:
            self._inside = get_ident()
            try:
                with threadlet_bridge.checkpoint_phase():
                    return self._save(step, state)
            finally:
                self._inside = 0

    def _save(self, step: int, state: Mapping[str, Any]) -> PendingSave | None:
        saving = PendingSave(step, self.folder / folder_name(step))
        try:
            with all_or_none(self._current_coordinator()):
                stateful_objects.check_names(state)
            if not self._is_free():
                logger.warning("torchLoom: step %d is not saved: step %s is still being written", step, self._saved)
                return None
            self._wanted = False
            self._claim()
            prepared = self._prepare(saving, state)
        except (BadInput, AlreadyUp):
            raise
        except Exception as error:  # noqa: BLE001  the folder cannot be created, or a rank did not take part
            self._fail(saving, error)
            return saving
        self._saved = step
        self._know(state)
        self.saving = saving
        saving.total = prepared.size
        threadlet = threadlet_bridge.current_threadlet()
        saving.manifest = Manifest(
            step=step,
            files=(),
            layout=prepared.layout,
            parts=tuple(sorted(state)),
            world_size=self._current_coordinator().size,
            torch=str(torch.__version__),
            job=threadlet_bridge.current_job(),
            knobs=threadlet.values() if threadlet is not None else {},
        )
        # Not a daemon: the interpreter waits for it before it exits.
        saving.stall = time.monotonic() - saving.began
        try:
            thread = Thread(target=self._write, args=(saving, prepared), name=THREAD, daemon=False)
            if not main_thread().is_alive():
                raise RuntimeError("the interpreter is exiting: it would not wait for another thread")
            thread.start()
        except RuntimeError:  # as above, or no more threads can be started
            self._write(saving, prepared)
        except BaseException:
            prepared.release()
            saving.end("interrupted")
            raise
        return saving

    def _is_time(self, step: int) -> bool:
        last, self._last = self._last, step
        if step == self._saved and self.saving is not None and not self.saving.error:
            return False  # it was saved already, on an operator's request
        if self._wanted or self.every is None:
            return True
        return step // self.every != (step - 1 if last is None else last) // self.every

    def _is_free(self) -> bool:
        """Whether nothing is being written, here or on another rank."""
        patience = WAIT_SECONDS if self.busy == "wait" and not self._stuck else 0.0
        free = all(self._current_coordinator().gather(self.wait(patience)))
        self._stuck = not free
        return free

    def _prepare(self, saving: PendingSave, state: Mapping[str, Any]) -> PreparedSave:
        threadlet = threadlet_bridge.current_threadlet()
        own = {"rng": capture(), "torchloom": threadlet.state_dict() if threadlet is not None else {}}
        coordinator = self._current_coordinator()
        if coordinator.size > 1 or stateful_objects.is_sharded(state):
            from torchloom.checkpoints.sharded_save import ShardedSave

            return ShardedSave(saving, state, own, self._copier, coordinator)
        return SingleFileSave(saving, {"state": stateful_objects.gather(state), **own}, self._copier)

    def _write(self, saving: PendingSave, prepared: PreparedSave) -> None:
        try:
            prepared.write()
        except Exception as error:  # noqa: BLE001  a full disk, a dead file server: training continues
            prepared.release()
            self._fail(saving, error)
            return
        prepared.release()
        try:
            self._trusted = {saving.path: signature(saving.path)}
            self._tell_saved(saving)
            if self._is_lead():
                self._prune(self.keep, spare=saving.step)
        except Exception as error:  # noqa: BLE001  the checkpoint is saved; only the cleanup failed
            logger.warning("torchLoom: after the checkpoint of step %d: %s", saving.step, describe_error(error))
        saving.end()

    def _tell_saved(self, saving: PendingSave) -> None:
        seconds = time.monotonic() - saving.began
        logger.info(
            "torchLoom: saved %s in %.2f s, training stood still for %.3f s", saving.path, seconds, saving.stall
        )
        size = sum(size for name, _, size, _ in self._trusted[saving.path])
        self._report(Saved, step=saving.step, folder=str(self.folder), size=size, seconds=seconds, stall=saving.stall)

    def _fail(self, saving: PendingSave, error: Exception) -> None:
        why = describe_error(error)
        logger.warning("torchLoom: step %d is not saved: %s; training continues", saving.step, why)
        self._report(SaveFailed, step=saving.step, folder=str(self.folder), why=why, error=error_class(error))
        self.saving = saving
        saving.end(why)

    def _report(self, kind: type[threadlet_bridge.CheckpointNews], **fields: Any) -> None:
        """The first rank reports for all."""
        threadlet = threadlet_bridge.current_threadlet()
        if threadlet is not None and self._is_lead():
            threadlet.tell(kind(incarnation=threadlet.incarnation, **fields))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer."""
        return self.saving is None or self.saving.wait(seconds)

    def _know(self, state: Mapping[str, Any]) -> None:
        """Remember a state that can be saved at any time: live objects, or a mapping that is passed every time."""
        if state is self._seen or all(stateful_objects.is_live(part) for part in state.values()):
            self._live = state
        self._seen = state

    def wanted(self, step: int) -> str:
        """Save on an operator's request: at once if the objects are known from resume(), else at the next save()."""
        if self._live is None:
            self._wanted = True
            return f"not yet: at the script's next save() into {self.folder}" if self._is_lead() else ""
        saving = self.save(step, self._live, now=True)
        if saving is None:
            raise BadState("the last one is still being written")
        if saving.error:
            raise BadState(saving.error)
        return str(saving.path) if self._is_lead() else ""

    # ── finding and loading ──────────────────────────────────────────────────────────────────────────────────────────

    def latest(self) -> ValidCheckpoint:
        """The newest valid checkpoint, and why newer ones were rejected; NoValidCheckpoint if there is none."""
        return search.latest(self.folder, self.pattern)

    def load(self, step: int | None = None, strict: bool = True) -> load.Loaded:
        """What was saved, as data: at `step`, else in the newest valid checkpoint. No code in it is run.

        With `strict`, it raises for parts that one process cannot load completely; otherwise they are left out.
        """
        while True:
            before = self._names()
            try:
                checkpoint = self._find(step)
                with reading(checkpoint.path):
                    return load.load(checkpoint, strict)
            except (Damaged, NoValidCheckpoint):
                if step is not None or self._names() == before:
                    raise  # otherwise one was deleted or written in between: search again

    def resume(self, state: Mapping[str, Any], step: int | None = None, strict: bool = True) -> int:
        """Load each object in `state` and the random number generators; returns the step that was finished.

        Returns 0 and changes nothing if the folder has no checkpoint yet. Raises NoValidCheckpoint if there are some
        but none is valid. If it does not fit the objects it is loaded into, everything stays unchanged.
        """
        self.wait()
        coordinator = self._current_coordinator()
        with all_or_none(coordinator):
            stateful_objects.check_names(state)
        checkpoint = coordinator.broadcast_from_zero(lambda: self._begin(step))
        self._claimed = True
        self._know(state)
        if checkpoint is None:
            return 0
        with reading(checkpoint.path):
            own = load.resume(checkpoint, state, strict, coordinator)
        self._last = checkpoint.step
        self._saved = checkpoint.step
        threadlet = threadlet_bridge.current_threadlet()
        if threadlet is not None:
            threadlet.load_state_dict(own.get("torchloom") or {"step": checkpoint.step, "knobs": {}, "taken": {}})
        self._report(Resumed, step=checkpoint.step, path=str(checkpoint.path), rejected=dict(checkpoint.rejected))
        restore(own.get("rng", {}))
        logger.info("torchLoom: resumed from %s", checkpoint.path)
        return checkpoint.step

    def _begin(self, step: int | None) -> ValidCheckpoint | None:
        """Lock the folder and find the checkpoint to resume from."""
        self._lock_folder()
        if step is None and not search.candidates(self.folder, self.pattern):
            return None
        checkpoint = self._find(step)
        for name, why in checkpoint.rejected.items():
            logger.warning("torchLoom: %s is passed over: %s", name, why)
        if step is not None:
            for name in commit.set_aside(self.folder, newer_than=step):
                logger.warning("torchLoom: %s is set aside: training goes back to step %d", name, step)
        return checkpoint

    def _names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()

    def _find(self, step: int | None) -> ValidCheckpoint:
        if step is None:
            return self.latest()
        return search.at_step(self.folder, _step(step), self.pattern)

    # ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────

    def prune(self, keep: Keep | None = None) -> list[str]:
        """Delete what the rule does not keep; returns the deleted names."""
        return self._prune(keep or self.keep)

    def _prune(self, keep: Keep, spare: int | None = None) -> list[str]:
        pruned = prune(self.folder, keep, time.time(), self._is_trusted, spare=spare)
        for name in pruned.deleted:
            logger.info("torchLoom: deleted %s, which need not be kept", name)
        return pruned.deleted

    def _is_trusted(self, path: Path) -> bool:
        trusted = self._trusted.get(path)
        return trusted is not None and trusted == signature(path)

    def _claim(self) -> None:
        """Lock the folder for this job. Its first rank does so; if that fails, it raises on all ranks."""
        if not self._claimed or (self._lock is not None and not self._lock.held):
            self._current_coordinator().broadcast_from_zero(self._lock_folder)
            self._claimed = True

    def _lock_folder(self) -> None:
        if self._lock is not None and self._lock.held:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadState(f"cannot make the folder {self.folder}: {error.strerror}") from error
        self._lock = WriterLock(self.folder, threadlet_bridge.current_job())
        if self._lock.first:
            for name in commit.clean(self.folder):
                logger.info("torchLoom: removed %s, which a process that is gone had left half-written", name)

    def _current_coordinator(self) -> Coordinator:
        self._coordinator = update_coordinator(self._coordinator)
        return self._coordinator

    def _is_lead(self) -> bool:
        return self._coordinator.rank == 0

    def close(self) -> None:
        """Wait for the current save, and unlock the folder."""
        with threadlet_bridge.checkpoint_phase():
            self.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._claimed = False
        self._copier = StagingBuffers()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoints {self.folder}>"


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"{name}={value!r}: it must be a whole number of at least 1")
    return value


def _step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise BadInput(f"step {step!r}: it must be a whole number that is not negative")
    return step
