"""Fixtures of the integrations' tests: the played weaver of the threadlet's, and a stock lighthouse of torchft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.threadlet.conftest import _nobody_stays, lively, server, weaver  # noqa: F401


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of one that goes on as soon as it may.

    A replica whose heartbeats are late on a busy machine must not count as gone: the others would go on without it.
    """
    torchft: Any = pytest.importorskip("torchft._torchft", reason="torchft is not installed")
    lighthouse = torchft.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=5000
    )
    yield lighthouse.address()
    lighthouse.shutdown()
