"""An agent to be killed: starts a supervisor and two ranks, says who they are, and waits for its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.agent.harness import ENV, SupervisorHarness
from torchloom.agent.supervisor.supervisor_client import SupervisorOptions


async def main(home: Path, tied: bool) -> None:
    harness = SupervisorHarness(home)
    await harness.start(home / "supervisor", SupervisorOptions(tied=tied, preload=("json",), env=ENV))
    for warm in (True, False):
        begun = await harness.begin(harness.order("train.py", warm=warm))
        print(begun.key, begun.pid)
    print("supervisor", harness.link.state.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "tied"))
