"""What `decide` answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.pending_operations import Volatile
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import Evict
from torchloom.protocol.node import NodeCommand
from torchloom.protocol.operator import Done, No
from torchloom.protocol.rank import Command
from torchloom.protocol.records import Abort, Record


class WantedVerdict(NamedTuple):
    """A verdict to be written, if no other has been; what the server let stand comes back as an event."""

    job: str
    change: str
    commit: bool
    abort: Abort | None = None
    """Why not, if it is not to be made."""
    key: str = ""
    """What it is written under."""


@dataclass(frozen=True, slots=True)
class Decision:
    records: tuple[Record | Volatile, ...] = ()
    """What changes the cluster state when it is folded."""
    commands: tuple[tuple[RankId, Command], ...] = ()
    """For ranks, once the records are stored."""
    answer: Done | No | None = None
    """For who asked, once the records are stored."""
    replies: tuple[tuple[str, Done | No], ...] = ()
    """For those who asked earlier and still wait."""
    verdicts: tuple[WantedVerdict, ...] = ()
    tasks: tuple[tuple[str, NodeCommand], ...] = ()
    """For the agents on these nodes, once the records are stored."""
    evictions: tuple[tuple[str, Evict], ...] = ()
    """For the lighthouses of these jobs, once the records are stored."""

    @property
    def stored(self) -> tuple[Record, ...]:
        """For the log: all of them or none."""
        return tuple(record for record in self.records if not isinstance(record, Volatile))

    def __bool__(self) -> bool:
        said = self.answer or self.replies or self.verdicts
        return bool(self.records or self.commands or self.tasks or self.evictions or said)


NOTHING = Decision()

Handlers = Mapping[type, Callable[[ClusterState, Any, str, float], Decision]]
"""By the type of a request: the function that decides on it, given the state, the request, where it is answered, and
the time. Each module that decides on requests has such a table, and `decide` joins them."""


def together(decisions: Iterable[Decision]) -> Decision:
    """Several decisions as one."""
    all_of_them = [decision for decision in decisions if decision]
    if not all_of_them:
        return NOTHING
    return Decision(
        tuple(record for decision in all_of_them for record in decision.records),
        tuple(command for decision in all_of_them for command in decision.commands),
        replies=tuple(reply for decision in all_of_them for reply in decision.replies),
        verdicts=tuple(verdict for decision in all_of_them for verdict in decision.verdicts),
        tasks=tuple(task for decision in all_of_them for task in decision.tasks),
        evictions=tuple(eviction for decision in all_of_them for eviction in decision.evictions),
    )
