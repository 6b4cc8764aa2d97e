"""Every subject: what it is for, who speaks on it, who listens; and the streams that keep some of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torchloom.protocol.ids import NAME, RankId, check_name


class Role(StrEnum):
    WEAVER = "weaver"
    AGENT = "agent"
    THREADLET = "threadlet"
    OPERATOR = "operator"
    VIEWER = "viewer"


W, A, T, O, V = Role.WEAVER, Role.AGENT, Role.THREADLET, Role.OPERATOR, Role.VIEWER  # noqa: E741


_SUBJECT_OF_RANK = re.compile(rf"loom\.[a-z]+\.({NAME.pattern})\.({NAME.pattern})\.([0-9]{{1,7}})")


@dataclass(frozen=True)
class Subject:
    """A subject with named tokens: ``loom.beat.{job}.{replica}.{rank}``."""

    template: str
    speakers: tuple[Role, ...]
    listeners: tuple[Role, ...]
    why: str

    def to(self, **tokens: str | int) -> str:
        """The concrete subject. A token that could be mistaken for subject syntax raises BadName."""
        return self.template.format(**_checked(tokens))

    def for_rank(self, rank: RankId) -> str:
        return self.to(**rank._asdict())

    def pattern(self, **tokens: str | int) -> str:
        """The subject with ``*`` for every token not given."""
        return self.template.format_map(defaultdict(lambda: "*", _checked(tokens)))


def parse_rank(subject: str) -> RankId | None:
    """The rank that a subject names; None if it names none."""
    match = _SUBJECT_OF_RANK.fullmatch(subject)
    return RankId(match[1], match[2], int(match[3])) if match else None


def _checked(tokens: Mapping[str, str | int]) -> dict[str, str]:
    return {name: check_name(name, str(value)) for name, value in tokens.items()}


BEAT = Subject("loom.beat.{job}.{replica}.{rank}", (T,), (W, V, O), "where a rank is, once a second")
REPORT = Subject("loom.report.{job}.{replica}.{rank}", (T,), (W,), "hello and goodbye; kept by the inbox stream")
FACT = Subject("loom.fact.{source}", (A, O, W), (W,), "devices failed, processes exited; kept by the inbox stream")
REPLY = Subject("loom.reply.{job}.{replica}.{rank}", (T,), (W,), "what a rank answers to a command")
COMMIT = Subject("loom.verdict.{job}.{change}.commit", (W,), (), "a change is to be taken; kept by the verdict stream")
ABORT = Subject("loom.verdict.{job}.{change}.abort", (W, T), (), "it is not to be taken; kept by the verdict stream")
COMMAND = Subject("loom.command.{job}.{replica}.{rank}", (W,), (T,), "what the weaver tells one rank")
NODE = Subject("loom.node.{node}", (A,), (W, A, V, O), "what an agent runs, once a second and when it changes")
TASK = Subject("loom.task.{node}", (W,), (A,), "what the weaver tells an agent")
QUORUM = Subject("loom.quorum.{job}", (T,), (W, T, V, O), "what a lighthouse has decided, once a second and at once")
EVICT = Subject("loom.evict.{job}", (W,), (T,), "replicas that a lighthouse must exclude")
LINES = Subject("loom.lines.{node}", (O, V), (A,), "someone wants to read what a rank printed")
CHECK = Subject("loom.check.{node}", (O,), (A,), "an operator wants to know whether a node is fit")
CLOCK = Subject("loom.clock", (A,), (W,), "an agent compares its clock with the weaver's")
ASK = Subject("loom.ask", (O,), (W,), "an operator wants something done")
LOOK = Subject("loom.look", (O, V, W), (W,), "someone wants to see; a starting weaver, whether there is another")
LOG = Subject("loom.log", (W,), (V, O, A), "records, as they are decided; kept by the log stream")
SNAPSHOT = Subject("loom.snapshot", (W,), (), "the fold of the log up to a sequence; kept by the snapshot stream")
CURVES = Subject("loom.curves", (W,), (V, O), "downsampled history; kept by the curves stream")

SUBJECTS = (
    BEAT, REPORT, REPLY, FACT, COMMIT, ABORT, COMMAND, NODE, TASK, QUORUM, EVICT, LINES, CHECK, CLOCK, ASK, LOOK, LOG,
    SNAPSHOT, CURVES,
)  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """A JetStream stream: which subjects it keeps, and within which limits."""

    name: str
    subjects: tuple[Subject, ...]
    readers: tuple[Role, ...]
    """Roles that may read it message by message, besides the weaver."""
    max_bytes: int
    max_age_seconds: float
    max_per_subject: int = -1
    why: str = ""


_MB = 1024 * 1024
_DAY = 86_400.0
LOG_STREAM = Stream("LOOM_LOG", (LOG,), (O, V), 256 * _MB, 30 * _DAY, why="what the weaver decided")
INBOX_STREAM = Stream(
    "LOOM_INBOX", (REPORT, FACT), (), 64 * _MB, _DAY, 1000, why="what must reach the weaver even if it is away"
)
SNAPSHOT_STREAM = Stream("LOOM_SNAPSHOT", (SNAPSHOT,), (), 256 * _MB, 0, 2, why="so that replay stays short")
CURVES_STREAM = Stream("LOOM_CURVES", (CURVES,), (), 64 * _MB, 7 * _DAY, why="so that views can draw the past")
VERDICT_STREAM = Stream(
    "LOOM_VERDICT", (COMMIT, ABORT), (T,), 16 * _MB, _DAY, why="one verdict a change: the first written wins"
)

STREAMS = (LOG_STREAM, INBOX_STREAM, SNAPSHOT_STREAM, CURVES_STREAM, VERDICT_STREAM)
