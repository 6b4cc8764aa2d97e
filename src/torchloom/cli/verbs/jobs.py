"""`loom submit`, `loom wait`, `loom cancel`: jobs that run on the machines with agents."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from uuid import uuid4

from msgspec.structs import replace

from torchloom.cli.verb_call import Call, Parser, Verbs, seconds
from torchloom.errors import BadInput
from torchloom.protocol.ids import check_name
from torchloom.protocol.job_spec import Task
from torchloom.protocol.operator import Cancel, Submit
from torchloom.protocol.scheduling import PolicyName
from torchloom.protocol.views import RunView
from torchloom.shared.suggestions import unknown
from torchloom.views.job_runs import are_over, awaited, describe_run, group_code, replicas, summarize_job

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient

_POLL_SECONDS = 0.2
TIME_IS_UP = 124


def add(verbs: Verbs) -> None:
    verb = verbs["submit"].define(
        submit, "loom submit job.toml --wait", "loom submit workload.csv --time-scale 10 --dry-run"
    )
    verb.add_argument("file", help="Job file (TOML), or a workload: .csv, or TOML with a table [[job]] for each job")
    verb.add_argument("--job", default="", metavar="NAME", help="Use this name instead of the one in the file")
    verb.add_flag("--wait", help="Wait until the job, or every job of the file, has ended, and exit with its result")
    verb.add_flag("--dry-run", help="Show the plan of a workload and check it; submit nothing")
    verb.add_argument("--prefix", default="", metavar="NAME", help="Begin the name of each job of a workload with this")
    verb.add_argument(
        "--time-scale", type=seconds, default=1.0, metavar="X", help="Divide the arrival times of a workload by this"
    )
    verb.add_argument(
        "--set", action="append", default=[], metavar="COLUMN=VALUE",
        help="Use this value in all rows of a .csv file, such as end_iter=20 or submit_interval=30; may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--script",
        default="",
        metavar="PATH",
        help="Run the rows of a .csv file with this script, not the built-in one",
    )
    verb.add_argument(
        "--args", default="", metavar="TEXT", help="Further arguments for the script of the rows: --args '--scale 0.1'"
    )
    policy = "Set the policy by which loaders are allocated before the jobs of a workload: see `loom schedule`"
    verb.add_argument("--policy", choices=get_args(PolicyName), help=policy)
    verb.add_flag("--check", help="Check the nodes before ranks start there, as check = true")
    add_rules(verb)
    verb.add_timeout()

    verb = verbs["wait"].define(wait, "loom wait mnist --timeout 3600", output=False)
    verb.add_run()
    verb.add_argument("--timeout", type=seconds, metavar="S", help="Seconds to wait at most")

    verb = verbs["cancel"].define(cancel, "loom cancel mnist --yes")
    verb.add_run()
    verb.add_yes()
    verb.add_timeout()


def add_rules(verb: Parser) -> None:
    """The options of `loom submit` and `loom run` about responses to incidents."""
    verb.add_argument(
        "--on", action="append", default=[], metavar="RULE",
        help="Respond to a kind of incident: hang=stacks+restart@30, not_finite=rollback,back=2,skip,limit=3; may "
        "be repeated; `loom policy` lists the kinds, docs/policies.md explains",
        complete=complete_rule,
    )  # fmt: skip
    verb.add_flag("--dry-run-policy", help="Only report what the policy would do")


def complete_rule(prefix: str, **_: Any) -> list[str]:
    """A rule of a policy as far as it is typed: its event, then its responses."""
    from torchloom.job.policy_syntax import EVENTS, RESPONSES

    event, equals, responses = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in EVENTS if name.startswith(event)]
    done, plus, typed = responses.rpartition("+")
    return [f"{event}={done}{plus}{name}" for name in RESPONSES if name.startswith(typed)]


def with_rules(task: Task, args: Namespace) -> Task:
    """The task with what these options say; a rule takes the place of one for the same event."""
    from torchloom.job.policy_syntax import rules

    own = {rule.on: rule for rule in (*task.policy, *rules(args.on))}
    dry_run = task.dry_run or args.dry_run_policy
    return replace(task, policy=tuple(own.values()), dry_run=dry_run, check=task.check or bool(args.check))


def submit(call: Call) -> int:
    """The settings in the file have the names of the options of `loom run`: script = "train.py", nnodes = 2,
    nproc_per_node = 8, checkpoint_dir = "runs/a". Paths are relative to the folder of the file.

    A workload has several jobs, which arrive over time: the rows of a .csv file, or tables [[job]] in TOML. Nothing of
    it is submitted if any row has a problem; all problems are listed. docs/workloads.md explains the columns.
    """
    from torchloom.client import operator
    from torchloom.job.job_file_reader import read
    from torchloom.job.workload_file import is_workload

    path = Path(call.args.file)
    if is_workload(path):
        from torchloom.cli.verbs.submit_workload import submit_workload

        return submit_workload(call, lambda task: with_rules(task, call.args))
    _refuse_workload_options(call.args)
    name, task = read(path)
    task = with_rules(task, call.args)
    if call.args.job:
        name = check_name("job", call.args.job)
    ask = Submit(request=uuid4().hex, job=name, task=task, operator=operator())

    async def work(weaver: WeaverClient) -> int:
        call.show_done(await weaver.ask(ask, call.args.timeout))
        if call.args.wait:
            return await _follow(call, weaver, name, None)
        if not call.json:
            call.print(describe_run(run) for run in (await weaver.runs(name)).runs if run.waiting)
        return 0

    return call.query(work, "operator", patience=5.0)


def _refuse_workload_options(args: Namespace) -> None:
    given = {
        "--dry-run": args.dry_run, "--prefix": args.prefix, "--time-scale": args.time_scale != 1, "--set": args.set,
        "--script": args.script, "--args": args.args, "--policy": args.policy,
    }  # fmt: skip
    if option := next((name for name, value in given.items() if value), None):
        raise BadInput(
            f"{option} is for a workload, and {args.file} has one job",
            hint="a .csv file, or TOML with a table [[job]] for each job",
        )


def wait(call: Call) -> int:
    return call.query(lambda weaver: _follow(call, weaver, call.args.job, call.args.timeout), patience=5.0)


async def _follow(call: Call, weaver: WeaverClient, job: str, timeout: float | None) -> int:
    """Report the state of a job until it has ended; its exit code."""
    import asyncio

    end = None if timeout is None else time.monotonic() + timeout
    last = [f"{job} is submitted"]  # which is nothing new
    while True:
        runs = await runs_of(weaver, job)
        if are_over(runs):
            incidents = (await weaver.cluster(job, most=0)).incidents
            call.note(f"loom: {summarize_job(job, runs, time.time(), incidents)}")
            return group_code(runs)
        news = [awaited(run) or describe_run(run) for run in replicas(runs)]
        if news != last:
            call.note(f"loom: {'; '.join(describe_run(run) for run in replicas(runs))}")
            last = news
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
    """Asks the ranks to end and kills them after the grace period. Shows what ends, and asks for confirmation."""
    from torchloom.client import operator

    async def question(weaver: WeaverClient) -> str:
        runs = await runs_of(weaver, call.args.job)
        return f"this will end {call.args.job}. {'; '.join(describe_run(run) for run in replicas(runs))}"

    if not call.confirm(lambda: call.query(question, patience=5.0)):
        return 0
    return call.ask(Cancel(request=uuid4().hex, job=call.args.job, operator=operator()))
