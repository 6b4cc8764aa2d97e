"""Follows jobs and writes their traces. It reads the log, listens to beats, and asks for the schedule once a second.

It only reads. Whatever it cannot reach is asked again a second later: a restart of the control plane leaves a gap in
what beats say, and none in what the log says. Beats get the time at which they arrive, by the clock of the weaver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import nats.errors
from nats.aio.msg import Msg

from torchloom.bus.streams import Extent, extent, read_log
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import TorchLoomError
from torchloom.protocol.codec import decode_beat, decode_entry
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat
from torchloom.protocol.scheduling import QuerySchedule, ScheduleView
from torchloom.protocol.subjects import BEAT, LOG_STREAM, parse_rank
from torchloom.traces.job_trace import JobTrace
from torchloom.traces.timeline_picture import draw_folder
from torchloom.traces.trace_files import TraceWriter, claim_folder
from torchloom.traces.trace_rows import Row
from torchloom.traces.trace_set import Rows, TraceSet

POLL_SECONDS = 1.0
ANSWER_SECONDS = 2.0
"""For the schedule. Without it, the trace goes without a row about loaders."""
BEFORE_SECONDS = 0.001
"""Entries so little older than a submission may contain it."""


class TraceFollower:
    """`folders` has the folder of each job; `pictures`, the folders that get a picture of all jobs below them."""

    def __init__(
        self, weaver: WeaverClient, folders: Mapping[str, Path], pictures: set[Path], warn: Callable[[str], None]
    ) -> None:
        self._weaver = weaver
        self._folders = folders
        self._pictures = pictures
        self._warn = warn
        self._set = TraceSet(folders)
        self._writers: dict[str, TraceWriter | None] = {}
        """None: another process writes there."""
        self._beats: list[tuple[RankId, Beat, float]] = []
        self._position = 0
        """The last entry of the log that was read."""
        self._ahead = 0.0
        """Seconds by which the clock of the weaver is ahead of ours."""
        self._rows: dict[str, list[Row]] = {}
        """By job: rows to be written at the end of a look."""
        self._closed: set[str] = set()

    @property
    def are_over(self) -> bool:
        return self._set.are_over

    @property
    def begun_are_over(self) -> bool:
        """Those of which the log has a beginning: not those that were refused."""
        return all(trace.is_over for trace in self._set.traces.values())

    @property
    def folders(self) -> dict[str, str]:
        """By job: the folder that has its trace."""
        return {job: str(writer.folder) for job, writer in self._writers.items() if writer is not None}

    async def start(self, position: int | None = None) -> None:
        """Listen to beats. The log is read after this position; absent: after its present end."""
        for job in self._folders:
            await self._weaver.client.subscribe(BEAT.pattern(job=job), cb=self._hear)
        self._position = (await self._extent()).last if position is None else position

    async def start_from(self, submitted: Mapping[str, float]) -> None:
        """Read the log from the time at which these jobs were submitted."""
        await self.start(await self._find_position(min(submitted.values()) - BEFORE_SECONDS))
        await self.look()
        for job in self._set.expected():  # the log does not reach back so far
            trace = self._set.begin(job, submitted[job])
            self._collect([(trace, trace.begin())])
        self._write()

    async def follow(self) -> None:
        """Until all jobs are over."""
        while not self._set.are_over:
            await asyncio.sleep(POLL_SECONDS)
            await self.look()

    async def look(self) -> None:
        """What came since the last time, in rows."""
        await self._read_log()
        self._take_beats()
        await self._ask_schedule()
        self._write()
        for job, trace in self._set.traces.items():
            if trace.is_over and job not in self._closed:
                self._close(job)

    def _take_beats(self) -> None:
        beats, self._beats = self._beats, []
        for rank, beat, at in beats:
            self._collect(self._set.see_beat(rank, beat, at + self._ahead))
        self._collect(self._set.tick(time.time() + self._ahead))

    def close(self) -> list[Path]:
        """Write what is left, and draw the pictures: those that could be drawn."""
        self._take_beats()
        self._write()
        for job in self._folders:
            self._close(job)
        return self._draw()

    def _draw(self) -> list[Path]:
        drawn = []
        for folder in sorted(self._pictures):
            try:
                if (picture := draw_folder(folder)) is not None:
                    drawn.append(picture)
            except OSError as error:
                self._warn(f"cannot draw a picture in {folder}: {error.strerror or error}")
        return drawn

    # ── reading ──

    async def _hear(self, message: Msg) -> None:
        rank = parse_rank(message.subject)
        if rank is None:
            return
        with contextlib.suppress(msgspec.MsgspecError):
            self._beats.append((rank, decode_beat(message.data), time.time()))

    async def _ask_schedule(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                view = await self._weaver.look(QuerySchedule(), ScheduleView)
        except (TorchLoomError, TimeoutError):
            return
        self._ahead = view.now - time.time()
        self._collect(self._set.see_schedule(view))

    async def _read_log(self) -> None:
        client = self._weaver.client
        if not client.is_connected:
            return
        try:
            if (await extent(client, LOG_STREAM.name)).last < self._position:
                self._position = 0  # it was recreated
            async for stored in read_log(client, LOG_STREAM.name, self._position + 1):
                self._position = stored.seq
                with contextlib.suppress(msgspec.MsgspecError):  # of a newer version
                    self._collect(self._set.read(stored.seq, decode_entry(stored.data)))
        except (TorchLoomError, nats.errors.Error, OSError):
            return

    async def _extent(self) -> Extent:
        return await extent(self._weaver.client, LOG_STREAM.name)

    async def _find_position(self, at: float) -> int:
        """The last entry of the log before a time, found by bisection."""
        first, last = await self._extent()
        low, high = first - 1, last
        while low < high:
            middle = (low + high + 1) // 2
            when = await self._time_of(middle)
            if when is not None and when >= at:
                high = middle - 1
            else:
                low = middle
        return low

    async def _time_of(self, seq: int) -> float | None:
        async for stored in read_log(self._weaver.client, LOG_STREAM.name, seq, last=seq):
            with contextlib.suppress(msgspec.MsgspecError):
                return decode_entry(stored.data).at
        return None

    # ── writing ──

    def _collect(self, news: Rows) -> None:
        for trace, rows in news:
            self._rows.setdefault(trace.job, []).extend(rows)

    def _write(self) -> None:
        collected, self._rows = self._rows, {}
        for job, rows in collected.items():
            if job not in self._writers:
                self._writers[job] = self._open(self._set.traces[job])
            writer = self._writers[job]
            if writer is not None:
                writer.append(rows)

    def _open(self, trace: JobTrace) -> TraceWriter | None:
        base = self._folders[trace.job]
        try:
            folder = claim_folder(base, trace.job, trace.submitted)
        except OSError:
            folder = base
        writer = TraceWriter(folder, self._warn)
        if writer.open():
            return writer
        self._warn(f"{folder}: another process writes this trace")
        return None

    def _close(self, job: str) -> None:
        self._closed.add(job)
        writer = self._writers.get(job)
        if writer is not None:
            writer.close()
