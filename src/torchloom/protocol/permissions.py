"""What the server allows each role, computed from the table of subjects.

A role may publish what it speaks, subscribe to what it listens to, use an inbox of its own, and nothing else. For one
rank this is narrowed further: it can speak only as itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchloom.protocol.ids import RankId
from torchloom.protocol.subjects import STREAMS, SUBJECTS, Role


@dataclass(frozen=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answer: bool = False
    """May answer each request once, on the subject that the request names."""


def inbox_prefix(role: Role, rank: RankId | None = None) -> str:
    """Where replies to this client arrive; no other role (and no other rank, if narrowed) may listen there."""
    return f"_INBOX.{role}" if rank is None else f"_INBOX.rank.{rank.job}.{rank.replica}.{rank.rank}"


def permissions(role: Role, rank: RankId | None = None) -> Permissions:
    """What the server lets a role do, or one rank if given."""
    tokens: dict[str, str | int] = {} if rank is None else rank._asdict()
    publish = [s.pattern(**tokens) for s in SUBJECTS if role in s.speakers]
    subscribe = [s.pattern(**tokens) for s in SUBJECTS if role in s.listeners]
    subscribe.append(inbox_prefix(role, rank) + ".>")
    for stream in STREAMS:
        if role in stream.readers:
            publish += [f"$JS.API.DIRECT.GET.{stream.name}", f"$JS.API.STREAM.INFO.{stream.name}"]
    if role is Role.WEAVER:  # it owns the streams and answers requests
        publish += ["$JS.API.>", "_INBOX.>"]
    return Permissions(tuple(publish), tuple(subscribe), answer=role is Role.AGENT)
