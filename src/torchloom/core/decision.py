"""The result of `decide`, and the ids of the incidents that it opens.

Several parts of one decision may open incidents, and refer to them, independently. Each uses a provisional id that is
unique within the decision; `number_incidents` replaces it by the next number, wherever it occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace as replace_fields

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import Volatile
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import Evict
from torchloom.protocol.node import NodeCommand
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import Command
from torchloom.protocol.records import Abort, IncidentAmended, IncidentOpened, Record

S = TypeVar("S", bound=msgspec.Struct)
Commands = tuple[tuple[RankId, Command], ...]


class WantedVerdict(NamedTuple):
    """A verdict to be stored, unless there is one already; the stored one comes back as an event."""

    job: str
    change: str
    commit: bool
    abort: Abort | None = None
    """Why the change is not to be made, if it is not."""
    key: str = ""
    """The key under which it is stored."""


@dataclass(frozen=True, slots=True)
class Decision:
    records: tuple[Record | Volatile, ...] = ()
    """Folding them changes the cluster state."""
    commands: Commands = ()
    """For ranks, sent once the records are stored."""
    answer: Done | No | None = None
    """For the operator who asked, sent once the records are stored."""
    replies: tuple[tuple[str, Done | No], ...] = ()
    """For operators who asked earlier and still wait, by reply subject."""
    verdicts: tuple[WantedVerdict, ...] = ()
    tasks: tuple[tuple[str, NodeCommand], ...] = ()
    """For the agents on these nodes, once the records are stored."""
    evictions: tuple[tuple[str, Evict], ...] = ()
    """For the lighthouses of these jobs, once the records are stored."""

    @property
    def stored(self) -> tuple[Record, ...]:
        """The records for the log, which stores all of them or none."""
        return tuple(record for record in self.records if not isinstance(record, Volatile))

    def __bool__(self) -> bool:
        return self != NOTHING

    def __add__(self, more: Decision) -> Decision:
        """With what another decision adds, except for its answer."""
        return replace(merge_decisions((self, more)), answer=self.answer)


NOTHING = Decision()

Handlers = Mapping[type, Callable[[ClusterState, Any, str, float], Decision]]
"""By the type of a request: the function that decides on it, given the state, the request, where it is answered, and
the time. Each module that decides on requests has such a table, and `decide` joins them."""


def merge_decisions(decisions: Iterable[Decision]) -> Decision:
    """Several decisions as one, without answers: they belong to one request."""
    parts = [decision for decision in decisions if decision]
    if not parts:
        return NOTHING
    names = [field.name for field in fields(Decision) if field.name != "answer"]
    merged: dict[str, Any] = {name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in names}
    return Decision(**merged)


class Refused(Exception):
    """A request cannot be granted. It is answered with the reason, and nothing else of the decision is left."""

    def __init__(self, why: Prose, hint: Prose = "") -> None:
        super().__init__()
        self.answer = No(why=why, hint=hint)


def address(lives: Iterable[tuple[RankId, str]], command: Command) -> Commands:
    """A command for each of these ranks, in its incarnation."""
    return tuple((rank, replace_fields(command, incarnation=life)) for rank, life in lives)


# ── ids of incidents ──


def provisional(*key: object) -> str:
    """An id that is valid until the decision is complete."""
    return f"new: {' '.join(map(str, key))}"


def close_incident(id: str, outcome: Prose) -> IncidentAmended:
    return IncidentAmended(id=id, outcome=outcome, closed=True)


def number_incidents(decision: Decision, count: int) -> Decision:
    """Give the incidents that a decision opens the numbers after `count`."""
    opened = [record.id for record in decision.records if isinstance(record, IncidentOpened)]
    if not opened:
        return decision
    ids = {id: f"i{number}" for number, id in enumerate(opened, count + 1)}
    assert len(ids) == len(opened), f"two incidents have one provisional id: {opened}"
    return replace(
        decision,
        records=tuple(_numbered(record, ids) for record in decision.records),
        tasks=tuple((node, _numbered(task, ids)) for node, task in decision.tasks),
    )


def _numbered(part: S, ids: Mapping[str, str]) -> S:
    """A record or command, with the numbers of the incidents that it names, also in its rollback."""
    news: dict[str, Any] = {name: ids[id] for name in ("id", "incident") if (id := getattr(part, name, "")) in ids}
    if (back := getattr(part, "rollback", None)) is not None:
        news["rollback"] = _numbered(back, ids)
    return replace_fields(part, **news) if news else part
