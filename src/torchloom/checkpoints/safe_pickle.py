"""Reads torch.distributed.checkpoint's pickles without running code: only the few classes they need are allowed."""

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
        is_allowed = (module, name) in _ALLOWED
        if is_allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains a {module}.{name}, which no checkpoint does")


def load_metadata(data: bytes) -> Any:
    """The unpickled data. Raises UnpicklingError, or any other exception that damaged bytes lead to."""
    return _Unpickler(io.BytesIO(data)).load()
