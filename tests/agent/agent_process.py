"""An agent to be killed: starts a keeper and two ranks, says who they are, and waits for its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.agent.stand import ENV, RankProgress
from torchloom.agent.supervisor.supervisor_client import SupervisorOptions


async def main(home: Path, tied: bool) -> None:
    stand = RankProgress(home)
    await stand.start(home / "keeper", SupervisorOptions(tied=tied, preload=("json",), env=ENV))
    for warm in (True, False):
        begun = await stand.begin(stand.order("train.py", warm=warm))
        print(begun.key, begun.pid)
    print("keeper", stand.link.state.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "tied"))
