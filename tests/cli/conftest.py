"""Fixtures for the command line: `loom` runs it in this process, `weaver` answers it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.cli.responder import Responder
from tests.views.samples import cluster
from torchloom.cli.main import main
from torchloom.settings import Settings


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Loom = Callable[..., Ran]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TORCHLOOM_") or name in {"torchLoom_ADDR", "MARDUK_ADDR", "NO_COLOR"}:
            monkeypatch.delenv(name)


@pytest.fixture
def weaver(settings: Settings) -> Iterator[Responder]:
    with Responder(settings, cluster()) as responder:
        yield responder


@pytest.fixture
def loom(capfd: pytest.CaptureFixture[str]) -> Loom:
    """Run a command line that needs no server."""

    def run(*words: str) -> Ran:
        capfd.readouterr()
        code = main(words)
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture
def at(loom: Loom, settings: Settings) -> Loom:
    """The same against the test's server."""
    return lambda *words: loom("--state", settings.state, *words)
