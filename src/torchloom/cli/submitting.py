"""`loom submit`, `loom wait`, `loom cancel`: jobs that run on the machines with agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchloom.cli import names
from torchloom.cli.answer import show
from torchloom.cli.asked import add_timeout, seconds
from torchloom.cli.rules import add_rules, with_rules
from torchloom.errors import Refused
from torchloom.guess import unknown

if TYPE_CHECKING:
    from torchloom.bus.asking import Asking
    from torchloom.cli.call import Call
    from torchloom.cli.verbs import Verbs
    from torchloom.messages import Done, RunView

_POLL_SECONDS = 0.2
TIME_IS_UP = 124


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "submit", submit, "have a job run on machines with agents, as soon as there is room",
        'The file says what `loom run` takes as options: script = "train.py", nnodes = 2, nproc_per_node = 8,\n'
        'checkpoint_dir = "runs/a" and so on; its paths are meant from its folder.\n\n  loom submit job.toml --wait',
        listing=True,
    )  # fmt: skip
    verb.add_argument("file", metavar="FILE", help="a job.toml")
    verb.add_argument("--job", default="", metavar="NAME", help="instead of the name in the file")
    verb.add_argument("--wait", action="store_true", help="until it is over; exits as it does")
    add_rules(verb)
    add_timeout(verb)

    verb = verbs.add("wait", wait, "wait until a job is over, and exit as it does", "  loom wait mnist --timeout 3600")
    names.with_names(verb.add_argument("job", metavar="JOB"), names.complete_run)
    verb.add_argument("--timeout", type=seconds, default=None, metavar="S", help="give up after so many seconds")

    verb = verbs.add(
        "cancel", cancel, "end a job that torchLoom started, and do not start it again",
        "Ranks are asked to end, and killed after the grace. Says what it will hit and asks.\n\n"
        "  loom cancel mnist --yes", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("job", metavar="JOB"), names.complete_run)
    verb.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add_timeout(verb)


def submit(call: Call) -> int:
    import secrets
    from pathlib import Path

    from torchloom.agent.telling import told
    from torchloom.bus.asking import Asking
    from torchloom.client import operator
    from torchloom.jobfile import read
    from torchloom.messages import Submit, check_name
    from torchloom.subjects import Role

    name, task = read(Path(call.args.file))
    task = with_rules(task, call.args)
    if call.args.job:
        name = check_name("job", call.args.job)
    ask = Submit(request=secrets.token_hex(16), job=name, task=task, operator=operator())

    async def work() -> int:
        async with Asking(call.settings, Role.OPERATOR, patience=5.0) as weaver:
            done = await weaver.ask_until(ask, call.args.timeout)
            show(call, done)
            if not call.json and not call.args.wait:
                for run in (await weaver.runs(name)).runs:
                    call.print([told(run)] if run.waiting else [])
            return await _follow(call, weaver, name, None) if call.args.wait else 0

    return call.wait(work())


def wait(call: Call) -> int:
    from torchloom.bus.asking import Asking
    from torchloom.subjects import Role

    async def work() -> int:
        async with Asking(call.settings, Role.VIEWER, patience=5.0) as weaver:
            return await _follow(call, weaver, call.args.job, call.args.timeout)

    return call.wait(work())


async def _follow(call: Call, weaver: Asking, job: str, timeout: float | None) -> int:
    """Tell what becomes of a job until it is over; its exit code."""
    import asyncio
    import time

    from torchloom.agent.replicas import all_told, are_over, group_code, replicas
    from torchloom.agent.telling import told

    end = None if timeout is None else time.monotonic() + timeout
    said = f"{job} is submitted"  # which is nothing new
    while True:
        runs = await runs_of(weaver, job)
        if are_over(runs):
            incidents = (await weaver.fabric(job, most=0)).incidents
            call.note(f"loom: {all_told(job, runs, time.time(), incidents)}")
            return group_code(runs)
        if (text := "; ".join(told(run) for run in replicas(runs))) != said:
            call.note(f"loom: {text}")
            said = text
        if end is not None and time.monotonic() > end:
            call.note(f"loom: {job} is still {replicas(runs)[0].phase} after {timeout:g} s; it goes on")
            return TIME_IS_UP
        await asyncio.sleep(_POLL_SECONDS)


async def runs_of(weaver: Asking, job: str) -> Sequence[RunView]:
    """The run of a job; of one with several replicas, all of them and what they need."""
    view = await weaver.runs(job)
    if not view.runs:
        raise unknown("job", job, [run.job for run in (await weaver.runs()).runs])
    return view.runs


async def run_of(weaver: Asking, job: str) -> RunView:
    """The one run of a job, or of one of its replicas."""
    runs = await runs_of(weaver, job)
    named = next((run for run in runs if run.job == job), None)
    if named is None and len(runs) > 1:
        names = ", ".join(run.job for run in runs)
        raise Refused(f"{job} has several replicas", hint=f"name one of them: {names}")
    return named or runs[0]


def cancel(call: Call) -> int:
    import secrets

    from torchloom.agent.replicas import replicas
    from torchloom.agent.telling import told
    from torchloom.bus.asking import Asking
    from torchloom.client import operator
    from torchloom.messages import Cancel
    from torchloom.subjects import Role

    async def question() -> str:
        async with Asking(call.settings, Role.VIEWER, patience=5.0) as weaver:
            runs = await runs_of(weaver, call.args.job)
            return f"this will end {call.args.job}. {'; '.join(told(run) for run in replicas(runs))}"

    async def work() -> Done:
        ask = Cancel(request=secrets.token_hex(16), job=call.args.job, operator=operator())
        async with Asking(call.settings, Role.OPERATOR) as weaver:
            return await weaver.ask_until(ask, call.args.timeout)

    if not call.args.yes and not call.confirm(call.wait(question())):
        call.note("nothing was done")
        return 0
    return show(call, call.wait(work()))
