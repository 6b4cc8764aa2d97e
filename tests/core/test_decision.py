"""Every incident gets a number of its own, and what refers to it does so by that number."""

from __future__ import annotations

import pytest

from torchloom.core.decision import Decision, number_incidents, provisional
from torchloom.protocol.node import Inspect, Rollback
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, OrderGiven
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan

FIRST, SECOND = provisional("lost", "a"), provisional("lost", "b")


def opened(id: str) -> IncidentOpened:
    return IncidentOpened(id=id, what="w", about=About(job="a"))


def test_incidents_of_one_decision_are_numbered_in_the_order_in_which_they_are_opened() -> None:
    numbered = number_incidents(Decision((opened(FIRST), opened(SECOND))), count=7)
    assert [record.id for record in numbered.records] == ["i8", "i9"]


def test_whatever_refers_to_a_new_incident_has_its_number() -> None:
    back = Rollback(before=3, incident=SECOND)
    decision = Decision(
        (
            opened(FIRST),
            opened(SECOND),
            IncidentAmended(id=SECOND),
            IncidentAmended(id="i3"),
            AttemptStopping(job="a", attempt=1, reason="r", incident=SECOND, rollback=back),
            ResponseBegan(job="a", incident=FIRST, kind="hang", do=("restart",), rollback=back),
            OrderGiven(id="o1", request="r", verb="stacks", job="a", lives=(), incident=FIRST),
        ),
        tasks=(("n1", Inspect(term=1, job="a", attempt=1, incident=SECOND)),),
    )
    _, _, amended, older, stopping, response, order = number_incidents(decision, count=3).records
    assert (amended.id, older.id) == ("i5", "i3")
    assert (stopping.incident, stopping.rollback.incident) == ("i5", "i5")
    assert (response.incident, response.rollback.incident) == ("i4", "i5")
    assert order.incident == "i4"
    ((_, task),) = number_incidents(decision, count=3).tasks
    assert task.incident == "i5"


def test_a_decision_that_opens_none_is_left_as_it_is() -> None:
    decision = Decision((IncidentAmended(id="i1"),))
    assert number_incidents(decision, count=1) is decision


def test_two_incidents_under_one_provisional_id_are_an_error() -> None:
    with pytest.raises(AssertionError, match="one provisional id"):
        number_incidents(Decision((opened(FIRST), opened(FIRST))), count=0)
