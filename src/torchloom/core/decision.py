"""What `decide` answers with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torchloom.core.courses import Note
from torchloom.messages import Command, Done, Evict, IncidentOpened, No, NodeCommand, RankId, Record


class WantedVerdict(NamedTuple):
    """A verdict to be written, if no other has been; what the server let stand comes back as an event."""

    job: str
    change: str
    commit: bool
    reason: str
    key: str = ""
    """What it is written under."""


@dataclass(frozen=True, slots=True)
class Decision:
    records: tuple[Record, ...] = ()
    """For the log: all of them or none."""
    commands: tuple[tuple[RankId, Command], ...] = ()
    """For ranks, once the records are stored."""
    answer: Done | No | None = None
    """For who asked, once the records are stored."""
    reason: str = ""
    notes: tuple[Note, ...] = ()
    """To remember, not to store."""
    replies: tuple[tuple[str, Done | No], ...] = ()
    """For those who asked earlier and still wait."""
    verdicts: tuple[WantedVerdict, ...] = ()
    tasks: tuple[tuple[str, NodeCommand], ...] = ()
    """For the agents on these nodes, once the records are stored."""
    evictions: tuple[tuple[str, Evict], ...] = ()
    """For the lighthouses of these jobs, once the records are stored."""

    @property
    def opened(self) -> int:
        """Incidents it opens: the next one in the same breath has a number after theirs."""
        return sum(isinstance(record, IncidentOpened) for record in self.records)

    def __bool__(self) -> bool:
        said = self.answer or self.notes or self.replies or self.verdicts
        return bool(self.records or self.commands or self.tasks or self.evictions or said)


NOTHING = Decision()


def together(decisions: Iterable[Decision]) -> Decision:
    """Several decisions as one."""
    all_of_them = [decision for decision in decisions if decision]
    if not all_of_them:
        return NOTHING
    return Decision(
        tuple(record for decision in all_of_them for record in decision.records),
        tuple(command for decision in all_of_them for command in decision.commands),
        reason="; ".join(decision.reason for decision in all_of_them if decision.reason),
        notes=tuple(note for decision in all_of_them for note in decision.notes),
        replies=tuple(reply for decision in all_of_them for reply in decision.replies),
        verdicts=tuple(verdict for decision in all_of_them for verdict in decision.verdicts),
        tasks=tuple(task for decision in all_of_them for task in decision.tasks),
        evictions=tuple(eviction for decision in all_of_them for eviction in decision.evictions),
    )
