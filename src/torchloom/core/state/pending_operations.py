"""Changes and orders under way, as far as the weaver may forget them: which ranks answered, which operators wait.

A restarted weaver asks all ranks again; ranks repeat their answers. An operation changes when a reply arrives (`take`)
and by records; records about nothing durable are `Volatile`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchloom.core.state.change_ledger import Change, GivenOrder
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import SetKnobs
from torchloom.protocol.rank import Action, Applied, Ordered, Ready, Reply, StepReport

Lives = tuple[tuple[RankId, str], ...]


class ChangeRequest(msgspec.Struct, frozen=True):
    """A requested change, before it has a step."""

    ask: SetKnobs
    action: Action = "set"
    reverts: str = ""
    attempt: int = 1


class Volatile(msgspec.Struct, frozen=True):
    """A record that is folded like any other, but not stored: a restarted weaver does not need it."""

    request: str
    """The request of the operation."""


class OperationBegan(Volatile, frozen=True):
    """A change was requested, and its ranks are asked for their steps."""

    job: str
    lives: Lives
    change_request: ChangeRequest
    waiters: tuple[str, ...] = ()


class OperationEnded(Volatile, frozen=True):
    """It was given up, and no rank has changed."""


class WaiterAdded(Volatile, frozen=True):
    reply: str
    """The reply subject."""


class WaitersAnswered(Volatile, frozen=True):
    """All waiting operators were answered."""


class RanksAskedAgain(Volatile, frozen=True):
    """The ranks that have not answered were asked again."""


class VerdictAsked(Volatile, frozen=True):
    """A verdict was sent to the server."""


@dataclass(slots=True)
class PendingOperation:
    """One change or order under way."""

    request: str
    job: str
    lives: dict[RankId, str]
    change_request: ChangeRequest | None = None
    """None for orders, and after a restart of the weaver."""
    id: str = ""
    """The change's or order's, once it is in the log."""
    began: float = 0.0
    sent: float = 0.0
    """When its ranks were last asked."""
    verdict_asked: float | None = None
    waiters: list[str] = field(default_factory=list)
    """Reply subjects of the operators that wait."""
    step_reports: dict[RankId, StepReport] = field(default_factory=dict)
    ready: dict[RankId, Ready] = field(default_factory=dict)
    applied: dict[RankId, Applied] = field(default_factory=dict)
    ordered: dict[RankId, Ordered] = field(default_factory=dict)

    def take(self, rank: RankId, reply: Reply) -> bool:
        """Store an answer of one of its ranks; whether it is the first of its kind."""
        if self.lives.get(rank) != reply.incarnation:
            return False
        tables: dict[type[Reply], dict[RankId, Any]] = {
            StepReport: self.step_reports, Ready: self.ready, Applied: self.applied, Ordered: self.ordered
        }  # fmt: skip
        replies = tables[type(reply)]
        news = rank not in replies
        replies[rank] = reply
        return news


@dataclass(slots=True)
class PendingOperations:
    by_request: dict[str, PendingOperation] = field(default_factory=dict)

    def find(self, id: str) -> PendingOperation | None:
        """By the id of the change or order, or, before it has one, of the request."""
        operation = self.by_request.get(id)
        return operation or next((operation for operation in self.by_request.values() if operation.id == id), None)

    def inquiring(self, job: str) -> PendingOperation | None:
        """The change of a job that is requested but not yet proposed."""
        return next((c for c in self.by_request.values() if c.job == job and not c.id), None)

    def follow(self, item: Change | GivenOrder, at: float) -> None:
        """Begin, advance or end the operation of a change or order, as the ledger has it now."""
        if item.ended:
            self.by_request.pop(item.request, None)
            return
        operation = self.by_request.get(item.request)
        if operation is None or operation.id not in {"", item.id}:
            operation = self.by_request[item.request] = PendingOperation(item.request, item.job, dict(item.lives))
        operation.id, operation.began, operation.sent = item.id, at, at

    def take(self, rank: RankId, reply: Reply) -> PendingOperation | None:
        """The operation that a reply belongs to, if it is new there."""
        operation = self.find(reply.id)
        return operation if operation is not None and operation.take(rank, reply) else None

    def fold(self, record: Volatile, at: float) -> None:
        match record:
            case OperationBegan(request=request, job=job, lives=lives, change_request=change_request, waiters=waiters):
                operation = PendingOperation(request, job, dict(lives), change_request, waiters=list(waiters))
                operation.began = operation.sent = at
                self.by_request[request] = operation
            case OperationEnded(request=request):
                self.by_request.pop(request, None)
            case WaiterAdded(request=request, reply=reply):
                if reply not in self.by_request[request].waiters:
                    self.by_request[request].waiters.append(reply)
            case WaitersAnswered(request=request):
                self.by_request[request].waiters.clear()
            case RanksAskedAgain(request=request):
                self.by_request[request].sent = at
            case VerdictAsked(request=request):
                self.by_request[request].verdict_asked = at
