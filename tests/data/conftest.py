"""Tests of loaders look at the processes that they have started themselves."""

from __future__ import annotations

import pytest

from tests.data.samples import ignore_present_children


@pytest.fixture(autouse=True)
def _only_own_children() -> None:
    ignore_present_children()
