"""`with loom.phase("eval")`: what is reported, and what it does to the time of steps."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threadlet.played import RANK, PlayedWeaver
from torchloom import Checkpoints, Threadlet, attach
from torchloom.errors import BadInput
from torchloom.settings import Settings
from torchloom.shared.liveness_page import view

NOBODY = Settings(state="nobody")


@pytest.fixture
def loom() -> Threadlet:
    return attach("job", "hi", settings=NOBODY)


def shown() -> str:
    """What someone who watches sees."""
    page = view(os.getpid())
    assert page is not None
    return page.phase


def generate(loom: Threadlet) -> None:
    with loom.phase("generate"):
        assert shown() == "generate"
        raise ZeroDivisionError


def test_phases_may_stand_within_each_other_and_end_with_an_error(loom: Threadlet) -> None:
    loom.step()
    with loom.phase("eval"):
        assert shown() == "eval"
        with pytest.raises(ZeroDivisionError):
            generate(loom)
        assert shown() == "eval"
    assert shown() == ""


def test_before_the_first_step_it_is_the_start(loom: Threadlet) -> None:
    assert shown() == "start"
    with loom.phase("eval"):
        assert shown() == "start"
        loom.step()
        assert shown() == "eval"
    assert shown() == ""


def test_what_another_thread_does_is_not_what_the_training_does(loom: Threadlet) -> None:
    loom.step()
    seen = []

    def beside() -> None:
        with loom.phase("upload"):
            seen.append(shown())

    with loom.phase("eval"):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert (seen, shown()) == (["eval"], "eval")


@pytest.mark.parametrize("name", ["", "a b", "x" * 33, "é", "a\n", 5, None])
def test_a_name_that_cannot_be_told_is_refused(loom: Threadlet, name: Any) -> None:
    with pytest.raises(BadInput, match="phase"):
        loom.phase(name)


def test_a_threadlet_that_is_off_or_gone_has_phases_that_do_nothing(loom: Threadlet) -> None:
    loom.step()
    loom.close()
    off = attach("job", "off", settings=Settings(off=True))
    for threadlet in (loom, off):
        with threadlet.phase("eval"):
            assert shown() == "leaving"
        with pytest.raises(BadInput):
            threadlet.phase("a b")


def test_a_checkpoint_that_stalls_training_is_a_phase(loom: Threadlet, tmp_path: Path) -> None:
    seen = []

    class Model:
        def state_dict(self) -> dict[str, Any]:
            seen.append(shown())
            return {"weight": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loom.step()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": Model()})
    assert set(seen) == {"checkpoint"}
    assert shown() == ""


async def test_a_beat_tells_the_phase_and_how_long_no_step_was_made(weaver: PlayedWeaver, lively: Settings) -> None:
    loom = attach(RANK.job, RANK.replica, settings=lively)
    first = await weaver.beat(lambda beat: beat.still > 0)
    assert (first.phase, first.collectives) == ("start", None)
    loom.step()
    await weaver.beat(lambda beat: beat.step == 1 and not beat.phase)
    with loom.phase("eval"):
        await weaver.beat(lambda beat: beat.phase == "eval" and beat.still > 0)
