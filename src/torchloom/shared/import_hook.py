"""Calls a function once a module has been imported, without importing it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], object]


def when_imported(name: str, then: Then) -> None:
    """Call `then` with the module: now if it is imported already, otherwise after its import. It may fail."""
    if name in sys.modules:
        with contextlib.suppress(Exception):
            then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch:
    """A finder that removes itself when its module is found, and then stands in for the module's loader."""

    def __init__(self, name: str, then: Then) -> None:
        self._name = name
        self._then = then
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]  # all that is asked of one
                return spec
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(Exception):  # the module is what the script has asked for
            self._then(module)
