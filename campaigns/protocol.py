"""The protocol of changes in storm after storm, simulated: as tests/core/test_protocol.py, for as long as it may take.

A problem names the storm's own seed: `World().play(storm(SEED, most=MOST))` plays it again.
"""

from __future__ import annotations

import random
import time
import traceback

from tests.core.world import World, storm

MOST = 600
"""Moves of the longest storm."""
ENOUGH = 10
"""Problems after which there is no need to go on."""


def run(seed: int, seconds: float) -> list[str]:
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    problems: list[str] = []
    storms = changes = skips = 0
    while time.monotonic() < end and len(problems) < ENOUGH:
        number = chance.randrange(2**32)
        world = World()
        try:
            found = world.play(storm(number, MOST))
        except Exception:  # noqa: BLE001  a crash of the core is a finding like any other
            found = [traceback.format_exc()]
        problems += [f"storm {number}: {problem}" for problem in found[:1]]
        storms += 1
        changes += len(world.proposed)
        skips += sum(len(one.skipped) for one in world.lives)
    print(f"  {storms} storms, {changes} changes proposed, {skips} times a rank was cut off at the step", flush=True)
    return problems
