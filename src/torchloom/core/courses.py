"""Changes and orders under way, as far as the weaver may forget them: who has answered, who still waits for an answer.

A restarted weaver finds them unanswered and asks everyone again; ranks answer again what they have done already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.messages import Action, Applied, Ordered, RankId, Ready, Reply, SetKnobs, Standing

Lives = tuple[tuple[RankId, str], ...]


@dataclass(slots=True)
class Wish:
    """A change somebody wants, before it has a step."""

    ask: SetKnobs
    action: Action = "set"
    reverts: str = ""
    attempt: int = 1


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

    def note(self, note: Note) -> None:
        match note:
            case CourseBegan(course=course):
                self.begin(course)
            case CourseEnded(request=request):
                self.end(request)
            case AskerWaits(request=request, reply=reply):
                if reply not in self.by_request[request].waiters:
                    self.by_request[request].waiters.append(reply)
            case AskersTold(request=request):
                self.by_request[request].waiters.clear()
            case AskedAgain(request=request, at=at):
                self.by_request[request].sent = at
            case VerdictAsked(request=request, at=at):
                self.by_request[request].verdict_asked = at


@dataclass(frozen=True, slots=True)
class CourseBegan:
    course: Course


@dataclass(frozen=True, slots=True)
class CourseEnded:
    request: str


@dataclass(frozen=True, slots=True)
class AskerWaits:
    request: str
    reply: str


@dataclass(frozen=True, slots=True)
class AskersTold:
    request: str


@dataclass(frozen=True, slots=True)
class AskedAgain:
    request: str
    at: float


@dataclass(frozen=True, slots=True)
class VerdictAsked:
    request: str
    at: float


Note = CourseBegan | CourseEnded | AskerWaits | AskersTold | AskedAgain | VerdictAsked
"""What a decision wants remembered, but not stored."""
