"""Benchmarks and campaigns run rarely; a rename must not break them without notice."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    f"{folder}.{path.stem}"
    for folder in ("benchmarks", "campaigns")
    for path in sorted((ROOT / folder).glob("*.py"))
    if not path.stem.startswith("__")
]


@pytest.mark.parametrize("module", MODULES)
def test_what_runs_rarely_can_be_imported(module: str) -> None:
    importlib.import_module(module)
