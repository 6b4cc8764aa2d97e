"""Our lighthouse and torchft's answer the same, wherever the rules leave no doubt."""

from __future__ import annotations

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: nothing to compare with")

from tests.lighthouse.histories import many

HISTORIES = 50


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_same_histories_have_the_same_quorums() -> None:
    total = await many(seed=20, count=HISTORIES)
    assert not total.wrong
    assert total.histories >= HISTORIES // 2, f"too busy a machine: {total}"
    assert total.compared > total.asked / 3, f"too little can be told: {total}"
