"""Verbs that show what is: status, jobs, devices, map, incidents, curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchloom.cli import known_names
from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput
from torchloom.protocol.views import ClusterView, CurvesView, IncidentView, RunView
from torchloom.views import listings
from torchloom.views.format.json_document import plain
from torchloom.views.format.tables import Screen, wrapped
from torchloom.views.job_runs import OVER, replicas

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient

_SCREEN_RANKS = 1000
"""Ranks fetched for a screen, unless all are asked for."""
_SCREEN_CURVES = 20


def add(verbs: Verbs) -> None:
    examples = ("loom status -o json | jq .jobs", "loom status mnist -o json | jq .run.goodput")
    verb = verbs["status"].define(status, *examples)
    verb.add_job(nargs="?", help="Show only this job")
    verb.add_flag("--all", help="Show every rank, also of jobs that have ended")

    verbs["jobs"].define(jobs, "loom jobs")
    verbs["devices"].define(devices, "loom devices")

    examples = ("loom map --device GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28", "loom map --rank mnist/hi/0")
    verb = verbs["map"].define(drmap, *examples)
    verb.add_argument("--device", help="Show only this device", complete="device")
    verb.add_replica("Show only this replica: its name, or JOB/REPLICA")
    verb.add_argument("--node", help="Show only this node", complete="node")
    verb.add_argument("--rank", metavar="JOB/REPLICA/RANK", help="Show only this rank", complete="rank")

    verb = verbs["incidents"].define(incidents, "loom incidents --open")
    verb.add_job("--job", help="Show only this job")
    verb.add_flag("--open", help="Show only open incidents")

    verb = verbs["curves"].define(curves, "loom curves mnist")
    verb.add_job()
    verb.add_replica()


def see(call: Call, most: int | None = None, readings: bool = False) -> ClusterView:
    return call.query(lambda weaver: weaver.cluster(most=most, readings=readings))


def see_job(call: Call, name: str | None, most: int | None) -> tuple[ClusterView, list[RunView]]:
    """The picture, of one job alone if one is named, and its runs if torchLoom started it."""

    async def look(weaver: WeaverClient) -> tuple[ClusterView, list[RunView]]:
        runs = (await weaver.runs(name)).runs if name is not None else ()
        view = await weaver.cluster(whole(name, runs), most=most)
        if name is not None and not view.jobs and not runs:
            known_names.known_job(await weaver.cluster(most=0), name)
        return view, own_runs(view, runs)

    return call.query(look)


def whole(name: str | None, runs: Sequence[RunView]) -> str | None:
    """The job that is meant, or of which one replica is."""
    return next((run.task.part_of for run in runs if run.task.part_of is not None), name)


def own_runs(view: ClusterView, runs: Sequence[RunView]) -> list[RunView]:
    """The runs of a job, unless they were over before somebody else began the job that is there now."""
    began = {job.job: job.began for job in view.jobs}
    return [
        run
        for run in replicas(runs)
        if run.phase not in OVER or began.get(run.task.part_of or run.job, run.since) <= run.since
    ]


def concerns(incident: IncidentView, name: str, runs: Sequence[RunView]) -> bool:
    """Whether it is about this job, or about one of its replicas if that is named."""
    named = next((run for run in runs if run.job == name and run.task.part_of is not None), None)
    if incident.stopped in {name, *(run.job for run in runs)}:
        return True
    if named is None:
        return incident.job == name or any(replica.job == name for replica in incident.affected)
    replica = (named.task.part_of, named.task.replica)
    if replica in incident.affected:
        return True
    about = incident.about
    return about.run == name if about.rank is None else about.rank.replica_id == replica


def status(call: Call) -> int:
    """Control plane, jobs, ranks with step, loss and samples/s, and the last incident. Of one job also where its time
    went.
    """
    from torchloom.views import status as view_status
    from torchloom.views.job_runs import describe_deadline, goodput, together

    job = call.args.job
    view, runs = see_job(call, job, None if call.json or call.args.all else _SCREEN_RANKS)
    if call.json:
        one = next((run for run in runs if run.job == job), None)  # a job of several replicas has none of its name
        call.print_json(view if job is None else plain(view) | {"run": one, "runs": runs})
        return 0
    screen = call.screen
    if call.args.all:
        screen = Screen(screen.width, None, screen.colour)
    waits = "; ".join(f"{run.job} waits for {run.waiting}" for run in runs if run.waiting)
    call.print(view_status.status(view, screen, waits, ended_too=call.args.all or job is not None))
    for run in runs:
        if text := describe_deadline(run, view.plane.now):
            call.print(["", f"{run.job}: {text}"])
    spent = together(run.goodput for run in runs if run.goodput is not None)
    if spent is not None:
        call.print(["", *wrapped(f"goodput: {goodput(spent)}", screen.width, 2)])
    return 0


def jobs(call: Call) -> int:
    view = see(call, 0)
    return call.show(view.jobs, lambda: listings.jobs(view.jobs, view.plane.now, call.screen), "no jobs yet")


def devices(call: Call) -> int:
    view = see(call, readings=True)
    now = view.plane.now
    return call.show(view.devices, lambda: listings.devices(view.devices, now, call.screen), "no devices yet")


def drmap(call: Call) -> int:
    from torchloom.views import device_map

    args = call.args
    rank = known_names.parse_rank(args.rank) if args.rank else None  # before the weaver is asked
    view = see(call)
    assignments = device_map.chosen(
        view.assignments,
        device=known_names.known_device(view, args.device) if args.device else None,
        replica=known_names.known_replica(view, args.replica) if args.replica else None,
        node=known_names.known_node(view, args.node) if args.node else None,
        rank=known_names.known_rank(view, rank) if rank else None,
    )
    devices = {device: list(map(str, those)) for device, those in device_map.by_device(assignments).items()}
    document = {"assignments": assignments, "devices": devices, "replicas": device_map.by_replica(assignments)}
    return call.show(document, lambda: device_map.drmap(assignments, view.devices, call.screen))


def incidents(call: Call) -> int:
    """`loom why` explains one of them."""
    job = call.args.job
    view, runs = see_job(call, job, 0)
    selected = [incident for incident in view.incidents if job is None or concerns(incident, job, runs)]
    if call.args.open:
        selected = [incident for incident in selected if incident.closed is None]
    none = "no open incidents" if call.args.open else "no incidents"
    return call.show(selected, lambda: listings.incidents(selected, view.plane.now, call.screen), none)


def curves(call: Call) -> int:
    from torchloom.views import curves as view_curves

    if "/" in (call.args.replica or ""):
        raise BadInput("--replica is the replica's name here, the job is given already")

    async def look(weaver: WeaverClient) -> tuple[ClusterView, CurvesView]:
        job = known_names.known_job(await weaver.cluster(most=0), call.args.job)
        view = await weaver.cluster(job)
        if call.args.replica:
            known_names.known_replica(view, f"{job}/{call.args.replica}")
        return view, await weaver.curves(job, call.args.replica, None if call.json else _SCREEN_CURVES)

    view, curves_view = call.query(look)
    marks = next((job.marks for job in view.jobs), ())
    return call.show(
        plain(curves_view) | {"marks": marks},
        lambda: view_curves.curves(curves_view, view.plane.now, call.screen, marks),
    )
