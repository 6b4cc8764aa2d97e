"""torchLoom: runtime monitoring and control for distributed PyTorch training.

    import torchloom
    loom = torchloom.attach()

This module is the one public door. Importing it does nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchloom.version import __version__

if TYPE_CHECKING:
    from torchloom.checkpoints.api import Checkpoints
    from torchloom.checkpoints.store.retention import Keep
    from torchloom.client import AsyncClient, Client
    from torchloom.errors import TorchLoomError
    from torchloom.integrations.torchft.attach import attach_manager
    from torchloom.threadlet.threadlet import Threadlet, attach

__all__ = [
    "AsyncClient",
    "Checkpoints",
    "Client",
    "Keep",
    "Threadlet",
    "TorchLoomError",
    "__version__",
    "attach",
    "attach_manager",
]

_HOME = {
    "AsyncClient": "torchloom.client",
    "Checkpoints": "torchloom.checkpoints.api",
    "Keep": "torchloom.checkpoints.store.retention",
    "Client": "torchloom.client",
    "attach": "torchloom.threadlet.threadlet",
    "attach_manager": "torchloom.integrations.torchft.attach",
    "Threadlet": "torchloom.threadlet.threadlet",
    "TorchLoomError": "torchloom.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'torchloom' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
