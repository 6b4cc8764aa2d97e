"""Knobs, changes and answers as people read them."""

from __future__ import annotations

import pytest

from tests.views.samples import LIFE, NOW, change, knob, knobs
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.operator import Done
from torchloom.protocol.views import NodeView
from torchloom.views import listings
from torchloom.views.answers import answer
from torchloom.views.format.numbers import clock
from torchloom.views.format.tables import Screen, columns_of


def test_a_knob_shows_its_value_bounds_and_who_changed_it() -> None:
    head, *lines = listings.knobs(knobs().knobs, NOW, Screen())
    assert head.split() == ["NAME", "VALUE", "BOUNDS", "UNIT", "CHANGED", "BY", "HELP"]
    assert [line.split()[0] for line in lines] == ["accumulate", "betas", "log_level", "lr", "shuffle"]
    shown = "\n".join(lines)
    assert f"lr          0.01       0..1            -     {clock(NOW - 30, NOW)} c3  ann@box  step size" in shown
    assert "DEBUG | INFO" in shown
    assert "0.9,0.999" in shown
    assert "bool, per rank" in shown
    assert "1..64" in shown


def test_a_knob_that_nobody_changed_says_so_and_has_its_unit() -> None:
    line = listings.knobs([knob("wait", spec={"unit": "s", "help": ""})], NOW, Screen())[1]
    assert line.split() == ["wait", "0.1", "0..1", "s", "-", "-", "-"]


def test_a_change_says_who_from_what_to_what_and_how_it_ended() -> None:
    head, line = listings.changes([change()], NOW, Screen())
    assert head.split() == ["ID", "WHEN", "WHO", "WHAT", "STEP", "OUTCOME", "REVERTED", "BY"]
    assert line.split("  ") == [
        "c3", clock(NOW - 30, NOW), "ann@box", "lr 0.1 → 0.01", "1,520",
        "settled: applied at step 1520 on 2 ranks", "-",
    ]  # fmt: skip


def test_a_change_of_a_part_over_some_steps_and_reverted() -> None:
    line = listings.changes([change(target="mnist/hi", over=1000, reverted_by="c4")], NOW, Screen())[1]
    assert "lr 0.1 → 0.01 over 1,000 steps on mnist/hi " in line
    assert line.endswith(" c4")


def test_a_change_that_is_no_value_and_one_under_way() -> None:
    line = listings.changes([change(action="pause", values={}, before={})], NOW, Screen())[1]
    assert "  pause  " in line
    assert "  proposed  " in listings.changes([change(phase="proposed", outcome="")], NOW, Screen())[1]
    coloured = listings.changes([change(phase="aborted", outcome="hi/0 refuses")], NOW, Screen(colour=True))[1]
    assert "\x1b[33maborted: hi/0 refuses\x1b[0m" in coloured


def test_both_fit_a_narrow_terminal() -> None:
    for lines in (
        listings.knobs(knobs().knobs, NOW, Screen(width=60)),
        listings.changes([change(operator="x" * 80)], NOW, Screen(width=60)),
    ):
        assert all(columns_of(line) <= 60 for line in lines)


def test_an_answer_has_what_each_rank_said() -> None:
    ranks = [RankId("mnist", "hi", i) for i in range(6)]
    done = Done(text="c4: saved", replicas=(ReplicaId("mnist", "hi"),), results=((ranks[0], "/a"), (ranks[1], "/b")))
    assert answer(done, Screen()) == ["c4: saved", "  mnist/hi", "  mnist/hi/0: /a", "  mnist/hi/1: /b"]
    same = Done(text="saved", results=tuple((rank, "/a") for rank in ranks))
    assert answer(same, Screen())[1] == "  mnist/hi/0, mnist/hi/1, mnist/hi/2, mnist/hi/3 and 2 more: /a"


def test_stacks_stand_under_a_heading_equal_ones_together_and_cannot_command_the_terminal() -> None:
    a, b, c = (RankId("mnist", "hi", i) for i in range(3))
    waiting, working = "Thread main\n  in wait\x1b[2J\n", "Thread main\n  in work\n"
    done = Done(text="o1: applied on 3 ranks", results=((a, waiting), (b, working), (c, waiting)))
    assert answer(done, Screen()) == [
        "o1: applied on 3 ranks",
        "", "── mnist/hi/0, mnist/hi/2", "Thread main", "  in wait\N{REPLACEMENT CHARACTER}[2J",
        "", "── mnist/hi/1", "Thread main", "  in work",
    ]  # fmt: skip


@pytest.mark.parametrize(("used", "shown"), [(3, " 3/4 "), (6, " \x1b[33m6 of 4\x1b[0m ")])
def test_a_node_with_more_ranks_than_it_has_room_for_says_so(used: int, shown: str) -> None:
    beat = NodeBeat(incarnation=LIFE, host="n1", cores=4, memory_mb=1024)
    view = NodeView(node="n1", beat=beat, heard=NOW, used=used)
    assert shown in listings.nodes([view], NOW, Screen(colour=True))[1]
