"""Tasks are kept until they end, and one that loses a cancellation is cancelled again."""

from __future__ import annotations

import asyncio
import contextlib

from torchloom.bus.tasks import TaskSet, end_all


async def test_a_task_that_swallows_two_cancellations_ends_with_the_third() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            swallowed += 1
        await asyncio.sleep(60)

    async def failing() -> None:
        raise ValueError("never mind")

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(failing())]
    await asyncio.sleep(0)
    await asyncio.wait_for(end_all(tasks), 60)
    assert swallowed == 2
    assert all(task.done() for task in tasks)


async def test_a_task_is_kept_until_it_has_ended() -> None:
    tasks, finish = TaskSet(), asyncio.Event()
    tasks.start(finish.wait())
    tasks.keep(asyncio.create_task(asyncio.sleep(60)))
    await asyncio.sleep(0)
    assert len(tasks) == 2
    finish.set()
    await asyncio.sleep(0.01)
    assert len(tasks) == 1
    await tasks.end()
    assert not tasks
