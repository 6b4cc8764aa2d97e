"""Files in torch's formats: written with checksums, and read without running any code in them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from torchloom.checkpoints.store.checksums import ChecksummedFile
from torchloom.checkpoints.store.manifest import FileEntry
from torchloom.errors import Damaged

STATE: Final = "state.pt"
"""The state of one process, which torch can read without torchLoom."""
_META: Final = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = {
    (_META, "Metadata"),
    (_META, "TensorStorageMetadata"),
    (_META, "TensorProperties"),
    (_META, "ChunkStorageMetadata"),
    (_META, "BytesStorageMetadata"),
    (_META, "MetadataIndex"),
    (_META, "StorageMeta"),
    (_META, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.storage", "WriteResult"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""The classes that pickles of torch.distributed.checkpoint need."""


def write(path: Path, tree: Any, grown: Callable[[int], None] = lambda _: None) -> FileEntry:
    """Write a tree with torch.save, and make it durable."""
    with ChecksummedFile(path, grown) as sink:
        torch.save(tree, sink)
        return sink.finish()


def read(path: Path) -> Any:
    """The contents of a torch.save file, without running any code in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except OSError as error:
        raise Damaged(path, f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged or hostile pickle leads to
        raise Damaged(path, f"torch.load refuses it: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_allowed = (module, name) in _ALLOWED
        if is_allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains a {module}.{name}, which no checkpoint does")


def load_metadata(data: bytes) -> Any:
    """What torch.distributed.checkpoint pickled. Raises UnpicklingError, or whatever damaged bytes lead to."""
    return _Unpickler(io.BytesIO(data)).load()
