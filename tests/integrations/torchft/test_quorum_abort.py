"""The group of a broken quorum is ended, once, and never the group of another."""

from __future__ import annotations

import threading

import pytest

from tests.threadlet.played import until_true
from torchloom.integrations.torchft.quorum_abort import QuorumAborter


class Group:
    """Notes which quorum's group was ended; the ending takes as long as the test wants."""

    def __init__(self) -> None:
        self.quorum = 0
        self.ended: list[int] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.ending = threading.Event()
        self.aborter = QuorumAborter(self.abort)

    def configure(self, quorum: int) -> None:
        self.aborter.configuring()
        self.quorum = quorum
        self.aborter.configured(quorum)

    def abort(self) -> None:
        self.ending.set()
        self.may_end.wait(10)
        self.ended.append(self.quorum)


async def test_a_broken_quorum_is_ended_once() -> None:
    group = Group()
    group.configure(7)
    group.aborter.mark_broken([7])
    await until_true(lambda: group.ended == [7], "the end")
    group.aborter.mark_broken([7, 8])
    group.aborter.mark_broken([7])
    group.configure(9)
    assert group.ended == [7]


def test_a_quorum_that_broke_before_it_was_configured_is_ended_then() -> None:
    group = Group()
    group.aborter.mark_broken([1, 2])
    assert group.aborter.is_broken(2)
    group.configure(2)
    assert group.ended == [2]


def test_an_old_quorum_that_broke_does_not_end_the_new_one() -> None:
    group = Group()
    group.configure(1)
    group.configure(2)
    group.aborter.mark_broken([1])
    group.aborter._abort_if_broken()
    assert group.ended == []


def test_nothing_is_ended_while_a_group_is_being_made() -> None:
    group = Group()
    group.configure(1)
    group.aborter.configuring()
    group.aborter.mark_broken([1])
    group.aborter._abort_if_broken()
    assert group.ended == []


def test_a_reconfiguration_waits_for_an_ending_that_is_under_way() -> None:
    group = Group()
    group.configure(1)
    group.may_end.clear()
    group.aborter.mark_broken([1])
    assert group.ending.wait(10)
    configuring = threading.Thread(target=group.configure, args=(2,))
    configuring.start()
    configuring.join(0.05)
    assert configuring.is_alive()
    group.may_end.set()
    configuring.join(10)
    assert group.ended == [1]
    assert group.quorum == 2


def test_a_group_that_cannot_be_ended_is_told_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    aborter = QuorumAborter(fail)
    aborter.configured(3)
    aborter.mark_broken([3])
    aborter.configuring()
    aborter.configured(3)
    assert "quorum 3 could not be ended" in caplog.text
