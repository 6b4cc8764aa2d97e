"""Verbs that explain: why something went wrong, and what is done when something does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli.verb_call import Call, Verbs
from torchloom.cli.verbs.jobs import runs_of
from torchloom.cli.verbs.status import concerns, own_runs, whole
from torchloom.protocol.ids import NAME
from torchloom.protocol.views import ClusterView, IncidentView, QueryCluster, RunView
from torchloom.shared.suggestions import unknown
from torchloom.views import policy as view_policy
from torchloom.views import why as view_why
from torchloom.views.job_runs import describe_deadline, describe_run, together

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient


def add(verbs: Verbs) -> None:
    verb = verbs["why"].define(why, "loom why mnist", "loom why i7")
    verb.add_argument("name", metavar="JOB|INCIDENT", help="Job, or incident such as i7", complete="job or incident")

    verb = verbs["policy"].define(policy, "loom policy", "loom policy mnist -o json")
    verb.add_run(nargs="?", help="Job that torchLoom started")


def why(call: Call) -> int:
    """Of a job: its newest incident (one that is open, if there is any), the others in a line each, and where its time
    went. Of an incident: that one. `loom incidents` lists them.
    """
    view, job, story, runs = call.query(lambda weaver: _look(weaver, call.args.name))
    now = view.plane.now
    marks = next((one.marks for one in view.jobs if one.job == job), ())
    spent = together(run.goodput for run in runs if run.goodput is not None)
    if call.json:
        first = story[0] if story else None
        call.print_json({"job": job, "incident": first, "others": story[1:], "goodput": spent, "marks": marks})
    elif job:
        phase = next((one.phase for one in view.jobs if one.job == job), "")
        texts = (text for run in runs for text in (describe_run(run), describe_deadline(run, now)) if text)
        doing = "; ".join(texts) if phase != "ending" else ""
        doing = doing or (phase and f"{job} is {phase}")
        call.print(view_why.job(job, story, doing, spent, now, call.screen, marks))
    else:
        call.print(view_why.incident(story[0], now, call.screen))
    return 0


async def _look(weaver: WeaverClient, name: str) -> tuple[ClusterView, str, list[IncidentView], list[RunView]]:
    """The picture, the job if one is meant, its incidents with the one to show first, and its runs."""
    view = await weaver.cluster(most=0)
    runs = (await weaver.runs()).runs
    started = {one for run in runs for one in (run.job, run.task.part_of or run.job)}
    jobs = sorted({job.job for job in view.jobs} | started)
    if name not in jobs:
        incident = await _whole(weaver, name)
        if incident is None:
            raise unknown("job or incident", name, [*jobs, *(incident.id for incident in view.incidents)])
        return view, "", [incident], []
    job_runs = (await weaver.runs(name)).runs
    job_view = await weaver.cluster(whole(name, job_runs), most=0)
    incidents = view_why.newest_first(i for i in job_view.incidents if concerns(i, name, job_runs))
    if incidents:
        incidents[0] = await _whole(weaver, incidents[0].id) or incidents[0]
    return job_view, name, incidents, own_runs(view, job_runs)


async def _whole(weaver: WeaverClient, id: str) -> IncidentView | None:
    """Everything that is known of an incident, however old."""
    if not NAME.fullmatch(id):
        return None
    view = await weaver.look(QueryCluster(limit=0, incident=id), ClusterView)
    return next((incident for incident in view.incidents if incident.id == id), None)


def policy(call: Call) -> int:
    """Without a job: the default. `loom run --on RULE` and [policy] in a job file change it. A RULE is written
      EVENT=RESPONSE[+RESPONSE…][@SECONDS][,limit=N][,back=N][,skip]

    AFTER   how long it may last before anything is done (@SECONDS)
    LIMIT   how often it is done within the job's window of restarts (limit=N); shown where a job has one
    OWN     yes: the job says so itself; otherwise it is the default
    """

    async def look(weaver: WeaverClient) -> RunView | None:
        runs = await runs_of(weaver, call.args.job)
        own = own_runs(await weaver.cluster(whole(call.args.job, runs), most=0), runs)
        return own[0] if own else None  # the replicas of a job have the same

    run = call.query(look) if call.args.job else None
    task = run.task if run is not None else None
    rows = view_policy.policy(task, call.settings)
    if call.json:
        call.print_json({"job": call.args.job, "dry_run": task is not None and task.dry_run, "rules": rows})
    else:
        call.print(view_policy.lines(rows, task, call.screen))
        if call.args.job and task is None:
            call.note(f"{call.args.job} was not started by torchLoom this time: this is the default")
    return 0
