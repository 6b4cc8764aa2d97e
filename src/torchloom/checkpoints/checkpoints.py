"""The public face: save behind the training, find the newest that is whole, go on from it.

    checkpoints = torchloom.Checkpoints("runs/a", every=500, keep=3)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    step = checkpoints.resume(state)             # 0 if there is none yet
    while step < steps:
        ...
        step += 1
        checkpoints.save(step, state)            # every 500 steps, or when `loom checkpoint` asks

save() copies the state out and returns; a thread writes it, and the interpreter does not exit before it has. Where
torch.distributed has several ranks, each of them makes these calls at the same steps.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread, get_ident, main_thread
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchloom.checkpoints import attached, draft, loading, objects, search
from torchloom.checkpoints.copying import Copier
from torchloom.checkpoints.loading import Loaded
from torchloom.checkpoints.locks import WriterLock, reading
from torchloom.checkpoints.manifest import Damaged, FileEntry, Manifest, folder_name
from torchloom.checkpoints.randomness import capture, restore
from torchloom.checkpoints.retention import Keep, prune
from torchloom.checkpoints.saving import Saving
from torchloom.checkpoints.search import Found, NoValidCheckpoint
from torchloom.checkpoints.single import Prepared, Seal, SingleSave
from torchloom.checkpoints.team import Team, find_team, is_distributed, together
from torchloom.checkpoints.verify import Signature, signature
from torchloom.errors import AlreadyUp, BadInput, BadState, TorchLoomError
from torchloom.messages import Resumed, Saved, SaveFailed

logger = logging.getLogger("torchloom")
THREAD = "torchloom-writer"
WAIT_SECONDS = 600.0
"""For the last save to be finished. A disk that hangs stops training this long, once; then saves are left out."""


class Checkpoints:
    """The checkpoints of one job in one folder.

    `every` lets save() be called at each step and act on some; without it each call saves. `keep` is how many to keep,
    or a Keep. While one is being written the next save waits for it, or is left out (`busy="skip"`).
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
        self.saving: Saving | None = None
        """The save that is under way, or was the last."""
        self._copier = Copier()
        self._team: Team | None = None
        self._lock: WriterLock | None = None
        self._live: Mapping[str, Any] | None = None
        """What can be asked for its state at any time: see _know."""
        self._seen: Mapping[str, Any] | None = None
        self._guard = Lock()
        self._inside = 0
        """The thread that is in save()."""
        self._wanted = False
        self._stuck = False
        """The last save was waited for in vain."""
        self._claimed = False
        self._last: int | None = None
        """The step of the last call of save()."""
        self._saved: int | None = None
        self._trusted: dict[Path, Signature] = {}
        """What this process wrote itself, as it was when it was durable."""
        attached.keep(self)

    # ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, step: int, state: Mapping[str, Any], *, now: bool = False) -> Saving | None:
        """Save if it is time for it (`every`, or an operator's wish), or at once (`now`). None if it was not.

        Training stands still for the copy out. A disk that fails is told and changes nothing; a state that cannot be
        saved, and a folder that another job writes into, raise.
        """
        step = _step(step)
        if not self._is_time(step) and not now:
            return None
        if self._inside == get_ident():
            raise BadState("save() was called inside save(), by a signal's handler", hint="set a flag there instead")
        with self._guard:
            self._inside = get_ident()
            try:
                with attached.stalling():
                    return self._save(step, state)
            finally:
                self._inside = 0

    def _save(self, step: int, state: Mapping[str, Any]) -> Saving | None:
        began = time.monotonic()
        saving = Saving(step, self.folder / folder_name(step), began)
        try:
            with together(self._members()):
                objects.check_names(state)
            if not self._is_free():
                logger.warning("torchLoom: step %d is not saved: step %s is still being written", step, self._saved)
                return None
            self._wanted = False
            self._claim()
            prepared = self._prepare(step, state)
        except (BadInput, AlreadyUp):
            raise
        except Exception as error:  # noqa: BLE001  a folder that cannot be made, a rank that did not come
            self._fail(saving, error)
            return saving
        self._saved = step
        self._know(state)
        self.saving = saving
        saving.total = prepared.size
        parts = tuple(sorted(state))
        side = attached.side()
        knobs = side.values() if side is not None else {}
        job = side.job if side is not None else ""
        team_size = self._members().size

        def seal(files: tuple[FileEntry, ...], id: str) -> Manifest:
            return Manifest(
                step=step,
                files=files,
                layout=prepared.layout,
                id=id,
                parts=parts,
                created=time.time(),
                seconds=time.monotonic() - began,
                world_size=team_size,
                torch=str(torch.__version__),
                job=job,
                knobs=knobs,
            )

        # Not a daemon: the interpreter waits for it before it exits.
        saving.stall = time.monotonic() - began
        try:
            thread = Thread(target=self._write, args=(saving, prepared, seal), name=THREAD, daemon=False)
            if not main_thread().is_alive():
                raise RuntimeError("the interpreter is exiting: it would not wait for another thread")
            thread.start()
        except RuntimeError:  # or there can be no more threads
            self._write(saving, prepared, seal)
        except BaseException:
            prepared.release()
            saving.end("interrupted")
            raise
        return saving

    def _is_time(self, step: int) -> bool:
        last, self._last = self._last, step
        if step == self._saved and self.saving is not None and not self.saving.error:
            return False  # an operator's wish has been faster
        if self._wanted or self.every is None:
            return True
        return step // self.every != (step - 1 if last is None else last) // self.every

    def _is_free(self) -> bool:
        """Whether nothing is being written any more, here or on another rank."""
        patience = WAIT_SECONDS if self.busy == "wait" and not self._stuck else 0.0
        free = all(self._members().gather(self.wait(patience)))
        self._stuck = not free
        return free

    def _prepare(self, step: int, state: Mapping[str, Any]) -> Prepared:
        side = attached.side()
        own = {"rng": capture(), "torchloom": side.state_dict() if side is not None else {}}
        team = self._members()
        if team.size > 1 or objects.is_sharded(state):
            from torchloom.checkpoints.sharded import ShardedSave

            return ShardedSave(self.folder, step, state, own, self._copier, team)
        return SingleSave(self.folder, step, {"state": objects.gather(state), **own}, self._copier)

    def _write(self, saving: Saving, prepared: Prepared, seal: Seal) -> None:
        try:
            prepared.write(saving.grow, seal)
        except Exception as error:  # noqa: BLE001  a full disk, a dead server: training goes on
            prepared.release()
            self._fail(saving, error)
            return
        prepared.release()
        try:
            self._trusted = {saving.path: signature(saving.path)}
            self._tell_saved(saving)
            if self._is_lead():
                self._prune(self.keep, spare=saving.step)
        except Exception as error:  # noqa: BLE001  it is saved; what is left is housekeeping
            logger.warning("torchLoom: after the checkpoint of step %d: %s", saving.step, _why(error))
        saving.end()

    def _tell_saved(self, saving: Saving) -> None:
        seconds = time.monotonic() - saving.began
        logger.info(
            "torchLoom: saved %s in %.2f s, training stood still for %.3f s", saving.path, seconds, saving.stall
        )
        side = attached.side()
        if side is not None and self._is_lead():
            news = Saved(
                incarnation=side.incarnation,
                step=saving.step,
                folder=str(self.folder)[:2000],
                size=sum(size for name, _, size, _ in self._trusted[saving.path]),
                seconds=seconds,
                stall=saving.stall,
            )
            side.tell(news)

    def _fail(self, saving: Saving, error: Exception) -> None:
        why = _why(error)
        logger.warning("torchLoom: step %d is not saved: %s; training goes on", saving.step, why)
        side = attached.side()
        if side is not None and self._is_lead():
            side.tell(
                SaveFailed(
                    incarnation=side.incarnation, step=saving.step, folder=str(self.folder)[:2000], why=why[:2000]
                )
            )
        self.saving = saving
        saving.end(why)

    def wait(self, seconds: float | None = None) -> bool:
        """Let what is being written be finished; whether it is."""
        return self.saving is None or self.saving.wait(seconds)

    def _know(self, state: Mapping[str, Any]) -> None:
        """What can be saved at any time: live objects, or the one mapping that the script hands in again and again."""
        if state is self._seen or all(objects.is_live(part) for part in state.values()):
            self._live = state
        self._seen = state

    def wanted(self, step: int) -> str:
        """An operator wants one, here: at once if the objects are known from resume(), else at the next save()."""
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

    def latest(self) -> Found:
        """The newest that is whole, with the newer ones that are not and why; NoValidCheckpoint if there is none."""
        found, rejected = search.latest(self.folder, self.pattern)
        return replace(found, rejected=rejected)

    def load(self, step: int | None = None, strict: bool = True) -> Loaded:
        """What was saved, as data: that of `step`, else of the newest that is whole. Nothing in it is run.

        With `strict`, parts that cannot be had whole in one process are refused; else they are left out.
        """
        while True:
            before = self._names()
            try:
                found = self._find(step)
                with reading(found.path):
                    return loading.load(found, strict)
            except (Damaged, NoValidCheckpoint):
                if step is not None or self._names() == before:
                    raise  # else one was deleted or made meanwhile: look again

    def resume(self, state: Mapping[str, Any], step: int | None = None, strict: bool = True) -> int:
        """Give each object in `state` what was saved for it, and set the random numbers; the step that was finished.

        0, with nothing touched, if the folder holds no checkpoint yet. If there are some and none is whole:
        NoValidCheckpoint. If it does not fit what it is loaded into, everything is left as it was.
        """
        self.wait()
        team = self._members()
        with together(team):
            objects.check_names(state)
        found = team.lead(lambda: self._begin(step))
        self._claimed = True
        self._know(state)
        if found is None:
            return 0
        with reading(found.path):
            own = loading.resume(found, state, strict, team)
        self._last = found.step
        self._saved = found.step
        side = attached.side()
        if side is not None:
            side.load_state_dict(own.get("torchloom") or {"step": found.step, "knobs": {}, "taken": {}})
            if team.rank == 0:
                rejected = {name[:255]: why[:2000] for name, why in list(found.rejected.items())[:100]}
                side.tell(
                    Resumed(
                        incarnation=side.incarnation, step=found.step, path=str(found.path)[:2000], rejected=rejected
                    )
                )
        restore(own.get("rng", {}))
        logger.info("torchLoom: resumed from %s", found.path)
        return found.step

    def _begin(self, step: int | None) -> Found | None:
        """Claim the folder, and look what is in it."""
        self._lock_folder()
        if step is None and not search.candidates(self.folder, self.pattern):
            return None
        found = self._find(step)
        for name, why in found.rejected.items():
            logger.warning("torchLoom: %s is passed over: %s", name, why)
        if step is not None:
            for name in draft.set_aside(self.folder, newer_than=step):
                logger.warning("torchLoom: %s is set aside: training goes back to step %d", name, step)
        return found

    def _names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()

    def _find(self, step: int | None) -> Found:
        if step is None:
            return self.latest()
        return search.at_step(self.folder, _step(step), self.pattern)

    # ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────

    def prune(self, keep: Keep | None = None) -> list[str]:
        """Delete what need not be kept; the names of what was deleted."""
        return self._prune(keep or self.keep)

    def _prune(self, keep: Keep, spare: int | None = None) -> list[str]:
        pruned = prune(self.folder, keep, time.time(), self._is_trusted, spare=spare)
        for name in pruned.deleted:
            logger.info("torchLoom: deleted %s, which need not be kept", name)
        return pruned.deleted

    def _is_trusted(self, path: Path) -> bool:
        known = self._trusted.get(path)
        return known is not None and known == signature(path)

    def _claim(self) -> None:
        """This job writes here, and no other does. Its first rank sees to that; all of them hear if it cannot."""
        if not self._claimed or (self._lock is not None and not self._lock.held):
            self._members().lead(self._lock_folder)
            self._claimed = True

    def _lock_folder(self) -> None:
        if self._lock is not None and self._lock.held:
            return
        side = attached.side()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadState(f"cannot make the folder {self.folder}: {error.strerror}") from error
        self._lock = WriterLock(self.folder, side.job if side is not None else "")
        if self._lock.first:
            for name in draft.clean(self.folder):
                logger.info("torchLoom: removed %s, which a process that is gone had left half-written", name)

    def _members(self) -> Team:
        """Who makes these checkpoints; several, as soon as torch.distributed is initialised."""
        old = self._team
        if old is None or (is_distributed() and getattr(old, "world", None) is not dist.group.WORLD):
            self._team = find_team()
        assert self._team is not None
        return self._team

    def _is_lead(self) -> bool:
        return self._team is None or self._team.rank == 0

    def close(self) -> None:
        """Finish what is being written, and let others write into the folder."""
        with attached.stalling():
            self.wait()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._claimed = False
        self._copier = Copier()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, TorchLoomError):
        return error.message
    return f"{type(error).__name__}: {error}"
