"""Applies changes in the training thread at step boundaries, as the link thread receives them.

The training thread compares one number at each step (`participant.due_step`) and calls `on_step` only when something is
due. There it blocks in two cases: briefly, while a change that it has promised to apply has no verdict; and while the
job is paused.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from torchloom.checkpoints.threadlet_bridge import CheckpointPort
from torchloom.knob_validation import BadValue, check, ramp
from torchloom.protocol.rank import Applied, ChangeSpec, Order, Ordered, Propose, Ready, Reply, Value, Verdict
from torchloom.settings import Settings
from torchloom.threadlet.changes.knob import INTERVAL, Knob, interval_knob
from torchloom.threadlet.changes.participant import Handover, Participant, keep_answer
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.metrics.stacks import format_stacks

logger = logging.getLogger("torchloom")
PATIENCE = 0.1
"""Seconds to wait for a verdict that is probably on its way before writing abort to the server."""
ASK_AGAIN = 0.25
"""Seconds between two attempts to do so: the link may have been lost."""


class Port:
    """How the training thread reaches the server. No method blocks or raises; without a link they do nothing."""

    up = False
    """There is a connection."""

    def reply(self, reply: Reply) -> None: ...
    def resolve(self, change: ChangeSpec) -> None:
        """Obtain a verdict on a change from the server."""

    def announce_knobs(self) -> None:
        """`StepBoundary.offers` has grown."""


class StepBoundary:
    def __init__(self, incarnation: str, meter: Meter, settings: Settings) -> None:
        self.participant = Participant(incarnation, self._accept)
        self.knobs: dict[str, Knob] = {}
        self.stopping = False
        self.counted = False
        """The script has not attached: its steps are counted, and nothing can be changed."""
        self.save: Callable[[int], object] | None = None
        """Writes a checkpoint when an operator asks for one."""
        self._checkpoints_save: Callable[[int], object] | None = None
        """The same, if it comes from `torchloom.Checkpoints` and not from the script."""
        self._interval_knob: Knob | None = None
        self.offers = 0
        """Grows with every knob: the link reports knobs when it has grown."""
        self.port = Port()
        """The link, once it is started."""
        self.meter = meter
        self._settings = settings
        self._orders: dict[str, Ordered] = {}
        self._values: dict[str, Value] = {}
        """Also values of knobs that the script has not created yet."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._inside = False

    # ── called by the training thread ────────────────────────────────────────────────────────────────────────────────

    def add(self, knob: Knob) -> Knob:
        name = knob.spec.name
        if name in self.knobs and self.knobs[name] is not self._interval_knob:
            logger.warning("torchLoom: there are two knobs %s; the newer one counts", name)
        self.knobs[name] = knob
        if name in self._values:
            self._restore(name, self._values[name])
        self.offer()
        return knob

    def replace(self, knob: Knob) -> None:
        """Offer a knob in place of an earlier one of its name: the same thing, made again."""
        self.knobs.pop(knob.spec.name, None)
        self.add(knob)

    def add_checkpoints(self, checkpoints: CheckpointPort) -> None:
        """Offer these checkpoints to operators, unless the script has registered its own function. The newest count."""
        if self.counted:
            return
        if self.save is self._checkpoints_save:
            self.save = self._checkpoints_save = checkpoints.wanted
            self.offer()
        if checkpoints.every is not None and self.knobs.get(INTERVAL) is self._interval_knob:
            self._interval_knob = self.add(interval_knob(checkpoints))

    def offer(self) -> None:
        """Have new knobs reported."""
        self.offers += 1
        self.port.announce_knobs()

    def on_step(self, step: int) -> None:
        """At a step boundary: obtain missing verdicts, apply what is due, wait while paused. Never raises."""
        if self._inside:
            return  # the user's own function called step()
        self._inside = True
        try:
            self._apply_due(step)
            if self._must_wait(step):
                with self.meter.paused():
                    self._wait_while_paused(step)
        except Exception as error:  # noqa: BLE001  training continues
            logger.warning("torchLoom: changes failed at step %d, training continues: %r", step, error)
        finally:
            self._inside = False

    def _wait_while_paused(self, step: int) -> None:
        """Wait until the pause ends. One that nobody can end any more, because the link was lost, ends itself."""
        lost: float | None = None  # since when: not since it was last seen, which may be long ago after a suspension
        while self._must_wait(step):
            self._wake.wait(0.5)
            self._wake.clear()
            self._apply_due(step)
            now = time.monotonic()
            if self.port.up:
                lost = None
            elif lost is None:
                lost = now
            elif now - lost > self._settings.pause_orphan_seconds:
                logger.warning("torchLoom: paused without a link for %.0f s; training continues", now - lost)
                self.set_paused(False)

    def _must_wait(self, step: int) -> bool:
        """Whether to stay at this step: paused, or a change promised during a pause is still open after a resume."""
        with self._lock:
            return self.participant.holds(step) and not self.stopping

    def _apply_due(self, step: int) -> None:
        self._await_verdicts(step)
        with self._lock:
            due = self.participant.due(step)
        for change in due:
            self._apply(change, step)
        self._move_ramps(step)

    def _await_verdicts(self, step: int) -> None:
        """Wait for verdicts on due changes; after a moment ask the server; after a timeout continue unchanged."""
        began = time.monotonic()
        end, ask = began + self._settings.verdict_seconds, began + PATIENCE
        while waiting := self._undecided(step):
            now = time.monotonic()
            if now >= end:
                with self._lock:
                    for change in waiting:
                        self.participant.skip(change)
                logger.warning("torchLoom: no verdict at step %d; %s is not applied here", step, waiting[0].id)
                return
            if now >= ask:
                ask = now + ASK_AGAIN
                for change in waiting:
                    self.port.resolve(change)
            self._wake.wait(min(ask, end) - now)
            self._wake.clear()

    def _undecided(self, step: int) -> list[ChangeSpec]:
        with self._lock:
            return self.participant.undecided(step)

    def _apply(self, change: ChangeSpec, step: int) -> None:
        ok, result, pending = True, "", False
        try:
            match change.action:
                case "set":
                    result = self._set(change, step)
                case "pause":
                    with self._lock:
                        self.participant.set_paused(True)
                    logger.warning("torchLoom: paused at step %d by %s", step, change.id)
                case "stop":
                    self.stopping = True
                    logger.warning("torchLoom: asked to stop at step %d by %s", step, change.id)
                case "checkpoint":
                    result = "" if self.save is None else one_line(self.save(step) or "")
                    pending = self.save is not None and self.save is self._checkpoints_save
        except Exception as error:  # noqa: BLE001  the user's setter or saver
            ok, result = False, one_line(f"{type(error).__name__}: {error}")
            logger.warning("torchLoom: %s failed at step %d: %s", change.id, step, result)
        with self._lock:
            answer = self.participant.done(change, step, ok, result, pending)
        self.port.reply(answer)

    def _set(self, change: ChangeSpec, step: int) -> str:
        """Returns what the knobs say about it, if anything."""
        said: list[str] = []
        before = {name: self._current_value(name) for name in change.values}
        with self._lock:
            self.participant.begin_ramp(change, before)
        if not change.over or step >= change.step + change.over:
            try:
                for name, value in change.values.items():
                    said.append(self._set_value(name, value))
            except Exception:
                for name, value in before.items():  # all values or none
                    with contextlib.suppress(Exception):
                        self._set_value(name, value)
                raise
        return ", ".join(filter(None, said))

    def _move_ramps(self, step: int) -> None:
        if not self.participant.ramps:
            return
        with self._lock:
            ramps = list(self.participant.ramps)
            self.participant.end_ramps(step)
        for moving in ramps:
            share = (step - moving.change.step) / moving.change.over
            for name, value in moving.change.values.items():
                self._set_value(name, ramp(moving.before[name], value, share))

    def _current_value(self, name: str) -> Value:
        return self.knobs[name].read() if name in self.knobs else self._values.get(name, 0.0)

    def _set_value(self, name: str, value: Value) -> str:
        self._values[name] = value
        said = self.knobs[name].turn(value) if name in self.knobs else None
        return one_line(said) if isinstance(said, str) else ""

    def _restore(self, name: str, value: Value) -> None:
        """Set the value if the knob accepts it, now or when the script creates the knob."""
        self._values[name] = value
        knob = self.knobs.get(name)
        if knob is None:
            return
        try:
            knob.turn(check(knob.spec, value))
        except Exception as error:  # noqa: BLE001  a value of an earlier script, a user's setter
            logger.warning("torchLoom: %s keeps %r: %s", name, knob.value, error)

    # ── the script's checkpoint ──────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            newest, taken = self.participant.newest, dict(self.participant.taken)
        values = {name: knob.read() for name, knob in self.knobs.items()}
        return {"step": self.meter.step_number, "knobs": values, "change": newest, "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values; changes that were applied before are not applied again."""
        for name, value in state["knobs"].items():
            self._restore(name, tuple(value) if isinstance(value, list) else value)
        with self._lock:
            self.participant.remember(state["taken"])
        self.resume_at(int(state["step"]))

    def resume_at(self, step: int) -> None:
        """Continue after this step: changes up to it are in force now."""
        self.meter.resume_at(step)
        self.on_step(step)

    # ── a peer that heals ────────────────────────────────────────────────────────────────────────────────────────────

    def handover(self, source: str) -> Handover:
        """For a peer that heals from this rank. From any thread, while the training is not at a step boundary."""
        participant, values = self.participant, self.values()
        with self._lock:
            return Handover(
                source=source,
                knobs=values,
                newest=participant.newest,
                taken=dict(participant.taken),
                given=dict(participant.given),
                ramps=tuple(participant.ramps),
            )

    def take_over(self, theirs: Handover, step: int) -> None:
        """Take over the peer's values and continue after this step. Values set for this rank alone stay."""
        with self._lock:
            ended, own = self.participant.adopt(theirs)
        for name, value in theirs.knobs.items():
            knob = self.knobs.get(name)
            if name not in own and (knob is None or knob.spec.per == "job"):
                self._restore(name, value)
        for change, answer in ended:
            self.stopping = self.stopping or change.action == "stop"
            self.port.reply(answer)
        self.resume_at(step)

    # ── called by the link thread ────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, change: ChangeSpec) -> None:
        if self.counted:
            raise BadValue(change.action, True, "its script does not call torchloom.attach()")
        for name, value in change.values.items():
            if name not in self.knobs:
                raise BadValue(name, value, "this rank has no such knob")
            check(self.knobs[name].spec, value)
        if change.action == "checkpoint" and self.save is None:
            raise BadValue("checkpoint", True, "this rank has registered no function that saves one")

    def propose(self, proposal: Propose) -> Ready:
        with self._lock:
            ready = self.participant.propose(proposal, lambda: self.meter.step_number)
        knobs = [self.knobs[name] for name in proposal.change.values if name in self.knobs]
        place = next((knob.place for knob in knobs if knob.place is not None), None)
        return replace(ready, place=place(proposal.change.finished)) if ready.ok and place is not None else ready

    def hear(self, verdict: Verdict) -> Applied | None:
        with self._lock:
            answer = self.participant.hear(verdict)
        self._wake.set()
        return answer

    def welcome(self, changes: tuple[ChangeSpec, ...]) -> None:
        with self._lock:
            self.participant.welcome(changes)
        self._wake.set()

    def carry_out(self, order: Order) -> Ordered:
        """Carry out an order at once. One received again, also on another connection, gets the same answer again."""
        if order.id not in self._orders:
            text = ""
            if order.verb == "resume":
                text = "" if self.participant.paused else "was not paused"
                self.set_paused(False)
            elif order.verb == "stacks":
                text = format_stacks()
            answer = Ordered(incarnation=order.incarnation, id=order.id, outcome="applied", text=text)
            keep_answer(self._orders, answer)
        return self._orders[order.id]

    def set_paused(self, paused: bool) -> None:
        with self._lock:
            self.participant.set_paused(paused)
        self._wake.set()

    def values(self) -> dict[str, Value]:
        """Current values; one that the knob could not be set to (NaN, an object) is left out."""
        values = {}
        for name, knob in list(self.knobs.items())[:64]:
            with contextlib.suppress(Exception):  # the script may have put anything there
                values[name] = check(knob.spec, knob.read())
        return values


def one_line(text: object) -> str:
    """A text of the script, shortened to one line."""
    return " ".join(str(text)[:4000].split())[:500]
