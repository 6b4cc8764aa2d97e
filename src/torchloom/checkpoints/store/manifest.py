"""The manifest of a checkpoint: its files with their checksums. It is written last, so it names only complete files.

A checkpoint is a folder `step-N`. Its files are written into a hidden folder beside it and synced; then the manifest;
then the folder is renamed into place and its parent synced. A kill at any moment leaves the old checkpoint or the new.
"""

from __future__ import annotations

import re
import stat
import zlib
from pathlib import Path
from typing import Final, Literal

import msgspec

from torchloom.errors import Damaged
from torchloom.shared.json_decoding import decoder

NAME: Final = "manifest.json"
FORMAT: Final = 1
"""Version of the format; a newer one is rejected rather than misread."""
CHUNK: Final = 16 * 1024 * 1024
"""Bytes per checksum: small enough to locate damage, large enough to keep the list short."""
FOLDER = re.compile(r"step-(\d{1,18})")
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_SEAL = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')
_OPEN: Final = b"00000000"
MAX_BYTES: Final = 256 * 1024 * 1024
"""Most bytes of a manifest."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    chunk: int
    crcs: tuple[int, ...]
    """CRC-32 of each chunk."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    files: tuple[FileEntry, ...]
    format: int = FORMAT
    crc32: str = _OPEN.decode()
    """Checksum of this document, computed with zeros in this place."""
    layout: Literal["single", "sharded"] = "single"
    """One file, or one per rank as torch.distributed.checkpoint writes them."""
    id: str = ""
    """Id of the save: it distinguishes two saves of one step."""
    parts: tuple[str, ...] = ()
    """Names of what was saved: model, optimizer, …"""
    created: float = 0.0
    """Wall time, for display only; the step decides which checkpoint is newest."""
    seconds: float = 0.0
    """Seconds from the start of the copy until its files were durable."""
    world_size: int = 1
    torch: str = ""
    job: str = ""
    knobs: dict[str, bool | int | float | str | tuple[float, ...]] = {}

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def file_names(self) -> set[str]:
        return {file.name for file in self.files}


def folder_name(step: int) -> str:
    return f"step-{step}"


def encode(manifest: Manifest) -> bytes:
    """The document with its own checksum."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return _SEAL.sub(f'"crc32": "{zlib.crc32(data):08x}"'.encode(), data, count=1)


def _is_sealed(data: bytes) -> bool:
    seal = _SEAL.search(data)
    return seal is not None and int(seal[1], 16) == zlib.crc32(data[: seal.start(1)] + _OPEN + data[seal.end(1) :])


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises Damaged. Does not verify the files."""
    path = folder / NAME
    try:
        if path.is_symlink():
            raise Damaged(folder, "its manifest is a link")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            raise Damaged(folder, "its manifest is not a file")
        if status.st_size > MAX_BYTES:
            raise Damaged(folder, "its manifest is larger than any can be")
        data = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(folder, "it has no manifest: it was never finished") from None
    except OSError as error:
        raise Damaged(folder, f"its manifest cannot be read: {error.strerror}") from error
    try:
        version = decoder(_Version)(data).format
        if version > FORMAT:
            raise Damaged(folder, f"its manifest has format {version}, this version reads up to {FORMAT}")
        manifest = decoder(Manifest)(data)
        if not _is_sealed(data):
            raise Damaged(folder, "its manifest is damaged: its checksum does not fit")
    except msgspec.MsgspecError as error:
        raise Damaged(folder, f"its manifest is damaged: {error}") from error
    _check_claims(folder, manifest)
    return manifest


def _check_claims(folder: Path, manifest: Manifest) -> None:
    """Check that no entry leads out of the folder or contradicts itself."""
    match = FOLDER.fullmatch(folder.name)
    if match is not None and int(match[1]) != manifest.step:
        raise Damaged(folder, f"its manifest is that of step {manifest.step}")
    if not manifest.files:
        raise Damaged(folder, "its manifest names no files")
    for file in manifest.files:
        if not _FILE.fullmatch(file.name) or file.name in {".", "..", NAME}:
            raise Damaged(folder, f"its manifest names {file.name!r}, which is no file of a checkpoint")
        if file.size < 0 or file.chunk <= 0 or len(file.crcs) != -(-file.size // file.chunk):
            raise Damaged(folder, f"its manifest contradicts itself about {file.name}")


class _Version(msgspec.Struct):
    format: int = FORMAT
