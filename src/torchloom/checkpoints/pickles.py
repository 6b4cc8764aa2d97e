"""Reading torch.distributed.checkpoint's own pickles as data alone: only the few classes they consist of are made."""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import torch

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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _ALLOWED
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains a {module}.{name}, which no checkpoint does")


def loads(data: bytes) -> Any:
    """UnpicklingError, or whatever else damaged bytes lead to, if it is none."""
    return _Unpickler(io.BytesIO(data)).load()
