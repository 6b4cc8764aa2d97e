"""A job of two ranks with knobs, and requests to change it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.core.loom import Loom, life
from torchloom.core.events import ReplyReceived, ReportReceived
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import SetKnobs, Steer
from torchloom.protocol.rank import (
    Knobs,
    KnobSpec,
    StepReport,
)

A, B = RankId("mnist", "r", 0), RankId("mnist", "r", 1)
KNOBS = (
    KnobSpec(name="lr", kind="float", value=0.1, low=0.0, high=1.0),
    KnobSpec(name="batch", kind="int", value=32, low=1),
    KnobSpec(name="tag", kind="text", value="a"),
    KnobSpec(name="depth", kind="int", value=1, per="rank"),
)


def request(number: int) -> str:
    return f"{number:032x}"


def a_job(*ranks: RankId, saves: bool = True) -> Loom:
    loom = Loom()
    for rank in ranks or (A, B):
        loom.join(rank, world_size=2, link=f"s:{rank.rank}")
        loom.happen(ReportReceived(rank, Knobs(incarnation=life(1), knobs=KNOBS, checkpoints=saves)))
    loom.sent.clear()
    return loom


def a_set(number: int = 1, *, operator: str = "ann", **about: object) -> SetKnobs:
    wanted: dict[str, object] = {"values": {"lr": 0.5}} | about
    return SetKnobs(request=request(number), job="mnist", operator=operator, **wanted)  # type: ignore[arg-type]


def a_steer(verb: str, number: int = 1, **about: object) -> Steer:
    return Steer(request=request(number), verb=verb, job="mnist", operator="ann", **about)  # type: ignore[arg-type]


def stand(loom: Loom, step: int = 10, number: int = 1, ranks: Iterable[RankId] = (A, B), paused: bool = False) -> None:
    for rank in ranks:
        standing = StepReport(incarnation=life(1), id=request(number), step=step, step_seconds=0.02, paused=paused)
        loom.happen(ReplyReceived(rank, standing))
