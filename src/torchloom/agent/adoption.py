"""Taking over what an agent before this one started: the ranks went on without it.

An attempt's folder says how it was started; the keepers, which the ranks are children of, say what became of them.
"""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path

from torchloom.agent.agent import COLD, STANDBY, Agent, JobHere
from torchloom.agent.attempt import Attempt
from torchloom.agent.log_files import launches
from torchloom.agent.supervisor.exit_records import ExitRecordStore
from torchloom.agent.supervisor.protocol import RankRecord
from torchloom.agent.supervisor.supervisor_client import SupervisorClient, SupervisorGone
from torchloom.errors import Unreachable

GONE = "it was gone when a new agent looked for it; was the machine started anew?"


async def adopt(agent: Agent) -> int:
    """Find everything again; how many ranks still run."""
    found = 0
    for folder in sorted(path for path in agent.folder.iterdir() if path.is_dir()):
        standing = [launch for launch, over in launches(folder) if not over]
        attempts = [agent.hold(launch) for launch in standing]
        for attempt, launch in zip(attempts, standing, strict=True):
            attempt.expect(launch, agent.node.name)
        for name in (COLD, STANDBY):
            job = agent.jobs.get(folder.name) or JobHere(folder)
            link, kept = await _keeper(agent, job, folder / name, wanted=bool(attempts))
            if link is not None:
                job.cold, job.standby = (link, job.standby) if name == COLD else (job.cold, link)
            for attempt in attempts:
                found += _found(attempt, link, kept)
        for attempt in attempts:
            attempt.miss(GONE)
    return found


async def _keeper(
    agent: Agent, job: JobHere, folder: Path, wanted: bool
) -> tuple[SupervisorClient | None, dict[str, RankRecord]]:
    """The keeper in this folder, if it lives, and what it, or what it wrote, says of its ranks."""
    if not folder.is_dir():
        return None, {}
    try:
        link = await agent.link(job, partial(SupervisorClient.find, folder))
    except (Unreachable, SupervisorGone):
        kept = ExitRecordStore(folder).read()
        if not wanted:
            shutil.rmtree(folder, ignore_errors=True)
        return None, kept
    if not wanted:  # nothing is left that it could be for
        with contextlib.suppress(SupervisorGone):
            await link.dismiss()
        shutil.rmtree(folder, ignore_errors=True)
        return None, {}
    return link, {kept.begun.key: kept for kept in link.state.kept}


def _found(attempt: Attempt, link: SupervisorClient | None, kept: dict[str, RankRecord]) -> int:
    running = 0
    for rank in attempt.ranks:
        known = kept.get(attempt.key(rank))
        if known is None:
            continue
        if known.ended is not None:
            attempt.ended(rank, known.ended)
        elif link is not None:
            attempt.link = link
            attempt.runs(rank, known.begun)
            running += 1
    return running
