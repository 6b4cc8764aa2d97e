"""An incident told to a person: everything that matters, in the order it is asked for, within the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.views.samples import NOW, incident
from torchloom.core.incidents.rule_lookup import planned
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import About
from torchloom.protocol.views import Goodput, IncidentView
from torchloom.views import why
from torchloom.views.format.numbers import clock, coarse
from torchloom.views.format.tables import Screen, columns_of
from torchloom.views.job_runs import goodput
from torchloom.views.listings import incidents
from torchloom.views.wording.phrases import render, shorten

STACKS = (
    "where the ranks were on n1:\n"
    "  ranks 0-2, 4-7 wait in all_reduce (distributed_c10d.py:2806), called from train (train.py:40)\n"
    "  rank 3 is in read (data.py:17)  <- the odd one out"
)


def hang(id: str = "i7", **more: Any) -> IncidentView:
    known: dict[str, Any] = {
        "kind": "hang", "what": "mnist: rank 3 hangs", "short": "rank 3 hangs",
        "about": About(rank=RankId("mnist", "main", 3), part="hang"), "opened": NOW - 300,
        "closed": NOW - 108, "evidence": ("rank 3 finished step 1203, others step 1204", STACKS),
        "decision": "the stacks of all ranks are taken, then all ranks are ended, then started again from the newest "
        "valid checkpoint", "brief": "stacks, then restart", "decided": NOW - 120,
        "reason": "rank 3 hangs: it was not a long step", "stopped": "mnist",
        "outcome": "started again from step 1100 as attempt 2",
        "lost_steps": 104, "lost_seconds": 192.0,
    }  # fmt: skip
    known["history"] = ((NOW - 300, "decided: wait"), (NOW - 120, "all ranks of attempt 1 are ended"))
    return incident(id, **known | more)


def text(view: IncidentView) -> str:
    return "\n".join(why.incident(view, NOW, Screen()))


def test_the_whole_story() -> None:
    assert why.incident(hang(), NOW, Screen()) == [
        "i7 · hang · mnist · over after 3 min 12 s",
        "rank 3 hangs: it was not a long step",
        f"when      {clock(NOW - 300, NOW)}, 5 min ago; over at {clock(NOW - 108, NOW)}, after 3 min 12 s",
        "blame     rank 3 of mnist",
        "evidence  rank 3 finished step 1203, others step 1204",
        "          where the ranks were on n1:",
        "            ranks 0-2, 4-7 wait in all_reduce (distributed_c10d.py:2806), called from train (train.py:40)",
        "            rank 3 is in read (data.py:17)  <- the odd one out",
        "decided   the stacks of all ranks are taken, then all ranks are ended, then started again from the newest "
        "valid checkpoint",
        f"done      {clock(NOW - 300, NOW)}  decided: wait",
        f"          {clock(NOW - 120, NOW)}  all ranks of attempt 1 are ended",
        "outcome   started again from step 1100 as attempt 2",
        "cost      3 min 12 s from its first sign until all ranks ran again, 104 steps to be done again",
    ]


def test_why_it_was_decided_is_said_unless_it_was_said_before() -> None:
    assert "because   it may go on by itself\n" in text(hang(stopped="", reason="it may go on by itself"))
    assert "because" not in text(hang(stopped="", reason="rank 3 hangs"))


def test_the_odd_one_out_catches_the_eye() -> None:
    lines = why.incident(hang(), NOW, Screen(colour=True))
    (odd,) = [line for line in lines if "odd one out" in line]
    assert "\x1b[33m" in odd
    assert not any("\x1b[33m" in line for line in lines if line != odd)


def test_one_that_is_open_says_so_and_has_cost_nothing_yet() -> None:
    told = text(hang(closed=None, outcome="", lost_steps=None, lost_seconds=None))
    assert told.startswith("i7 · hang · mnist · open\n")
    assert "outcome   it is not over" in told
    assert "cost" not in told


def test_no_step_may_have_been_lost() -> None:
    assert text(hang(lost_steps=0)).endswith("until all ranks ran again, no step to be done again")
    assert text(hang(lost_steps=1)).endswith("1 step to be done again")


@pytest.mark.parametrize(
    ("about", "more", "told"),
    [
        (About(rank=RankId("mnist", "hi", 1)), {"kind": ""}, "rank 1 of mnist, replica hi"),
        (About(run="mnist", part="hang"), {"culprits": (1, 2)}, "several ranks, named above"),
        (About(run="mnist", part="hang"), {}, "no rank stands out"),
        (About(job="mnist", part="loss_spike"), {"kind": "loss_spike"}, "the job as a whole"),
        (About(run="mnist"), {"kind": ""}, "no rank in particular"),
        (About(node="n1", part="agent"), {"kind": ""}, "the agent on n1"),
        (About(device="GPU-1", part="hot"), {"kind": "device_warning", "job": ""}, "device GPU-1"),
    ],
)
def test_who_is_to_blame(about: About, more: dict[str, Any], told: str) -> None:
    assert f"blame     {told}\n" in text(hang(about=about, **more))


def test_of_a_long_output_the_end_is_told() -> None:
    told = text(hang(evidence=("\n".join(f"line {number}" for number in range(100)),)))
    assert "… 80 lines before (-o json has them)" in told
    assert "line 99" in told
    assert "line 79" not in told


def test_what_ranks_printed_cannot_command_the_terminal() -> None:
    assert "\x1b" not in text(hang(evidence=("\x1b[2J",), what="\x1b[2J", history=((NOW, "\x1b[2J"),), outcome="\x07"))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    views = [hang(), hang("i6"), hang("i5", closed=None)]
    lines = why.job("mnist", views, "mnist is running: " + "x" * 200, SPENT, NOW, Screen(width=width))
    assert all(columns_of(line) <= width for line in lines)
    assert all(columns_of(line) <= width for line in incidents(views, NOW, Screen(width=width)))


SPENT = Goodput(elapsed=3600, productive=3240, lost={"starting": 12, "hang": 192, "redone": 156})


@pytest.mark.parametrize("width", range(30, 100))
def test_a_number_is_not_torn_from_its_unit(width: int) -> None:
    lines = why.job("mnist", [], "", SPENT, NOW, Screen(width=width))
    assert not any(line.split()[0] in {"s", "min", "%"} for line in lines if line)
    assert not any("\N{NO-BREAK SPACE}" in line for line in lines)


def test_of_a_job_the_open_one_is_told_and_the_others_are_listed() -> None:
    views = [hang(), hang("i6", closed=None, opened=NOW - 400), hang("i5", opened=NOW - 4000)]
    lines = why.job("mnist", views, "mnist is running", SPENT, NOW, Screen())
    assert lines[0] == "job       mnist is running"
    assert lines[1] == (
        "goodput   90 % of 1 h was productive; lost: hang 3 min 12 s, steps that had to be done again 2 min 36 s, "
        "starting 12 s"
    )
    assert lines[3].startswith("i6 · hang · mnist · open")
    assert [line.split()[0] for line in lines[-3:]] == ["ID", "i7", "i5"]


def test_of_many_others_the_latest_are_listed() -> None:
    lines = why.job("mnist", [hang(f"i{n}", opened=NOW - n) for n in range(30)], "", None, NOW, Screen())
    assert lines[-1] == "… and 19 more (`loom incidents --job mnist`)"
    assert [line.split()[0] for line in lines[-11:-1]] == [f"i{n}" for n in range(1, 11)]
    assert lines[-12].startswith("ID")


def test_a_job_without_incidents() -> None:
    assert why.job("mnist", [], "", None, NOW, Screen()) == ["nothing went wrong with mnist"]
    assert why.job("mnist", [], "mnist is running", SPENT, NOW, Screen())[-1] == "nothing went wrong with mnist"


# ── the list ──


def test_a_line_of_the_list() -> None:
    head, closed, open_one = incidents([hang(), incident(closed=None, kind="crash", brief="report")], NOW, Screen())
    assert head.split() == ["ID", "AGE", "KIND", "ABOUT", "STATE", "WHAT", "DECISION"]
    assert (
        closed == "i7  5 min  hang   mnist  over in 3 min  rank 3 hangs: it was not a long step  stacks, then restart"
    )
    assert open_one == "i7  1 min  crash  mnist  open           its link closed                       report"


@pytest.mark.parametrize(
    ("decision", "told"),
    [
        (
            phrase("if_it_lasts", seconds=180.0, policy=planned("stacks", "report"), keeps=True),
            "after 3 min: stacks, then report",
        ),
        (phrase("job_given_up"), "given up"),
        (phrase("not_ours_to_restart"), "report"),
        (planned("evict"), "evict"),
        (
            phrase("together", parts=[phrase("decided_for", job=job, decision=planned("restart")) for job in "ab"]),
            "for a: restart",
        ),
        (phrase("decided", decision=planned("pause")), "decided: pause"),
        (
            phrase("policy_held_back", why=phrase("policy_dry_run"), policy=planned("restart")),
            "nothing: this is a dry run of the policy",
        ),
        (phrase("rank_waited_for", seconds=3.0), "wait 3 s for it to come back"),
        ("", ""),
    ],
)
def test_a_decision_in_few_words(decision: Prose, told: str) -> None:
    assert render(shorten(decision)) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.34, "0.3 s"), (3.4, "3 s"), (42, "42 s"), (59.7, "1 min"), (192, "3 min"), (7300, "2 h"), (90_000, "1 d")],
)
def test_one_unit_is_enough_in_a_column(seconds: float, told: str) -> None:
    assert coarse(seconds) == told


# ── goodput ──


def test_goodput_in_a_line() -> None:
    assert goodput(Goodput(elapsed=10, productive=10)) == "100 % of 10 s was productive"
    assert goodput(Goodput(elapsed=0, productive=0)) == "0 % of 0.0 s was productive"
    lost = {"waiting": 30.0, "crash": 0.01}
    assert goodput(Goodput(elapsed=60, productive=30, lost=lost)) == (
        "50 % of 1 min was productive; lost: waiting for room 30 s"
    )
