"""One bit of a checkpoint turned over, again and again: who notices, who loads something else and says nothing?"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import random
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from benchmarks.savers import Dcp, TorchLoom, TorchSave, Training, tensors
from torchloom.checkpoints.api import Checkpoints

MEGABYTES = 1
LAYERS = 1


@dataclass(frozen=True)
class Span:
    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class Subject:
    """A checkpoint: where its tensors lie in it, where everything else, and how to find out what a flip does."""

    data: list[Span]
    other: dict[Path, list[Span]]
    judge: Callable[[], str]
    """`caught`; `harmless`: what it loads is what was saved; `wrong`: it loads something else."""


def measure(folder: Path, flips: int, seed: int) -> dict[str, dict[str, Counter[str]]]:
    """What became of the flips: by kind of checkpoint, and by where the bit was."""
    training = Training(MEGABYTES, LAYERS)
    kinds = {"torchloom": _ours, "torch": _torch_save, "dcp": _dcp}
    found = {}
    for kind, make in kinds.items():
        place = folder / f"flips-{kind}"
        place.mkdir()
        found[kind] = _flip(make(place, training), flips, random.Random(seed))
    return found


def _flip(subject: Subject, flips: int, rng: random.Random) -> dict[str, Counter[str]]:
    """Half of them in the tensors, half elsewhere: in each file as often."""
    found: dict[str, Counter[str]] = {"tensors": Counter(), "elsewhere": Counter()}
    for number in range(flips):
        where = "tensors" if number % 2 == 0 else "elsewhere"
        spans = subject.data if number % 2 == 0 else subject.other[rng.choice(sorted(subject.other))]
        span = rng.choices(spans, [span.end - span.start for span in spans])[0]
        with flipped(span.path, rng.randrange(span.start, span.end), 1 << rng.randrange(8)):
            found[where][subject.judge()] += 1
    if subject.judge() not in {"harmless", "whole"}:
        raise RuntimeError("a checkpoint that nobody touched is refused, or was not restored")
    return found


@contextlib.contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(file, 1, at)
        os.pwrite(file, bytes([before[0] ^ bit]), at)
        try:
            yield
        finally:
            os.pwrite(file, before, at)
    finally:
        os.close(file)


def _ours(folder: Path, training: Training) -> Subject:
    """Two of them: the newer one is damaged, the older one has to be what is found then."""
    saver = TorchLoom(training, folder)
    for step in (1, 2):
        saver.begin(folder / f"step-{step}")
        saver.finish()
    saver.close()
    checkpoints = Checkpoints(folder)

    def judge() -> str:
        found = checkpoints.latest()
        return "whole" if found.step == 2 else "caught" if "step-2" in found.rejected else "wrong"

    state, manifest = folder / "step-2" / "state.pt", folder / "step-2" / "manifest.json"
    data, other = _split(state, [(0, state.stat().st_size)])
    return Subject(data, {state: other, manifest: [Span(manifest, 0, manifest.stat().st_size)]}, judge)


def _torch_save(folder: Path, training: Training) -> Subject:
    path = folder / "state.pt"
    TorchSave(training).begin(path)
    saved = copy.deepcopy(training.state())

    def judge() -> str:
        try:
            loaded = torch.load(path, map_location="cpu", mmap=False)
        except Exception:  # noqa: BLE001  whatever it says, it noticed
            return "caught"
        return "harmless" if same(loaded, saved) else "wrong"

    data, other = _split(path, [(0, path.stat().st_size)])
    return Subject(data, {path: other}, judge)


def _dcp(folder: Path, training: Training) -> Subject:
    path = folder / "state"
    saver = Dcp(training)
    saver.begin(path)
    saver.finish()
    saved = copy.deepcopy(training.state())

    def judge() -> str:
        loaded = copy.deepcopy(saved)
        for tensor in tensors(loaded):
            tensor.zero_()
        logging.disable()  # it tells each damage at length
        try:
            dcp.load(loaded, checkpoint_id=path, no_dist=True)
        except (Exception, CheckpointException):  # noqa: BLE001
            return "caught"
        finally:
            logging.disable(logging.NOTSET)
        return "harmless" if same(loaded, saved) else "wrong"

    pieces = dcp.FileSystemReader(path).read_metadata().storage_data.values()
    file = path / "__0_0.distcp"
    data, other = _split(file, [(piece.offset, piece.length) for piece in pieces])
    metadata = path / ".metadata"
    return Subject(data, {file: other, metadata: [Span(metadata, 0, metadata.stat().st_size)]}, judge)


def _split(path: Path, archives: list[tuple[int, int]]) -> tuple[list[Span], list[Span]]:
    """Where tensors lie in a file of zip archives (offset, length) as torch writes them, and all that lies between."""
    content = path.read_bytes()
    data = sorted(
        (offset + start, offset + end)
        for offset, length in archives
        for start, end in _tensors_in(content[offset : offset + length])
    )
    edges = [0, *(edge for span in data for edge in span), len(content)]
    between = zip(edges[::2], edges[1::2], strict=True)
    return [Span(path, *span) for span in data], [Span(path, *span) for span in between if span[0] < span[1]]


def _tensors_in(archive: bytes) -> Iterator[tuple[int, int]]:
    if not zipfile.is_zipfile(io.BytesIO(archive)):
        return
    with zipfile.ZipFile(io.BytesIO(archive)) as entries:
        for entry in entries.infolist():
            if "/data/" in entry.filename and entry.file_size:
                name, extra = struct.unpack_from("<HH", archive, entry.header_offset + 26)
                start = entry.header_offset + 30 + name + extra
                yield start, start + entry.file_size


def same(one: Any, other: Any) -> bool:
    """To the bit, and the same keys."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        bits = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return bool(torch.equal(*bits))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)
