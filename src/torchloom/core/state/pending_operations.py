"""Changes and orders under way, as far as the weaver may forget them: who has answered, who still waits for an answer.

A restarted weaver finds them unanswered and asks everyone again; ranks answer again what they have done already.
A course changes when a reply is taken in (`take`), and by records; those that are about nothing durable are `Volatile`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from torchloom.protocol.ids import RankId
from torchloom.protocol.knob_values import Action
from torchloom.protocol.operator import SetKnobs
from torchloom.protocol.rank import Applied, Ordered, Ready, Reply, Standing

Lives = tuple[tuple[RankId, str], ...]


class Wish(msgspec.Struct, frozen=True):
    """A change somebody wants, before it has a step."""

    ask: SetKnobs
    action: Action = "set"
    reverts: str = ""
    attempt: int = 1


class Volatile(msgspec.Struct, frozen=True):
    """A record that is folded like any other, but not stored: a restarted weaver does without it."""

    request: str
    """Of the course it is about."""


class CourseBegan(Volatile, frozen=True):
    """Somebody wants a change, and its ranks are asked where they are."""

    job: str
    lives: Lives
    wish: Wish
    waiters: tuple[str, ...] = ()


class CourseEnded(Volatile, frozen=True):
    """It came to nothing, and no rank has changed."""


class AskerWaits(Volatile, frozen=True):
    reply: str
    """Where."""


class AskersTold(Volatile, frozen=True):
    """Nobody waits any more."""


class AskedAgain(Volatile, frozen=True):
    """Its ranks, those that have not answered."""


class VerdictAsked(Volatile, frozen=True):
    """The server is to let one stand."""


@dataclass(slots=True)
class Course:
    """One change (or order) on its way."""

    request: str
    job: str
    lives: dict[RankId, str]
    wish: Wish | None = None
    """What was asked; not known after a restart of the weaver."""
    id: str = ""
    """The change's or order's, once it is in the log."""
    began: float = 0.0
    sent: float = 0.0
    """When its ranks were last asked."""
    verdict_asked: float | None = None
    committed: bool = False
    waiters: list[str] = field(default_factory=list)
    """Where an answer is awaited."""
    standings: dict[RankId, Standing] = field(default_factory=dict)
    ready: dict[RankId, Ready] = field(default_factory=dict)
    applied: dict[RankId, Applied] = field(default_factory=dict)
    ordered: dict[RankId, Ordered] = field(default_factory=dict)

    def take(self, rank: RankId, reply: Reply) -> bool:
        """Remember an answer of one of its ranks; whether it was news."""
        if self.lives.get(rank) != reply.incarnation:
            return False
        match reply:
            case Standing():
                known: dict[RankId, Standing] | dict[RankId, Ready] | dict[RankId, Applied] | dict[RankId, Ordered]
                known = self.standings
            case Ready():
                known = self.ready
            case Applied():
                known = self.applied
            case Ordered():
                known = self.ordered
        news = rank not in known
        known[rank] = reply  # type: ignore[assignment]
        return news


@dataclass(slots=True)
class Courses:
    by_request: dict[str, Course] = field(default_factory=dict)

    def find(self, id: str) -> Course | None:
        """By the id of the change or order, or, before it has one, of the request."""
        found = self.by_request.get(id)
        return found or next((course for course in self.by_request.values() if course.id == id), None)

    def inquiring(self, job: str) -> Course | None:
        """The change of a job that is wanted but not yet proposed."""
        return next((c for c in self.by_request.values() if c.job == job and not c.id), None)

    def begin(self, course: Course) -> None:
        self.by_request[course.request] = course

    def end(self, request: str) -> None:
        self.by_request.pop(request, None)

    def take(self, rank: RankId, reply: Reply) -> Course | None:
        """The course that a reply belongs to, if it is news there."""
        course = self.find(reply.id)
        return course if course is not None and course.take(rank, reply) else None

    def fold(self, record: Volatile, at: float) -> None:
        match record:
            case CourseBegan(request=request, job=job, lives=lives, wish=wish, waiters=waiters):
                self.begin(Course(request, job, dict(lives), wish, began=at, sent=at, waiters=list(waiters)))
            case CourseEnded(request=request):
                self.end(request)
            case AskerWaits(request=request, reply=reply):
                if reply not in self.by_request[request].waiters:
                    self.by_request[request].waiters.append(reply)
            case AskersTold(request=request):
                self.by_request[request].waiters.clear()
            case AskedAgain(request=request):
                self.by_request[request].sent = at
            case VerdictAsked(request=request):
                self.by_request[request].verdict_asked = at
