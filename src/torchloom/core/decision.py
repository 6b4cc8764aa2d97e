"""What `decide` answers with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchloom.messages import Command, Done, No, RankId, Record


@dataclass(frozen=True, slots=True)
class Decision:
    records: tuple[Record, ...] = ()
    """For the log: all of them or none."""
    commands: tuple[tuple[RankId, Command], ...] = ()
    """For ranks, once the records are stored."""
    answer: Done | No | None = None
    """For who asked, once the records are stored."""
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.records or self.commands or self.answer)


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
    )
