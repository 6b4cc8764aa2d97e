"""What the weaver stores in JetStream: the log, the snapshots from which it starts, and the curves of ranks.

Every append names the sequence that it expects to follow. A second weaver that took over has appended its term, so the
server refuses the next append of the first one (`Fenced`): two weavers never both act.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from torchloom import __version__
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.streams import Stored, extent, read_log, store_expected
from torchloom.core.state.cluster import FORMAT, ClusterState, State
from torchloom.core.state.runtime import Curve
from torchloom.errors import BadState, Fenced, Unreachable
from torchloom.protocol import subjects
from torchloom.protocol.codec import decode_entry, decode_points, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import Entry, Record
from torchloom.protocol.views import CurvePoints, Point
from torchloom.settings import Settings
from torchloom.shared.json_decoding import decoder
from torchloom.weaver.health import Clock, Health, log, quietly

ENTRY_BYTES = 256 * 1024
"""Records of one append are split into messages of about this size."""
CURVE_RANKS = 1000
"""Most ranks in one message of curve points."""
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to append while the server or its disk refuses."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The fold of the log up to and including `seq`."""

    seq: int
    state: State


class _Format(msgspec.Struct):
    """The part of an entry that every version can read."""

    format: int = 1


class _SnapshotFormat(msgspec.Struct):
    state: _Format


def _check_format(format: int, settings: Settings) -> None:
    if format == FORMAT:
        return
    who = "an earlier" if format < FORMAT else "a newer"
    folder = StateFolder(settings.state_folder).nats
    raise BadState(
        f"the log was written by {who} torchLoom, in format {format}: torchLoom {__version__} reads format {FORMAT}",
        hint=f"use that version; or begin with an empty log: move {folder} away, or choose another state folder "
        "(`loom up --state FOLDER`, TORCHLOOM_STATE). Nothing was changed",
    )


@dataclass(eq=False)
class Store:
    client: Client
    health: Health
    refusing: bool = False
    """The server does not take the entry being written: it says so, or says nothing over a link that stands. A link
    that broke in the middle of a write is not that, and what is asked meanwhile only has to wait."""
    seq: int = 0
    """The last sequence of the log that this weaver knows."""
    snapshot_seq: int = 0
    _snapshot_stream_seq: int = 0

    # ── start ──

    async def open(self) -> None:
        """Create the streams, or update their limits."""
        for stream in subjects.STREAMS:
            try:
                await self._ensure(stream)
            except nats.js.errors.APIError as error:
                raise BadState(
                    f"JetStream does not give us stream {stream.name}: {error.description}",
                    hint="look at logs/nats.log in the state folder; is the disk full?",
                ) from error
            except (nats.errors.Error, OSError) as error:
                raise BadState(
                    f"JetStream does not answer: {error or type(error).__name__}",
                    hint="the server must run with JetStream enabled; look at logs/nats.log in the state folder",
                ) from error

    async def _ensure(self, stream: subjects.Stream) -> None:
        config = StreamConfig(
            name=stream.name,
            description=stream.why,
            subjects=[subject.pattern() for subject in stream.subjects],
            max_bytes=stream.max_bytes,
            max_age=stream.max_age_seconds,
            max_msgs_per_subject=stream.max_per_subject,
            storage=StorageType.FILE,
            allow_direct=True,
            duplicate_window=120,
        )
        js = self.client.jetstream(timeout=2)
        try:
            await js.add_stream(config)
        except nats.js.errors.BadRequestError:
            await js.update_stream(config)

    async def load(self, settings: Settings) -> ClusterState:
        """The stored cluster state: the newest snapshot that can be read, and every entry after it."""
        snapshot = await self._newest_snapshot(settings)
        cluster = ClusterState(settings, snapshot.state)
        first, last = await extent(self.client, subjects.LOG_STREAM.name)
        if last > snapshot.seq and first > snapshot.seq + 1:
            raise BadState(
                f"the log begins at {first} but the newest readable snapshot ends at {snapshot.seq}: "
                f"{first - snapshot.seq - 1} entries are missing",
                hint="restore the nats folder of the state folder from a backup; nothing was changed",
            )
        self.seq = self.snapshot_seq = snapshot.seq
        async for stored in read_log(self.client, subjects.LOG_STREAM.name, snapshot.seq + 1):
            entry = _decode(stored, settings)
            cluster.fold(entry.records, entry.at)
            self.seq = stored.seq
        self.seq = max(self.seq, last)
        if last < snapshot.seq:
            await self._make_up(last, snapshot.seq)
        return cluster

    async def _make_up(self, last: int, seq: int) -> None:
        """The log ends before the snapshot, because the server dropped a damaged part. The snapshot contains what was
        in it, so only the numbering must be made up; otherwise new entries would seem older than the snapshot."""
        log.warning("the log lost its entries %d to %d; a snapshot has what they said", last + 1, seq)
        filler = encode(Entry(term=0, at=0.0, records=(), format=FORMAT))
        self.seq = last
        while self.seq < seq:
            await self._append(filler)

    async def _newest_snapshot(self, settings: Settings) -> Snapshot:
        newest = Snapshot(seq=0, state=State())
        async for stored in read_log(self.client, subjects.SNAPSHOT_STREAM.name, 1):
            self._snapshot_stream_seq = stored.seq
            try:
                data = zlib.decompress(stored.data)
                _check_format(decoder(_SnapshotFormat)(data).state.format, settings)
                snapshot = decoder(Snapshot)(data)
            except (zlib.error, msgspec.MsgspecError) as error:
                log.warning("snapshot %d cannot be read and is passed over: %s", stored.seq, error)
                continue
            if snapshot.seq >= newest.seq:
                newest = snapshot
        return newest

    # ── append ──

    async def append(self, term: int, at: float, records: list[Record]) -> None:
        """Store records, durably, in order. Returns when they are on disk; raises Fenced if someone took over."""
        for part in _split(records):
            await self._append(encode(Entry(term=term, at=at, records=part, format=FORMAT)))

    async def _append(self, data: bytes) -> None:
        headers = {"Nats-Expected-Last-Sequence": str(self.seq)}
        for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
            link = self.client.stats["reconnects"]
            try:
                seq = await store_expected(self.client, subjects.LOG_STREAM, subjects.LOG.template, data, headers)
                if seq is None and not await self._is_ours(data):
                    raise Fenced("a newer weaver has taken over; this one stops")
                self.seq, self.refusing = seq or self.seq + 1, False
                self.health.is_mended("log")
                return
            except nats.js.errors.APIError as error:
                self.refusing = True
                trouble = str(error.description)
            except nats.errors.ConnectionClosedError as error:
                raise Unreachable("the server no longer lets this weaver in") from error
            except (nats.errors.Error, OSError) as error:
                self.refusing = self.client.is_connected and link == self.client.stats["reconnects"]
                trouble = str(error) or type(error).__name__
            self.health.complain("log", phrase("log_unwritable", why=trouble))
            await asyncio.sleep(pause)

    async def _is_ours(self, data: bytes) -> bool:
        """Whether what follows our last entry is this one: stored by an attempt whose acknowledgement got lost."""
        async for stored in read_log(self.client, subjects.LOG_STREAM.name, self.seq + 1, last=self.seq + 1):
            return stored.data == data
        return False

    async def write_snapshot(self, state: State) -> None:
        """Store the fold of the log up to now. A weaver that was replaced is refused here too."""
        seq = self.seq
        data = await asyncio.to_thread(zlib.compress, encode(Snapshot(seq=seq, state=state)), 3)
        if len(data) > self.client.max_payload:
            log.error(
                "the state (%d bytes packed) is larger than the server's max_payload (%d): raise it, or the log's "
                "limits will one day cut off what is not in a snapshot", len(data), self.client.max_payload,
            )  # fmt: skip
            return
        headers = {"Nats-Expected-Last-Sequence": str(self._snapshot_stream_seq)}
        stream, subject = subjects.SNAPSHOT_STREAM, subjects.SNAPSHOT.template
        stream_seq = await store_expected(self.client, stream, subject, data, headers)
        if stream_seq is None:
            # Ours, stored but not acknowledged; or a newer weaver's, and then the next append says so.
            self._snapshot_stream_seq = (await extent(self.client, stream.name)).last
        else:
            self._snapshot_stream_seq, self.snapshot_seq = stream_seq, seq


def _decode(stored: Stored, settings: Settings) -> Entry:
    """An entry of the log; BadState if it is of another format, or damaged."""
    try:
        entry = decode_entry(stored.data)
    except msgspec.MsgspecError as error:
        with suppress(msgspec.MsgspecError):
            _check_format(decoder(_Format)(stored.data).format, settings)
        raise BadState(
            f"log entry {stored.seq} cannot be read: {error}",
            hint="restore the nats folder of the state folder from a backup, or use a new --state; nothing was changed",
        ) from error
    _check_format(entry.format, settings)
    return entry


def _split(records: list[Record]) -> Iterator[tuple[Record, ...]]:
    """Parts that each fit a message. The mark of the inbox comes last, so a part that is missing is decided again."""
    part: list[Record] = []
    size = 0
    for record in records:
        length = len(encode(record))
        if part and size + length > ENTRY_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(record)
        size += length
    yield tuple(part)


@dataclass(eq=False)
class CurveStore:
    """The downsampled history of every rank, in memory and in a stream."""

    client: Client
    cluster: ClusterState
    clock: Clock

    async def keep(self) -> None:
        await quietly(self._recall_curves)
        while True:
            await asyncio.sleep(self.cluster.settings.curve_seconds)
            await quietly(self._extend_curves)

    async def _recall_curves(self) -> None:
        async for stored in read_log(self.client, subjects.CURVES_STREAM.name, 1):
            try:
                points = decode_points(stored.data).points
            except msgspec.MsgspecError as error:
                log.warning("curve points %d cannot be read and are passed over: %s", stored.seq, error)
                continue
            for rank, point in points:
                self._add_point(rank, point)

    async def _extend_curves(self) -> None:
        now = round(self.clock(), 3)
        ranks, chunks = tuple(self.cluster.runtime.ranks), []
        for start in range(0, len(ranks), CURVE_RANKS):
            chunks.append(tuple(filter(None, (self._extend(rank, now) for rank in ranks[start : start + CURVE_RANKS]))))
            await asyncio.sleep(0)  # beats wait
        js = self.client.jetstream(timeout=2)
        for chunk in filter(None, chunks):
            data = encode(CurvePoints(points=chunk))
            await js.publish(subjects.CURVES.template, data, stream=subjects.CURVES_STREAM.name)

    def _extend(self, rank: RankId, now: float) -> tuple[RankId, Point] | None:
        """Add a point for the latest beat, if there was one since the last point."""
        rank_runtime = self.cluster.runtime.ranks.get(rank)
        if rank_runtime is None or rank_runtime.beat is None or rank_runtime.heard <= rank_runtime.charted:
            return None
        rank_runtime.charted = rank_runtime.heard
        point = Point(now, rank_runtime.beat.step, rank_runtime.beat.loss, rank_runtime.beat.samples_per_second)
        self._add_point(rank, point)
        return rank, point

    def _add_point(self, rank: RankId, point: Point) -> None:
        rank_runtime = self.cluster.runtime.ranks.get(rank)
        if rank_runtime is not None:
            if rank_runtime.curve is None:
                rank_runtime.curve = Curve(self.cluster.settings.curve_points)
            rank_runtime.curve.add(point)
