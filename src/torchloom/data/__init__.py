"""Feed training: a DataLoader whose loader processes and batch size change while it runs.

    from torchloom.data import ElasticLoader

The class needs torch, and is imported only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchloom.data.loader import ElasticLoader

__all__ = ["ElasticLoader"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torchloom.data' has no attribute {name!r}")
    from torchloom.data import loader

    return getattr(loader, name)
