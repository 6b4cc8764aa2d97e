"""What the first rank finds out is known on all ranks, at the price of one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints.ranks import job
from tests.checkpoints.training import Plan, Training
from torchloom.checkpoints.coordination import Coordinator, update_coordinator


class Answer:
    """Counts how often it is made into a message."""

    encoded = 0

    def __reduce__(self) -> Any:
        Answer.encoded += 1
        return str, ("found",)


def broadcast(training: Training) -> int:
    assert update_coordinator(Coordinator()).broadcast_from_zero(Answer) is not None
    return Answer.encoded


def test_what_the_first_rank_has_found_is_encoded_once_for_all_ranks(tmp_path: Path) -> None:
    """The description of a checkpoint of a thousand ranks has more than a megabyte."""
    with job(3, Plan(tmp_path)) as ranks:
        assert ranks.all(broadcast) == [1, 0, 0]
