"""Fixtures every part shares: a real nats-server on a folder of its own, and the settings that find it."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings as examples

from tests.nats_servers import Servers
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.settings import Settings

examples.register_profile("repeatable", deadline=None, derandomize=True)  # what fails is the change, not the draw
examples.register_profile("drawn", deadline=None, print_blob=True)  # `make campaign`, with its seed
examples.load_profile("repeatable")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture
def server(servers: Servers) -> Iterator[EmbeddedServer]:
    """A running nats-server without streams or connections, on a port it chose. The test may kill it."""
    yield servers.take()
    servers.give_back()


@pytest.fixture
def settings(server: EmbeddedServer) -> Settings:
    """Settings that lead to `server`, whatever the environment says."""
    return Settings(state=str(server.folder.path))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--noise",
        action="store_true",
        help="have every sentence replaced by noise, here and in all processes that tests start;"
        " skips the tests marked wording",
    )
    parser.addoption(
        "--torch-tests",
        metavar="PATH",
        help="run test/test_dataloader.py of PyTorch's sources with ElasticLoader (tests/data/test_torch_own_tests.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores both in what it starts in the background, and every process of a test would inherit that.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if config.getoption("--noise"):
        folder = str(Path(__file__).parent / "noise")
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder not in inherited:  # a worker has it from the process that started it
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, inherited)])
        importlib.import_module("tests.noise.sitecustomize")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no core is idle in the end: tests with real ranks and nodes."""
    items.sort(key=lambda item: "flow" not in item.path.parts)
    if config.getoption("--noise"):
        marked = [item for item in items if item.get_closest_marker("wording")]
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
