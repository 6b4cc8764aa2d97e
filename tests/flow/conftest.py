"""What tests that hit a training share: a control plane, and runs that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flow.faults import Run, Up


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One control plane for all: what is killed of it comes back, and the next test finds it as it was."""
    plane = Up(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.stop()


@pytest.fixture
def start(tmp_path: Path, up: Up) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def begin(*words: str, own: bool = False, **more: object) -> Run:
        made.append(Run(tmp_path, *words, up=None if own else up, **more))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for run in made:
        run.clear()


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` runs one test with real processes for each promise of the README; `make test-all` runs all."""
    if item.get_closest_marker("promise") is None:
        item.add_marker(pytest.mark.long)
