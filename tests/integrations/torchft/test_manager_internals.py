"""What of torchft is used that is not public is there in this version; where it is not, that one thing is off."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest

from tests.integrations.torchft.replicas import JOB, Replica
from torchloom.integrations.torchft import manager_internals
from torchloom.settings import Settings

torchft: Any = pytest.importorskip("torchft", reason="torchft is not installed")

CALLED = ("start_quorum", "wait_quorum", "should_commit", "report_error", "current_step", "register_state_dict_fn")


def blame(name: str, why: str) -> str:
    return f"torchft {manager_internals.version()} broke it: {name}, for {why}"


async def test_every_private_name_is_there(lighthouse: str) -> None:
    replica = await asyncio.to_thread(Replica, lighthouse, "a", None)
    for name, why in manager_internals.PRIVATE.items():
        assert getattr(replica.manager, name, None) is not None, blame(name, why)
    store = replica.manager._store
    assert store.check([manager_internals.REPLICA_ID_KEY]), blame(
        "the key of the id", manager_internals.PRIVATE["_store"]
    )
    arguments = inspect.signature(replica.manager._pg.configure).parameters
    assert {"quorum_id", "world_size"} <= set(arguments), blame("configure()", manager_internals.PRIVATE["_pg"])
    assert callable(replica.manager._pg.abort), blame("abort()", manager_internals.PRIVATE["_pg"])
    receive = replica.manager._checkpoint_transport.recv_checkpoint
    assert callable(receive), blame("recv_checkpoint()", manager_internals.PRIVATE["_checkpoint_transport"])
    await asyncio.to_thread(replica.end)


def test_every_method_that_is_looked_on_at_is_there() -> None:
    for name in CALLED:
        assert callable(getattr(torchft.Manager, name, None)), blame(name, "all of it")


@pytest.mark.parametrize("name", ["_store", "_group_rank", "_pg", "_checkpoint_transport"])
async def test_a_name_that_is_missing_is_told_once_and_training_goes_on(
    name: str, lighthouse: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    manager_internals._warned.clear()
    replica = await asyncio.to_thread(Replica, lighthouse, "a", None)
    kept = vars(replica.manager).pop(name)

    def attach() -> None:
        import torchloom

        replica.loom = torchloom.attach_manager(replica.manager, JOB, settings=settings)
        manager_internals.private_attribute(replica.manager, name)
        setattr(replica.manager, name, kept)

    with caplog.at_level(logging.WARNING, "torchloom"):
        await asyncio.to_thread(replica.do, attach)
    told = [record.getMessage() for record in caplog.records if manager_internals.version() in record.getMessage()]
    assert len([text for text in told if f"Manager.{name}" in text]) == 1
    assert await asyncio.to_thread(replica.attempt)
    assert replica.loom.step_number == 1
    await asyncio.to_thread(replica.end)


async def test_what_is_no_manager_is_told_and_no_error(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    import torchloom

    manager_internals._warned.clear()
    loom = await asyncio.to_thread(torchloom.attach_manager, object(), JOB, settings=settings)
    assert "cannot be followed" in caplog.text
    loom.step(loss=1.0)
    assert loom.step_number == 1  # as with attach()


async def test_a_manager_that_cannot_be_followed_whole_is_left_as_it_was(
    lighthouse: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    import torchloom

    replica = await asyncio.to_thread(Replica, lighthouse, "a", None)
    replica.manager.register_state_dict_fn("torchloom", lambda _: None, dict)  # the script's own, by chance
    replica.loom = await asyncio.to_thread(torchloom.attach_manager, replica.manager, JOB, settings=settings)
    assert "cannot be followed" in caplog.text
    assert not {"start_quorum", "should_commit"} & set(vars(replica.manager))
    assert await asyncio.to_thread(replica.attempt)
    await asyncio.to_thread(replica.end)
