"""What a threadlet asks of someone else who counts the steps of its training."""

from __future__ import annotations

from typing import Any, Protocol


class Commits(Protocol):
    """Called by the training, instead of counting its calls of step(). Never raises."""

    def note(self, loss: Any, samples: Any, metrics: dict[str, Any]) -> None:
        """What the script says of the latest step."""

    def attend(self) -> None:
        """The script asks for what is to be done after the latest step."""

    def end(self) -> None:
        """The goodbye was said."""
