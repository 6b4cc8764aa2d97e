"""A checkpoint is loaded by another number of ranks, by ranks that shard in another way, or by a single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.ranks import job
from tests.checkpoints.training import Counter, Kind, Plan, Training
from torchloom.errors import BadState


def kept(plan: Plan, size: int = 2) -> dict[str, Any]:
    """Three steps of training, saved; the model and the optimizer of all ranks together."""
    with job(size, plan) as ranks:
        ranks.all(Training.train, 3)
        assert ranks.all(Training.save) == [""] * max(size, 1)
        return ranks.all(Training.whole)[0]


@pytest.mark.parametrize(
    ("saved", "loaded", "size"),
    [
        ("ddp", "plain", 0),
        ("fsdp2", "plain", 0),
        ("fsdp1", "plain", 0),
        ("fsdp2", "fsdp2", 1),
        ("fsdp2", "ddp", 1),
        ("fsdp2", "fsdp2", 4),
        ("fsdp1", "fsdp1", 4),
        ("ddp", "ddp", 4),
        ("fsdp2", "ddp", 2),
        ("ddp", "fsdp2", 2),
        ("fsdp1", "fsdp2", 2),
        ("fsdp2", "fsdp1", 2),
    ],
)
def test_what_two_ranks_saved_is_resumed_by_any_number_however_sharded(
    tmp_path: Path, saved: Kind, loaded: Kind, size: int
) -> None:
    plan = Plan(tmp_path, saved, sampler=False)
    whole = kept(plan)
    with job(size, replace(plan, kind=loaded)) as ranks:
        assert ranks.all(Training.resume) == [3] * max(size, 1)
        assert ranks.all(Training.whole) == [whole] * max(size, 1)
        assert [schedule for _, schedule in ranks.all(Training.own)] == [3] * max(size, 1)
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == [""] * max(size, 1)


def test_what_differed_between_ranks_is_refused_by_another_number_and_nothing_is_loaded(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    kept(plan)
    for size, kind in ((0, "plain"), (4, "ddp")):
        with job(size, replace(plan, kind=kind)) as ranks:
            before = ranks.all(Training.print)
            refusals = ranks.outcomes(Training.resume)
            told = [
                f"step-3: sampler differed between 2 ranks, and there {'is' if not size else 'are'} {size or 1} now"
            ] * max(size, 1)
            assert [str(refusal).replace("there are 1", "there is 1") for refusal in refusals] == told
            assert {type(refusal) for refusal in refusals} == {BadState}
            assert ranks.all(Training.print) == before


def test_not_strictly_it_begins_anew_and_the_rest_goes_over(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    whole = kept(plan)
    for size, kind in ((0, "plain"), (4, "ddp")):
        with job(size, replace(plan, kind=kind)) as ranks:
            ranks.all(Training.resume, strict=False)
            assert ranks.all(Training.own) == [(rank * 1000, 3) for rank in range(max(size, 1))]
            assert ranks.all(Training.whole) == [whole] * max(size, 1)


def test_a_part_that_merges_the_states_of_ranks_goes_over_unless_it_refuses(tmp_path: Path) -> None:
    plan = Plan(tmp_path, sampler=False)
    with job(2, plan) as ranks:
        ranks.all(Training.train, 1)
        for rank, count in enumerate((3, 4)):
            ranks.all(Training.add, "counter", Counter(count), rank)
        assert ranks.all(Training.save) == ["", ""]
    with job(0, replace(plan, kind="plain")) as alone:
        alone.all(Training.add, "counter", Counter())
        alone.all(Training.resume)
        assert [counter.count for counter in alone.all(Training.part, "counter")] == [7]
        alone.all(Training.add, "counter", Counter(1, most=6))
        (refusal,) = alone.outcomes(Training.resume)
        assert (type(refusal), str(refusal)) == (BadState, "step-1: 7 is too much")
        assert alone.all(Training.resume, strict=False) == [1]
        assert [counter.count for counter in alone.all(Training.part, "counter")] == [1], "as it was"


def test_one_file_of_one_process_is_resumed_by_two_replicas(tmp_path: Path) -> None:
    plan = Plan(tmp_path, "plain", sampler=False)
    whole = kept(plan, 0)
    with job(2, replace(plan, kind="ddp")) as ranks:
        assert ranks.all(Training.resume) == [3, 3]
        assert ranks.all(Training.whole) == [whole, whole]
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_one_file_of_one_process_is_refused_by_a_sharded_model(tmp_path: Path, kind: Kind) -> None:
    plan = Plan(tmp_path, "plain", sampler=False)
    kept(plan, 0)
    with job(2, replace(plan, kind=kind)) as ranks:
        before = ranks.all(Training.print)
        for refusal in ranks.outcomes(Training.resume):
            assert isinstance(refusal, BadState)
            assert "was saved by one process, as one file; a model sharded over ranks cannot take it" in str(refusal)
        assert ranks.all(Training.print) == before


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_one_process_can_load_all_of_it(tmp_path: Path, kind: Kind) -> None:
    plan = Plan(tmp_path, kind)
    whole = kept(plan)
    with job(0, replace(plan, kind="plain")) as alone:
        (loaded,) = alone.all(Training.load, strict=False)
        (refusal,) = alone.outcomes(Training.load)
    assert {key: value for key, value in loaded.items() if key in whole} == whole
    assert loaded["schedule.last_epoch."] == 3
    assert not [key for key in loaded if key.startswith("sampler")]
    assert "sampler differed between its 2 ranks" in str(refusal)


def test_plain_values_go_over_to_any_number_of_ranks_whatever_stands_in_their_place(tmp_path: Path) -> None:
    plan = Plan(tmp_path, sampler=False)
    value = {"seen": 12, "names": ["a", "b"], "best": None, "empty": {}, "pair": (1, 2.5), 3: {"deep": [1, {"er": 2}]}}
    with job(2, plan) as ranks:
        ranks.all(Training.train, 1)
        ranks.all(Training.add, "epoch", 5)
        ranks.all(Training.add, "extra", value)
        assert ranks.all(Training.save) == ["", ""]
    for size, kind in ((0, "plain"), (2, "ddp"), (4, "fsdp2")):
        with job(size, replace(plan, kind=kind)) as ranks:
            ranks.all(Training.add, "epoch", 0)
            ranks.all(Training.add, "extra", {"names": [], "other": 7})
            ranks.all(Training.resume)
            assert ranks.all(Training.part, "epoch") == [5] * max(size, 1)
            assert ranks.all(Training.part, "extra") == [value] * max(size, 1)


def test_a_plain_value_that_differs_between_ranks_is_kept_for_each(tmp_path: Path) -> None:
    plan = Plan(tmp_path, sampler=False)
    with job(2, plan) as ranks:
        for rank in (0, 1):
            ranks.all(Training.add, "sampler", {"position": 70 + rank}, rank)
        assert ranks.all(Training.save) == ["", ""]
    with job(2, replace(plan, sampler=True)) as ranks:  # with the object it is the state of
        ranks.all(Training.resume)
        assert [position for position, _ in ranks.all(Training.own)] == [70, 71]


def test_tensors_that_belong_to_no_module_go_over(tmp_path: Path) -> None:
    plan = Plan(tmp_path, sampler=False)
    with job(2, plan) as ranks:
        ranks.all(Training.add, "average", {"weights": [torch.ones(3), torch.arange(4)], "over": 9})
        assert ranks.all(Training.save) == ["", ""]
    for size, kind in ((0, "plain"), (2, "fsdp2"), (4, "ddp")):
        with job(size, replace(plan, kind=kind)) as ranks:
            ranks.all(
                Training.add, "average", {"weights": [torch.zeros(3), torch.zeros(4, dtype=torch.int64)], "over": 0}
            )
            ranks.all(Training.resume)
            for average in ranks.all(Training.part, "average"):
                assert average["over"] == 9
                assert torch.equal(average["weights"][0], torch.ones(3))
                assert torch.equal(average["weights"][1], torch.arange(4))


def test_plain_tensors_are_each_ranks_own_in_whatever_they_lie(tmp_path: Path) -> None:
    plan = Plan(tmp_path, sampler=False)
    with job(2, plan) as ranks:
        for rank in (0, 1):
            ranks.all(Training.add, "hidden", torch.full((3,), float(rank)), rank)
            ranks.all(Training.add, "pair", (torch.full((2,), float(rank)), {0: torch.zeros(1)}), rank)
            ranks.all(Training.add, "best", {"w": torch.full((2,), float(rank))}, rank)
        assert ranks.all(Training.save) == ["", ""]
    with job(2, plan) as ranks:
        ranks.all(Training.add, "hidden", None)
        ranks.all(Training.add, "pair", None)
        ranks.all(Training.add, "best", None)  # as in a run that has none yet
        ranks.all(Training.resume)
        for rank, (hidden, pair, best) in enumerate(
            zip(*(ranks.all(Training.part, name) for name in ("hidden", "pair", "best")), strict=True)
        ):
            assert torch.equal(hidden, torch.full((3,), float(rank)))
            assert torch.equal(pair[0], torch.full((2,), float(rank)))
            assert list(pair[1]) == [0]
            assert torch.equal(best["w"], torch.full((2,), float(rank)))
