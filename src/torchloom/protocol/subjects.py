"""Every subject: what it is for, who speaks on it, who listens; and the streams that keep some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torchloom.protocol.ids import RankId, check_name


class Role(StrEnum):
    WEAVER = "weaver"
    AGENT = "agent"
    THREADLET = "threadlet"
    OPERATOR = "operator"
    VIEWER = "viewer"


W, A, T, O, V = Role.WEAVER, Role.AGENT, Role.THREADLET, Role.OPERATOR, Role.VIEWER  # noqa: E741


@dataclass(frozen=True)
class Subject:
    """A subject with named tokens: ``loom.beat.{job}.{replica}.{rank}``."""

    template: str
    speakers: frozenset[Role]
    listeners: frozenset[Role]
    why: str

    def to(self, **tokens: str | int) -> str:
        """The concrete subject. A token that could be mistaken for subject syntax raises BadName."""
        return self.template.format(**_checked(tokens))

    def for_rank(self, rank: RankId) -> str:
        return self.to(**rank._asdict())

    def pattern(self, **tokens: str | int) -> str:
        """The subject with ``*`` for every token not given."""
        return self.template.format_map(defaultdict(lambda: "*", _checked(tokens)))


def _checked(tokens: Mapping[str, str | int]) -> dict[str, str]:
    return {name: check_name(name, str(value)) for name, value in tokens.items()}


def _subject(template: str, speakers: Iterable[Role], listeners: Iterable[Role], why: str) -> Subject:
    return Subject(template, frozenset(speakers), frozenset(listeners), why)


BEAT = _subject("loom.beat.{job}.{replica}.{rank}", [T], [W, V, O], "where a rank is, once a second")
REPORT = _subject("loom.report.{job}.{replica}.{rank}", [T], [W], "hello and goodbye; kept by the inbox stream")
FACT = _subject("loom.fact.{source}", [A, O, W], [W], "devices failed, processes exited; kept by the inbox stream")
REPLY = _subject("loom.reply.{job}.{replica}.{rank}", [T], [W], "what a rank answers to a command")
COMMIT = _subject("loom.verdict.{job}.{change}.commit", [W], [], "a change is to be taken; kept by the verdict stream")
ABORT = _subject("loom.verdict.{job}.{change}.abort", [W, T], [], "it is not to be taken; kept by the verdict stream")
COMMAND = _subject("loom.command.{job}.{replica}.{rank}", [W], [T], "what the weaver tells one rank")
NODE = _subject("loom.node.{node}", [A], [W, A, V, O], "what an agent runs, once a second and when it changes")
TASK = _subject("loom.task.{node}", [W], [A], "what the weaver tells an agent")
QUORUM = _subject("loom.quorum.{job}", [T], [W, T, V, O], "what a lighthouse has decided, once a second and at once")
EVICT = _subject("loom.evict.{job}", [W], [T], "replicas that a lighthouse must exclude")
LINES = _subject("loom.lines.{node}", [O, V], [A], "someone wants to read what a rank printed")
CHECK = _subject("loom.check.{node}", [O], [A], "an operator wants to know whether a node is fit")
CLOCK = _subject("loom.clock", [A], [W], "an agent compares its clock with the weaver's")
ASK = _subject("loom.ask", [O], [W], "an operator wants something done")
LOOK = _subject("loom.look", [O, V, W], [W], "someone wants to see; a starting weaver, whether there is another")
LOG = _subject("loom.log", [W], [V, O, A], "records, as they are decided; kept by the log stream")
SNAPSHOT = _subject("loom.snapshot", [W], [], "the fold of the log up to a sequence; kept by the snapshot stream")
CURVES = _subject("loom.curves", [W], [V, O], "downsampled history; kept by the curves stream")

SUBJECTS = (
    BEAT, REPORT, REPLY, FACT, COMMIT, ABORT, COMMAND, NODE, TASK, QUORUM, EVICT, LINES, CHECK, CLOCK, ASK, LOOK, LOG,
    SNAPSHOT, CURVES,
)  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """A JetStream stream: which subjects it keeps, and within which limits."""

    name: str
    subjects: tuple[Subject, ...]
    readers: frozenset[Role]
    """Roles that may read it message by message, besides the weaver."""
    max_bytes: int
    max_age_seconds: float
    max_per_subject: int = -1
    why: str = ""


_MB = 1024 * 1024
_DAY = 86_400.0
LOG_STREAM = Stream("LOOM_LOG", (LOG,), frozenset([O, V]), 256 * _MB, 30 * _DAY, why="what the weaver decided")
INBOX_STREAM = Stream(
    "LOOM_INBOX", (REPORT, FACT), frozenset(), 64 * _MB, _DAY, 1000, why="what must reach the weaver even if it is away"
)
SNAPSHOT_STREAM = Stream("LOOM_SNAPSHOT", (SNAPSHOT,), frozenset(), 256 * _MB, 0, 2, why="so that replay stays short")
CURVES_STREAM = Stream("LOOM_CURVES", (CURVES,), frozenset(), 64 * _MB, 7 * _DAY, why="so that views can draw the past")
VERDICT_STREAM = Stream(
    "LOOM_VERDICT", (COMMIT, ABORT), frozenset([T]), 16 * _MB, _DAY, why="one verdict a change: the first written wins"
)

STREAMS = (LOG_STREAM, INBOX_STREAM, SNAPSHOT_STREAM, CURVES_STREAM, VERDICT_STREAM)
