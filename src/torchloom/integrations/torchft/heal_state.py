"""What a healing replica takes over besides its parameters: knob values, and the changes that set them.

It travels as one more entry of the state that torchft transfers. torchft raises if a peer's state lacks an entry that
is registered here, so a state from a replica without torchLoom gets an empty one on arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from torchloom.integrations.torchft.manager_internals import logger, private_attribute, replace, warn_once
from torchloom.protocol.rank import Healed
from torchloom.shared.json_decoding import decoder
from torchloom.threadlet.changes.participant import Handover
from torchloom.threadlet.changes.step_boundary import StepBoundary

KEY = "torchloom"


class HealState:
    def __init__(self, manager: Any, boundary: StepBoundary, replica: str, healed: Callable[[Healed], None]) -> None:
        self._manager = manager
        self._boundary = boundary
        self._replica = replica
        self._healed = healed
        self._began: float | None = None
        """When the transfer of the state started."""
        self._over = False

    def begin(self, endings: ExitStack) -> None:
        """Register the entry. torchft cannot remove it, so it is empty after the end."""
        self._manager.register_state_dict_fn(KEY, self.load, self.save)
        endings.callback(self.end)
        transport = private_attribute(self._manager, "_checkpoint_transport")
        if transport is None:
            return
        receive = transport.recv_checkpoint

        def recv_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self._began = time.monotonic()
            state = receive(*args, **kwargs)
            try:
                state["user"].setdefault(KEY, b"")
            except Exception as error:  # noqa: BLE001  another version of torchft
                warn_once(KEY, f"the state of a peer has a form that is not known: {error!r}")
            return state

        replace(transport, "recv_checkpoint", recv_checkpoint, endings)

    def end(self) -> None:
        self._over = True

    def save(self) -> bytes:
        """The entry for a peer. Called on torchft's thread during a step, in which no value changes."""
        try:
            return b"" if self._over else msgspec.json.encode(self._boundary.handover(self._replica))
        except Exception as error:  # noqa: BLE001  the peer heals anyway, with the values of its welcome
            logger.warning("torchLoom: the values could not be handed over to a peer: %r", error)
            return b""

    def load(self, state: Any) -> None:
        """Take over a peer's entry. Called on the training thread, not at a step boundary."""
        if self._over:
            return
        try:
            self._take_over(state)
        except Exception as error:  # noqa: BLE001  as above
            logger.warning("torchLoom: the values of a peer could not be taken over: %r", error)

    def _take_over(self, state: Any) -> None:
        step, source = self._manager.current_step(), ""
        if state:
            theirs = decoder(Handover)(state)
            source = theirs.source
            self._boundary.take_over(theirs, step)
        else:
            warn_once("peer", "healed from a replica without torchLoom, which has no values to hand over")
            self._boundary.resume_at(step)
        began, self._began = self._began, None
        seconds = 0.0 if began is None else time.monotonic() - began
        incarnation = self._boundary.participant.incarnation
        self._healed(Healed(incarnation=incarnation, step=step, source=source, seconds=seconds))
