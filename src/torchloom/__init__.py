"""torchLoom: runtime monitoring and control for distributed PyTorch training.

    import torchloom
    loom = torchloom.attach()

This module is the one public door. Importing it does nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torchloom.checkpoints.checkpoints import Checkpoints
    from torchloom.checkpoints.retention import Keep
    from torchloom.client import AsyncClient, Client
    from torchloom.errors import TorchLoomError
    from torchloom.integrations.torchft.attaching import attach_manager
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
    "Checkpoints": "torchloom.checkpoints.checkpoints",
    "Keep": "torchloom.checkpoints.retention",
    "Client": "torchloom.client",
    "attach": "torchloom.threadlet.threadlet",
    "attach_manager": "torchloom.integrations.torchft.attaching",
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
