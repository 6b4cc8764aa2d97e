"""What ranks print on other nodes, fetched from the agents there and shown as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from nats.aio.client import Client

from torchloom.bus.node_client import ask_node
from torchloom.errors import Refused, Unreachable
from torchloom.launcher.rank_output import Output
from torchloom.protocol.node import Place
from torchloom.protocol.queries import QueryLines
from torchloom.protocol.views import LinesView, RunView
from torchloom.views.job_runs import label

WHICH = ("out", "err")


@dataclass
class RemoteOutput:
    client: Client
    output: Output
    rank: int | None = None
    """Only this one."""
    trouble: str = ""
    """Why something could not be read, the last time."""
    _read: dict[tuple[str, int, int, str], int] = field(default_factory=dict)
    """How many bytes of each file have been shown: by job, attempt, rank and which."""

    async def show(self, run: RunView, ordinal: int | None = None) -> bool:
        """Print what is new of an attempt, the last one if none is named; whether there was anything."""
        self.trouble = ""
        number = ordinal or run.attempt
        places = [place for place in run.places if self.rank in {None, place.rank}]
        parts = await asyncio.gather(*(self._part(run, number, place, which) for place in places for which in WHICH))
        return any(parts)

    async def _part(self, run: RunView, ordinal: int, place: Place, which: str) -> bool:
        key = (run.job, ordinal, place.rank, which)
        at = self._read.get(key, 0)
        look = QueryLines(
            job=run.job, rank=place.rank, which=which, ordinal=ordinal, at=at, submitted=run.submitted  # type: ignore[arg-type]
        )  # fmt: skip
        with contextlib.suppress(Refused):  # it is not started yet, or was on another node
            try:
                found = await ask_node(self.client, place.node, look, LinesView)
            except Unreachable as error:
                self.trouble = error.message
                return False
            if found.data:
                self._read[key] = found.at + len(found.data)
                self.output.feed((run.job, ordinal), place.rank, which, found.data, label(run))
                return True
        return False
