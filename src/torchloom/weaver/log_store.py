"""What the weaver stores in JetStream: the log, the snapshots from which it starts, verdicts and curves.

Every append names the sequence that it expects to follow. A second weaver that took over has appended its term, so the
server refuses the next append of the first one (`Fenced`): two weavers never both act.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from torchloom import __version__
from torchloom.bus import change_verdicts
from torchloom.bus.change_verdicts import WRONG_LAST_SEQUENCE
from torchloom.bus.log_reader import Stored, extent, read_log
from torchloom.bus.state_folder import StateFolder
from torchloom.core.state.cluster import FORMAT, ClusterState, State
from torchloom.errors import BadState, Fenced, Unreachable
from torchloom.protocol.codec import decode_entry, decode_points, encode
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import Entry, Record
from torchloom.protocol.subjects import (
    CURVES,
    CURVES_STREAM,
    LOG,
    LOG_STREAM,
    SNAPSHOT,
    SNAPSHOT_STREAM,
    STREAMS,
    Stream,
)
from torchloom.protocol.views import CurvePoints
from torchloom.settings import Settings
from torchloom.views.wording.phrases import render

log = logging.getLogger("torchloom.weaver")

ENTRY_BYTES = 256 * 1024
"""Records of one append are split into messages of about this size."""
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


_decode_snapshot = msgspec.json.Decoder(Snapshot).decode
_decode_snapshot_format = msgspec.json.Decoder(_SnapshotFormat).decode
_decode_format = msgspec.json.Decoder(_Format).decode


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


class Store:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._js = client.jetstream(timeout=2)
        self.on_trouble: Callable[[Prose], None] = lambda trouble: log.warning("%s", render(trouble))
        """Called with the reason why the log cannot be written; with an empty text when it works again."""
        self.refusing = False
        """The server does not take the entry being written: it says so, or says nothing over a link that stands. A link
        that broke in the middle of a write is not that, and what is asked meanwhile only has to wait."""
        self.seq = 0
        """The last sequence of the log that this weaver knows."""
        self.snapshot_seq = 0
        self._snapshot_stream_seq = 0

    # ── start ──

    async def open(self) -> None:
        """Create the streams, or update their limits."""
        for stream in STREAMS:
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

    async def _ensure(self, stream: Stream) -> None:
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
        try:
            await self._js.add_stream(config)
        except nats.js.errors.BadRequestError:
            await self._js.update_stream(config)

    async def load(self, settings: Settings) -> ClusterState:
        """The stored cluster state: the newest snapshot that can be read, and every entry after it."""
        snapshot = await self._newest_snapshot(settings)
        cluster = ClusterState(settings, snapshot.state)
        first, last = await extent(self._client, LOG_STREAM.name)
        if last > snapshot.seq and first > snapshot.seq + 1:
            raise BadState(
                f"the log begins at {first} but the newest readable snapshot ends at {snapshot.seq}: "
                f"{first - snapshot.seq - 1} entries are missing",
                hint="restore the nats folder of the state folder from a backup; nothing was changed",
            )
        self.seq = self.snapshot_seq = snapshot.seq
        async for stored in read_log(self._client, LOG_STREAM.name, snapshot.seq + 1):
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
        async for stored in read_log(self._client, SNAPSHOT_STREAM.name, 1):
            self._snapshot_stream_seq = stored.seq
            try:
                data = zlib.decompress(stored.data)
                _check_format(_decode_snapshot_format(data).state.format, settings)
                snapshot = _decode_snapshot(data)
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
        attempt = 0
        while True:
            link = self._client.stats["reconnects"]
            try:
                ack = await self._js.publish(LOG.template, data, headers=headers, stream=LOG_STREAM.name)
                self._has_appended(ack.seq, attempt)
                return
            except nats.js.errors.APIError as error:
                if error.err_code == WRONG_LAST_SEQUENCE:
                    if not await self._is_ours(data):
                        raise Fenced("a newer weaver has taken over; this one stops") from error
                    self._has_appended(self.seq + 1, attempt)
                    return
                self.refusing = True
                trouble = str(error.description)
            except nats.errors.ConnectionClosedError as error:
                raise Unreachable("the server no longer lets this weaver in") from error
            except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
                self.refusing = self._client.is_connected and link == self._client.stats["reconnects"]
                trouble = str(error) or type(error).__name__
            self.on_trouble(phrase("log_unwritable", why=trouble))
            await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1

    def _has_appended(self, seq: int, attempt: int) -> None:
        self.seq, self.refusing = seq, False
        if attempt:
            self.on_trouble("")

    async def _is_ours(self, data: bytes) -> bool:
        """Whether what follows our last entry is this one: stored by an attempt whose acknowledgement got lost."""
        async for stored in read_log(self._client, LOG_STREAM.name, self.seq + 1, last=self.seq + 1):
            return stored.data == data
        return False

    async def write_snapshot(self, state: State) -> None:
        """Store the fold of the log up to now. A weaver that was replaced is refused here too."""
        seq = self.seq
        data = await asyncio.to_thread(zlib.compress, encode(Snapshot(seq=seq, state=state)), 3)
        if len(data) > self._client.max_payload:
            log.error(
                "the state (%d bytes packed) is larger than the server's max_payload (%d): raise it, or the log's "
                "limits will one day cut off what is not in a snapshot", len(data), self._client.max_payload,
            )  # fmt: skip
            return
        headers = {"Nats-Expected-Last-Sequence": str(self._snapshot_stream_seq)}
        try:
            ack = await self._js.publish(SNAPSHOT.template, data, headers=headers, stream=SNAPSHOT_STREAM.name)
        except nats.js.errors.APIError as error:
            if error.err_code != WRONG_LAST_SEQUENCE:
                raise
            # Ours, stored but not acknowledged; or a newer weaver's, and then the next append says so.
            self._snapshot_stream_seq = (await extent(self._client, SNAPSHOT_STREAM.name)).last
            return
        self._snapshot_stream_seq = ack.seq
        self.snapshot_seq = seq

    # ── verdicts ──

    async def write_verdict(self, job: str, change: str, commit: bool) -> bool:
        """Write a verdict on a change unless one stands; whether the one that stands is commit."""
        return await change_verdicts.write_verdict(self._client, job, change, commit)

    # ── curves ──

    async def write_curves(self, points: CurvePoints) -> None:
        await self._js.publish(CURVES.template, encode(points), stream=CURVES_STREAM.name)

    async def read_curves(self) -> AsyncIterator[CurvePoints]:
        async for stored in read_log(self._client, CURVES_STREAM.name, 1):
            try:
                yield decode_points(stored.data)
            except msgspec.MsgspecError as error:
                log.warning("curve points %d cannot be read and are passed over: %s", stored.seq, error)


def _decode(stored: Stored, settings: Settings) -> Entry:
    """An entry of the log; BadState if it is of another format, or damaged."""
    try:
        entry = decode_entry(stored.data)
    except msgspec.MsgspecError as error:
        with suppress(msgspec.MsgspecError):
            _check_format(_decode_format(stored.data).format, settings)
        raise BadState(
            f"log entry {stored.seq} cannot be read: {error}",
            hint="restore the nats folder of the state folder from a backup, or use a new --state; nothing was changed",
        ) from error
    _check_format(entry.format, settings)
    return entry


def _split(records: list[Record]) -> list[tuple[Record, ...]]:
    """Parts that each fit a message. The mark of the inbox comes last, so a part that is missing is decided again."""
    parts: list[tuple[Record, ...]] = []
    part: list[Record] = []
    size = 0
    for record in records:
        length = len(encode(record))
        if part and size + length > ENTRY_BYTES:
            parts.append(tuple(part))
            part, size = [], 0
        part.append(record)
        size += length
    parts.append(tuple(part))
    return parts
