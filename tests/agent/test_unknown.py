"""What `loom run` says of a script that never attaches."""

from __future__ import annotations

import pytest

from tests.views.samples import rank
from torchloom.launcher.unattached_hint import COUNTED, NOTHING, PATIENCE, UnattachedHint, script_of, unknown
from torchloom.protocol.job import Task
from torchloom.protocol.views import RankView

ATTACHED, COUNTING, GONE = rank(), rank(number=1, counted=True), rank(number=2, counted=True, presence="dead")


@pytest.mark.parametrize(
    ("ranks", "seconds", "what", "over"),
    [
        ([ATTACHED], 0, "", True),
        ([ATTACHED, COUNTING], PATIENCE, "", True),
        ([COUNTING], 0, COUNTED, True),
        ([GONE], 0, "", False),
        ([], PATIENCE - 1, "", False),
        ([], PATIENCE, NOTHING, False),
    ],
)
def test_what_is_not_known(ranks: list[RankView], seconds: float, what: str, over: bool) -> None:
    assert unknown(ranks, seconds) == (what, over)


def test_it_is_said_once_without_a_claim_about_the_script_and_corrected_if_steps_come_late() -> None:
    said: list[str] = []
    teller = UnattachedHint("train", "train.py", said.append)
    for seconds in (0, PATIENCE, PATIENCE + 1):
        teller._judge([], seconds)
    teller._judge([COUNTING], PATIENCE + 2)
    assert said == [f"train.py {what}" for what in (NOTHING, COUNTED)]
    assert said[0] == "train.py has said nothing yet, after 30 s: its steps are not known"
    assert said[1].startswith("train.py does not call torchloom.attach(): its steps are counted")
    assert teller.over


def test_a_module_is_called_by_its_name() -> None:
    assert script_of(Task(argv=("-m", "package.train", "-m"))) == "package.train"
    assert script_of(Task(argv=("train.py", "--lr", "1"))) == "train.py"
