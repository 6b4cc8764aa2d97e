"""What a replica that heals takes over besides its parameters: the values in force, and which changes gave them.

It travels as one more entry of the state that torchft moves. torchft raises if a peer's state lacks an entry that is
registered here, so one that comes from a replica without torchLoom is given an empty one on arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchloom.integrations.torchft.names import inside, logger, replace, warn_once
from torchloom.messages import Healed
from torchloom.threadlet.handover import packed, unpacked
from torchloom.threadlet.helm import Helm

KEY = "torchloom"


class Healing:
    def __init__(self, manager: Any, helm: Helm, replica: str, healed: Callable[[Healed], None]) -> None:
        self._manager = manager
        self._helm = helm
        self._replica = replica
        self._healed = healed
        self._began: float | None = None
        """When the state began to be fetched."""
        self._over = False

    def begin(self) -> Callable[[], None]:
        """What is returned ends it; the entry stays registered, as torchft can not forget one."""
        self._manager.register_state_dict_fn(KEY, self.load, self.save)
        transport = inside(self._manager, "_checkpoint_transport")
        if transport is None:
            return lambda: None
        receive = transport.recv_checkpoint

        def recv_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self._began = time.monotonic()
            state = receive(*args, **kwargs)
            try:
                state["user"].setdefault(KEY, b"")
            except Exception as error:  # noqa: BLE001  another form than this version's
                warn_once(KEY, f"the state of a peer has a form that is not known: {error!r}")
            return state

        return replace(transport, "recv_checkpoint", recv_checkpoint)

    def end(self) -> None:
        self._over = True

    def save(self) -> bytes:
        """For a peer; on torchft's thread, while a step is under way and so no value changes."""
        try:
            return b"" if self._over else packed(self._helm.handover(self._replica))
        except Exception as error:  # noqa: BLE001  it heals all the same, with the values it was welcomed with
            logger.warning("torchLoom: the values could not be handed over to a peer: %r", error)
            return b""

    def load(self, state: Any) -> None:
        """From a peer: this replica is now where that one was. On the thread that trains, at no step boundary."""
        if self._over:
            return
        try:
            self._take_over(state)
        except Exception as error:  # noqa: BLE001  as above
            logger.warning("torchLoom: the values of a peer could not be taken over: %r", error)

    def _take_over(self, state: Any) -> None:
        step, source = self._manager.current_step(), ""
        if state:
            theirs = unpacked(state)
            source = theirs.source
            self._helm.take_over(theirs, step)
        else:
            warn_once("peer", "healed from a replica without torchLoom, which has no values to hand over")
            self._helm.resume_at(step)
        began, self._began = self._began, None
        seconds = 0.0 if began is None else time.monotonic() - began
        self._healed(Healed(incarnation=self._helm.steering.incarnation, step=step, source=source, seconds=seconds))
