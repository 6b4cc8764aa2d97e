"""`loom submit`, `loom wait`, `loom cancel`: jobs that run on the machines with agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchloom.cli.job_options import add_rules, with_rules
from torchloom.cli.verb_registry import Verbs, seconds
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.cli.call import Call
    from torchloom.protocol.operator import Done
    from torchloom.protocol.views import RunView

_POLL_SECONDS = 0.2
TIME_IS_UP = 124


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "submit", submit, "submit a job to machines with agents; it starts as soon as there is room",
        'The settings in the file have the names of the options of `loom run`: script = "train.py", nnodes = 2,\n'
        'nproc_per_node = 8, checkpoint_dir = "runs/a". Paths are relative to the folder of the file.\n\n'
        "  loom submit job.toml --wait",
        listing=True,
    )  # fmt: skip
    verb.add_argument("file", metavar="FILE", help="Job file (TOML)")
    verb.add_argument("--job", default="", metavar="NAME", help="Use this name instead of the one in the file")
    verb.add_argument("--wait", action="store_true", help="Wait until the job has ended, and exit with its result")
    verb.add_argument("--check", action="store_true", help="Check the nodes before ranks start there, as check = true")
    add_rules(verb)
    verb.add_timeout()

    verb = verbs.add(
        "wait", wait, "wait until a job has ended, and exit with its result", "  loom wait mnist --timeout 3600"
    )
    verb.add_run()
    verb.add_argument("--timeout", type=seconds, default=None, metavar="S", help="Seconds to wait at most")

    verb = verbs.add(
        "cancel", cancel, "end a job that torchLoom started, without a restart",
        "Asks the ranks to end and kills them after the grace period. Shows what ends, and asks for confirmation.\n\n"
        "  loom cancel mnist --yes", listing=True,
    )  # fmt: skip
    verb.add_run()
    verb.add_yes()
    verb.add_timeout()


def submit(call: Call) -> int:
    import secrets
    from pathlib import Path

    from torchloom.client import operator
    from torchloom.job.job_file import read
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.operator import Submit
    from torchloom.views.job_runs import told

    name, task = read(Path(call.args.file))
    task = with_rules(task, call.args)
    if call.args.job:
        name = check_name("job", call.args.job)
    ask = Submit(request=secrets.token_hex(16), job=name, task=task, operator=operator())

    async def work(weaver: WeaverClient) -> int:
        done = await weaver.ask_until(ask, call.args.timeout)
        call.show_done(done)
        if not call.json and not call.args.wait:
            for run in (await weaver.runs(name)).runs:
                call.print([told(run)] if run.waiting else [])
        return await _follow(call, weaver, name, None) if call.args.wait else 0

    return call.query(work, "operator", patience=5.0)


def wait(call: Call) -> int:

    return call.query(lambda weaver: _follow(call, weaver, call.args.job, call.args.timeout), patience=5.0)


async def _follow(call: Call, weaver: WeaverClient, job: str, timeout: float | None) -> int:
    """Report the state of a job until it has ended; its exit code."""
    import asyncio
    import time

    from torchloom.views.job_runs import all_told, are_over, group_code, replicas, told

    end = None if timeout is None else time.monotonic() + timeout
    last_text = f"{job} is submitted"  # which is nothing new
    while True:
        runs = await runs_of(weaver, job)
        if are_over(runs):
            incidents = (await weaver.cluster(job, most=0)).incidents
            call.note(f"loom: {all_told(job, runs, time.time(), incidents)}")
            return group_code(runs)
        if (text := "; ".join(told(run) for run in replicas(runs))) != last_text:
            call.note(f"loom: {text}")
            last_text = text
        if end is not None and time.monotonic() > end:
            call.note(f"loom: {job} is still {replicas(runs)[0].phase} after {timeout:g} s; it continues")
            return TIME_IS_UP
        await asyncio.sleep(_POLL_SECONDS)


async def runs_of(weaver: WeaverClient, job: str) -> Sequence[RunView]:
    """The run of a job; of one with several replicas, all of them and what they need."""
    view = await weaver.runs(job)
    if not view.runs:
        raise unknown("job", job, [run.job for run in (await weaver.runs()).runs])
    return view.runs


def cancel(call: Call) -> int:
    import secrets

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.client import operator
    from torchloom.protocol.operator import Cancel
    from torchloom.protocol.subjects import Role
    from torchloom.views.job_runs import replicas, told

    async def question(weaver: WeaverClient) -> str:
        runs = await runs_of(weaver, call.args.job)
        return f"this will end {call.args.job}. {'; '.join(told(run) for run in replicas(runs))}"

    async def work() -> Done:
        ask = Cancel(request=secrets.token_hex(16), job=call.args.job, operator=operator())
        async with WeaverClient(call.settings, Role.OPERATOR) as weaver:
            return await weaver.ask_until(ask, call.args.timeout)

    if not call.args.yes and not call.confirm(call.query(question, patience=5.0)):
        call.note("nothing was done")
        return 0
    return call.show_done(call.wait(work()))
