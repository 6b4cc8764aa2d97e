"""Checkpoints that torchLoom did not write: torch.save files, and DCP, Lightning and Hugging Face folders.

They have no manifest. A torch.save file is a zip archive with a checksum for each part, which torch.load does not
check, but this module does. Of folders it checks whether all files they name exist.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path

import msgspec

from torchloom.errors import Damaged
from torchloom.shared.json_decoding import decoder

PATTERN = re.compile(r"(?:step|checkpoint|ckpt|epoch|iter|iteration)[^A-Za-z0-9]?(\d{1,18})(?=\D*$)", re.IGNORECASE)
"""The last number of a name is its step, if the word before it says so: checkpoint_step_100.pt, step_200.ckpt,
checkpoint-300; not resnet50.pt."""
_LAST = re.compile(r"(?:^|[^0-9])(\d{1,18})(?=\D*$)")
"""For a folder that is known to be a checkpoint, the last number is enough."""
SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".tar"})
_PIECE = 1024 * 1024


def step_of(path: Path) -> int | None:
    """The step in the name of a foreign checkpoint, or None if it does not look like one."""
    if path.name.startswith("."):
        return None
    if path.is_dir():
        match = _LAST.search(path.name) if kind_of(path) else None
    else:
        match = PATTERN.search(path.name[: -len(path.suffix)]) if path.suffix in SUFFIXES else None
    return int(match[1]) if match else None


def check(path: Path, quick: bool = False) -> str:
    """The kind of checkpoint, if it is complete as far as its format tells; raises Damaged otherwise.

    If `quick`, only the table of contents of a torch.save file is read, which a truncated one does not have.
    """
    try:
        kind = kind_of(path)
        if kind != "torch.save":
            _check_folder(path, kind)
        elif not path.is_file():  # opening a pipe would block
            raise Damaged(path, "it is neither a file nor a folder")
        else:
            _check_archive(path, quick)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror or error}") from error
    return kind


def _check_archive(path: Path, quick: bool) -> None:
    """Check every part of the zip archive against its checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                raise Damaged(path, "it is an archive, but not one of torch.save")
            for part in () if quick else archive.infolist():
                with archive.open(part) as content:  # reading to the end raises if the checksum differs
                    while content.read(_PIECE):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise Damaged(path, f"not a whole torch.save file: {error}") from error


def kind_of(path: Path) -> str:
    """A file of torch.save, or the library that wrote this folder; empty if unknown."""
    if not path.is_dir():
        return "torch.save"
    if (path / ".metadata").exists() or any(path.glob("*.distcp")):
        return "dcp"
    if any((path / name).exists() for name in ("trainer_state.json", "config.json")):
        return "huggingface"
    return "lightning" if (path / "checkpoint").is_dir() and (path / "meta.pt").exists() else ""


def _check_folder(path: Path, kind: str) -> None:
    if kind == "dcp":
        if not (path / ".metadata").exists():
            raise Damaged(path, "it has no .metadata: it was never finished")
        if not any(file.stat().st_size for file in path.glob("*.distcp")):
            raise Damaged(path, "it has no shard with anything in it")
    elif kind == "huggingface":
        _check_huggingface(path)
    elif not kind:
        raise Damaged(path, "it is a folder of no kind known here")


def _check_huggingface(path: Path) -> None:
    weights = [p for pattern in ("*.safetensors", "*.bin") for p in path.glob(pattern)]
    if not any(file.stat().st_size for file in weights):
        raise Damaged(path, "it has no weights")
    for index in path.glob("*.index.json"):
        try:
            names = {str(name) for name in decoder(dict)(index.read_bytes())["weight_map"].values()}
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(path, f"{index.name} is damaged") from error
        missing = sorted(name for name in names if not (path / name).exists())
        if missing:
            raise Damaged(path, f"{missing[0]} is missing" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
