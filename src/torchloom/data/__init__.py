"""Feed training: a DataLoader whose loaders and batch size change while it runs.

    from torchloom.data import ElasticLoader

The class needs torch, and is imported only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchloom.data.loader import ElasticLoader
    from torchloom.data.prepared import make_elastic
    from torchloom.data.seeding import sample_seed
    from torchloom.data.stage_times import decoding

__all__ = ["ElasticLoader", "decoding", "make_elastic", "sample_seed"]

_HOME = {
    "ElasticLoader": "torchloom.data.loader",
    "decoding": "torchloom.data.stage_times",
    "make_elastic": "torchloom.data.prepared",
    "sample_seed": "torchloom.data.seeding",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'torchloom.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
