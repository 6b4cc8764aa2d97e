"""The protocol of changes in a storm: whatever is lost, repeated, late or dead, ranks never disagree.

World (world.py) plays the wire and the clock, and knows what must hold. Here hypothesis looks for moves after which it
does not; and broken parts show that the world would notice.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.world import CHOICES, JOB, RANKS, Living, Log, Parts, Request, Verdicts, World, storm
from tests.examples import examples
from torchloom.core.events import RequestReceived
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import SetKnobs
from torchloom.protocol.rank import Applied, Beat, ChangeSpec, Command, Propose, Ready, Reply
from torchloom.protocol.records import About, Record
from torchloom.threadlet.changes.participant import Participant

MOVES = st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 999)), min_size=10, max_size=100)
WORLDS = 600
"""Storms in which a broken part must have shown."""


@examples(300)
@given(MOVES)
def test_in_any_storm_ranks_agree_and_operators_are_answered(moves: list[tuple[str, int]]) -> None:
    assert World().play(moves) == []


@pytest.mark.parametrize("seed", range(100))
def test_long_storms(seed: int) -> None:
    assert World().play(storm(seed, most=240)) == []


FOUND = {
    2659977765: "a revert of a revert was withdrawn: who had joined in between kept other values",
    3928185149: "a weaver that was replaced without knowing it was expected to know of a newer change",
    1700607413: "a kill that never arrived was believed to have ended a rank, which lived on and was asked no more",
    575993128: "an incident was expected of a change that nobody took, and that the next one replaced",
    232080880: "the same, of a rank that was alone",
}
"""Storms of long campaigns that showed something."""


@pytest.mark.parametrize("seed", FOUND)
def test_storms_that_once_went_wrong(seed: int) -> None:
    assert World().play(storm(seed, most=600)) == []


def test_a_rank_behind_is_told_of_by_the_weaver_that_can_write_and_by_no_other() -> None:
    world = World()
    old = world.weavers[-1]
    world.usurp(0)
    ask = SetKnobs(request="1", job=JOB, values={"lr": 2.0})
    world.requests["1"] = Request(ask, world.now)
    world.weavers[-1].happen(RequestReceived(ask, "1"), reply="1")  # the old one does not hear of it
    world.flow(11)
    rank, step = RANKS[0], world.of(RANKS[0]).step
    behind = Beat(incarnation=world.of(rank).incarnation, step=step, change=0)
    assert world.decided == {"c1": True}
    assert old.alive  # replaced, and nothing has told it so
    assert "c1" not in old.cluster.ledger.changes
    world.heard(rank, behind)
    world.replace(0)
    world.heard(rank, behind)  # the second for the old one, the first for the newest
    assert world.problems == []
    assert world.incidents == set()
    world.heard(rank, behind)
    assert world.problems == []
    assert About(rank=rank, part="c1") in world.incidents


# ── broken parts: each must be noticed ──


class BothVerdicts(Verdicts):
    """No CAS: whoever writes believes that it won."""

    def write(self, change: str, commit: bool) -> bool:
        self.stands[change] = commit
        return commit


class OpenLog(Log):
    """No expected sequence: a weaver that was replaced goes on writing."""

    def append(self, expected: int, at: float, records: tuple[Record, ...]) -> bool:
        self.entries.append((at, records))
        return True


class Forgetful(Participant):
    """No journal: what comes twice is done twice."""

    def done(self, change: ChangeSpec, step: int, ok: bool = True, result: str = "") -> Applied:
        answer = super().done(change, step, ok, result)
        self.journal.clear()
        self.taken.clear()
        return answer


class Unfaithful(Participant):
    """A promise is forgotten when it is asked for once more."""

    def propose(self, proposal: Propose, step: Any) -> Ready:
        self.pending.pop(proposal.change.id, None)
        return super().propose(proposal, step)


def read_any_life(cluster: ClusterState, rank: RankId, reply: Reply) -> Reply:
    """The weaver takes the word of one life for that of another."""
    operation = cluster.runtime.operations.find(reply.id)
    if operation is not None and rank in operation.lives:
        return replace(reply, incarnation=operation.lives[rank])
    return reply


def obey_any_life(mine: Living, command: Command) -> bool:
    """A rank obeys what another life of it was told."""
    return command.term >= mine.term


def obey_any_term(mine: Living, command: Command) -> bool:
    """A rank obeys a weaver that was replaced."""
    return command.incarnation == mine.incarnation


BROKEN = {
    "no compare-and-set on verdicts": (Parts(verdicts=BothVerdicts), ("did not",)),
    "no journal in the rank": (Parts(steering=Forgetful), ("twice",)),
    "no check of lives in the weaver": (Parts(read_reply=read_any_life), ("is settled as applied on",)),
    "no check of lives in the rank": (Parts(is_for_me=obey_any_life), ("which was for another life",)),
    "no check of terms in the rank": (Parts(is_for_me=obey_any_term), ("after term",)),
    "no fence on the log": (Parts(log=OpenLog), ("are called", "another state")),
    "no lasting promise": (Parts(steering=Unfaithful), ("did not",)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_world_notices(broken: str) -> None:
    parts, words = BROKEN[broken]
    for seed in range(WORLDS):
        problems = World(parts).play(storm(seed))
        if any(word in problem for word in words for problem in problems):
            return
    raise AssertionError(f"{WORLDS} storms with {broken}, and nothing was noticed")
