"""The helm: where what the link hears meets what the training does at a step boundary.

The training compares one number at each step (`steering.boundary`). Only when something is due does it come here. It
waits here in two cases: while a change that it promised to obey has no verdict yet, briefly; and while it is paused.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchloom.checkpoints.attached import Kept
from torchloom.knobs import BadValue, check, ramp
from torchloom.messages import Applied, Committed, KnobSpec, Propose, Ready, Reply, Standing, Value, Verdict
from torchloom.settings import Settings
from torchloom.threadlet.handover import Handover, Ramping
from torchloom.threadlet.knob import INTERVAL, Knob, interval_knob
from torchloom.threadlet.meter import Meter
from torchloom.threadlet.steering import Steering

logger = logging.getLogger("torchloom")
PATIENCE = 0.1
"""Seconds to wait for a verdict that is probably on its way before asking the server for one."""
ASK_AGAIN = 0.25
"""Seconds between two such questions: the first may have met a link that was just lost."""


class Helm:
    def __init__(self, incarnation: str, meter: Meter, settings: Settings) -> None:
        self.steering = Steering(incarnation, self._accept)
        self.knobs: dict[str, Knob] = {}
        self.stopping = False
        self.refusal = ""
        """Why nothing can be changed here at all."""
        self.save: Callable[[int], object] | None = None
        """Writes a checkpoint when an operator asks for one."""
        self._lent_save: Callable[[int], object] | None = None
        """The same, if not the script but its checkpoints have given it; and the knob of their interval."""
        self._lent_knob: Knob | None = None
        self.answer: Callable[[Reply], None] = lambda _: None
        """Sends a reply; set by the link."""
        self.resolve: Callable[[Committed], None] = lambda _: None
        """Has the server decide on a change that has no verdict; set by the link."""
        self.offers = 0
        """Counts up with every knob: the link tells the weaver when it has."""
        self.announce: Callable[[], None] = lambda: None
        """Has the link look whether there is more to tell; set by the link."""
        self.linked: Callable[[], bool] = lambda: False
        self._meter = meter
        self._settings = settings
        self._values: dict[str, Value] = {}
        """In force for knobs that the script has not made yet."""
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._inside = False

    # ── called by the training ───────────────────────────────────────────────────────────────────────────────────────

    def add(self, knob: Knob) -> Knob:
        name = knob.spec.name
        if name in self.knobs and self.knobs[name] is not self._lent_knob:
            logger.warning("torchLoom: there are two knobs %s; the newer one counts", name)
        self.knobs[name] = knob
        if name in self._values:
            self._turn(knob, self._values[name])
        self.offer()
        return knob

    def keep(self, kept: Kept) -> None:
        """Let the operator reach these checkpoints, unless the script has seen to that itself. The newest count."""
        if self.refusal:
            return
        if self.save is self._lent_save:
            self.save = self._lent_save = kept.wanted
            self.offer()
        if kept.every is not None and self.knobs.get(INTERVAL) is self._lent_knob:
            self._lent_knob = self.add(interval_knob(kept))

    def offer(self) -> None:
        """There is more that may be changed."""
        self.offers += 1
        self.announce()

    def reach(self, step: int) -> None:
        """A boundary: settle what is undecided, take what is due, wait while paused. Never raises."""
        if self._inside:
            return  # the user's own function called step()
        self._inside = True
        try:
            self._attend(step)
            if self._holds(step):
                with self._meter.paused():
                    self._stay(step)
        except Exception as error:  # noqa: BLE001  training goes on
            logger.warning("torchLoom: steering failed at step %d, training goes on: %r", step, error)
        finally:
            self._inside = False

    def _stay(self, step: int) -> None:
        orphaned: float | None = None
        while self._holds(step):
            self._news.wait(0.5)
            self._news.clear()
            self._attend(step)
            orphaned = self._orphaned(orphaned)

    def _holds(self, step: int) -> bool:
        """Whether to stay: paused, or a change was promised here while it was paused and a resume overtook it."""
        with self._lock:
            return self.steering.holds(step) and not self.stopping

    def _attend(self, step: int) -> None:
        self._settle(step)
        with self._lock:
            due = self.steering.due(step)
        for change in due:
            self._take(change, step)
        self._move_ramps(step)

    def _settle(self, step: int) -> None:
        """Wait for verdicts on what is due; after a moment have the server decide; in the end go on unchanged."""
        began = time.monotonic()
        end, ask = began + self._settings.verdict_seconds, began + PATIENCE
        while waiting := self._undecided(step):
            now = time.monotonic()
            if now >= end:
                with self._lock:
                    for change in waiting:
                        self.steering.skip(change)
                logger.warning("torchLoom: cut off at step %d; %s is not taken here", step, waiting[0].id)
                return
            if now >= ask:
                ask = now + ASK_AGAIN
                for change in waiting:
                    self.resolve(change)
            self._news.wait(min(ask, end) - now)
            self._news.clear()

    def _undecided(self, step: int) -> list[Committed]:
        with self._lock:
            return self.steering.undecided(step)

    def _take(self, change: Committed, step: int) -> None:
        ok, result = True, ""
        try:
            match change.action:
                case "set":
                    self._set(change, step)
                case "pause":
                    with self._lock:
                        self.steering.set_paused(True)
                    logger.warning("torchLoom: paused at step %d by %s", step, change.id)
                case "stop":
                    self.stopping = True
                    logger.warning("torchLoom: asked to stop at step %d by %s", step, change.id)
                case "checkpoint":
                    result = "" if self.save is None else one_line(self.save(step) or "")
        except Exception as error:  # noqa: BLE001  the user's setter or saver
            ok, result = False, one_line(f"{type(error).__name__}: {error}")
            logger.warning("torchLoom: %s failed at step %d: %s", change.id, step, result)
        with self._lock:
            answer = self.steering.done(change, step, ok, result)
        self.answer(answer)

    def _set(self, change: Committed, step: int) -> None:
        before = {name: self._now(name) for name in change.values}
        with self._lock:
            self.steering.begin_ramp(change, before)
        if not change.over or step >= change.step + change.over:
            try:
                for name, value in change.values.items():
                    self._give(name, value)
            except Exception:
                for name, value in before.items():  # all of it or nothing
                    with contextlib.suppress(Exception):
                        self._give(name, value)
                raise

    def _move_ramps(self, step: int) -> None:
        if not self.steering.ramps:
            return
        with self._lock:
            ramps = list(self.steering.ramps)
            self.steering.end_ramps(step)
        for moving in ramps:
            share = (step - moving.change.step) / moving.change.over
            for name, value in moving.change.values.items():
                self._give(name, ramp(moving.before[name], value, share))

    def _now(self, name: str) -> Value:
        return self.knobs[name].read() if name in self.knobs else self._values.get(name, 0.0)

    def _give(self, name: str, value: Value) -> None:
        self._values[name] = value
        if name in self.knobs:
            self.knobs[name].turn(value)

    def _turn(self, knob: Knob, value: Value) -> None:
        try:
            knob.turn(check(knob.spec, value))
        except Exception as error:  # noqa: BLE001  a value of an earlier script, a user's setter
            logger.warning("torchLoom: %s keeps %r: %s", knob.spec.name, knob.value, error)

    def _orphaned(self, since: float | None) -> float | None:
        """A pause that nobody can end any more ends by itself."""
        if self.linked():
            return None
        now = time.monotonic()
        since = now if since is None else since
        if now - since > self._settings.pause_orphan_seconds:
            logger.warning("torchLoom: paused without a link for %.0f s; going on", now - since)
            self.set_paused(False)
        return since

    # ── the script's checkpoint ──────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            newest, taken = self.steering.newest, dict(self.steering.taken)
        values = {name: knob.read() for name, knob in self.knobs.items()}
        return {"step": self._meter.step_number, "knobs": values, "change": newest, "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Values as they were; changes taken before are not taken again."""
        for name, value in state["knobs"].items():
            self._values[name] = kept = tuple(value) if isinstance(value, list) else value
            if name in self.knobs:
                self._turn(self.knobs[name], kept)
        with self._lock:
            self.steering.remember(state["taken"])
        self.resume_at(int(state["step"]))

    def resume_at(self, step: int) -> None:
        """The training goes on after this step: what was changed up to it is in force now."""
        self._meter.resume_at(step)
        self.reach(step)

    # ── a peer that heals ────────────────────────────────────────────────────────────────────────────────────────────

    def handover(self, source: str) -> Handover:
        """For a peer that takes over the state of this rank. From any thread, while no boundary is attended to."""
        steering, values = self.steering, self.values()
        with self._lock:
            return Handover(
                source=source,
                knobs=values,
                newest=steering.newest,
                taken=dict(steering.taken),
                given=dict(steering.given),
                ramps=tuple(Ramping(change=ramp.change, before=ramp.before) for ramp in steering.ramps),
            )

    def take_over(self, theirs: Handover, step: int) -> None:
        """Have the values that the peer has, and go on after this step. What was set for this rank alone stays."""
        with self._lock:
            ended, own = self.steering.adopt(theirs)
        for name, value in theirs.knobs.items():
            knob = self.knobs.get(name)
            if name not in own and (knob is None or knob.spec.per == "job"):
                self._values[name] = value
                if knob is not None:
                    self._turn(knob, value)
        for change, answer in ended:
            self.stopping = self.stopping or change.action == "stop"
            self.answer(answer)
        self.resume_at(step)

    # ── called by the link ───────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, change: Committed) -> None:
        if self.refusal:
            raise BadValue(change.action, True, self.refusal)
        for name, value in change.values.items():
            if name not in self.knobs:
                raise BadValue(name, value, "this rank has no such knob")
            check(self.knobs[name].spec, value)
        if change.action == "checkpoint" and self.save is None:
            raise BadValue("checkpoint", True, "this rank has registered no function that saves one")

    def propose(self, proposal: Propose) -> Ready:
        with self._lock:
            return self.steering.propose(proposal, lambda: self._meter.step_number)

    def hear(self, verdict: Verdict) -> Applied | None:
        with self._lock:
            answer = self.steering.hear(verdict)
        self._news.set()
        return answer

    def welcome(self, changes: tuple[Committed, ...]) -> None:
        with self._lock:
            self.steering.welcome(changes)
        self._news.set()

    def standing(self, id: str, values: bool = False) -> Standing:
        return Standing(
            incarnation=self.steering.incarnation,
            id=id,
            step=self._meter.step_number,
            step_seconds=self._meter.typical(),
            paused=self.steering.paused,
            knobs=self.values() if values else {},
        )

    def rename(self, incarnation: str) -> None:
        """The rank goes on as a newer life."""
        with self._lock:
            self.steering.incarnation = incarnation

    def set_paused(self, paused: bool) -> None:
        with self._lock:
            self.steering.set_paused(paused)
        self._news.set()

    def specs(self) -> tuple[KnobSpec, ...]:
        return tuple(knob.spec for knob in list(self.knobs.values())[:128])

    def values(self) -> dict[str, Value]:
        """As they are now; what a knob could not be set to (NaN, an object) is not told."""
        told = {}
        for name, knob in list(self.knobs.items())[:64]:
            with contextlib.suppress(Exception):  # whatever the script has put there
                told[name] = check(knob.spec, knob.read())
        return told


def one_line(text: object) -> str:
    """What a script said, for a line in the log."""
    return " ".join(str(text)[:4000].split())[:500]
