"""Verbs that show what is: status, jobs, devices, map, incidents, curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import names
from torchloom.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchloom.cli.call import Call
    from torchloom.cli.verbs import Verbs
    from torchloom.messages import CurvesView, FabricView, RunView

_SCREEN_RANKS = 1000
"""Ranks fetched for a screen, unless all are asked for."""
_SCREEN_CURVES = 20


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "status", status, "show everything, or one job, on one screen",
        "Control plane, jobs, ranks with step, loss and samples/s, and the last incident. Of one job also where its "
        "time went.\n\n"
        "  loom status -o json | jq .jobs\n  loom status mnist -o json | jq .run.goodput", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("job", metavar="JOB", nargs="?", help="only this job"), names.complete_job)
    verb.add_argument("--all", action="store_true", help="every rank, however many")

    verbs.add("jobs", jobs, "list the jobs", "  loom jobs", listing=True)
    verbs.add(
        "devices", devices, "list the devices, their health, how busy and how hot they are, and the replicas on them",
        "  loom devices", listing=True,
    )  # fmt: skip

    verb = verbs.add(
        "map", drmap, "show which replicas are on which devices, and which devices each replica has",
        "  loom map --device GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28\n  loom map --rank mnist/hi/0", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("--device", metavar="DEVICE", help="only this device"), names.complete_device)
    names.with_names(
        verb.add_argument("--replica", metavar="REPLICA", help="only this replica: its name, or JOB/REPLICA"),
        names.complete_replica,
    )
    names.with_names(verb.add_argument("--node", metavar="NODE", help="only this node"), names.complete_node)
    names.with_names(
        verb.add_argument("--rank", metavar="JOB/REPLICA/RANK", help="only this rank"), names.complete_rank
    )

    verb = verbs.add(
        "incidents", incidents, "list what went wrong, newest first",
        "`loom why` tells more of one.\n\n  loom incidents --open", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("--job", metavar="JOB", help="only of this job"), names.complete_job)
    verb.add_argument("--open", action="store_true", help="only those that are not over")

    verb = verbs.add(
        "curves", curves, "draw the history of a job: step, loss and samples/s of each rank",
        "  loom curves mnist", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("job", metavar="JOB"), names.complete_job)
    names.with_names(
        verb.add_argument("--replica", metavar="REPLICA", help="only of this replica"), names.complete_replica
    )


def see(call: Call, most: int | None = None, readings: bool = False) -> FabricView:
    async def look() -> FabricView:
        from torchloom.bus.asking import Asking
        from torchloom.subjects import Role

        async with Asking(call.settings, Role.VIEWER) as weaver:
            return await weaver.fabric(most=most, readings=readings)

    return call.wait(look())


def see_job(call: Call, job: str | None, most: int | None) -> tuple[FabricView, RunView | None]:
    """The picture, of one job alone if one is named, and its run if torchLoom started it."""

    async def look() -> tuple[FabricView, RunView | None]:
        from torchloom.bus.asking import Asking
        from torchloom.subjects import Role

        async with Asking(call.settings, Role.VIEWER) as weaver:
            view = await weaver.fabric(job, most=most)
            if job is None:
                return view, None
            runs = (await weaver.runs(job)).runs
            if not view.jobs and not runs:
                names.known_job(await weaver.fabric(most=0), job)
            return view, own_run(view, job, runs)

    return call.wait(look())


def own_run(view: FabricView, job: str, runs: Sequence[RunView]) -> RunView | None:
    """The run of a job, unless it was over before somebody else began the job that is there now."""
    from torchloom.agent.telling import OVER

    run = next((run for run in runs if run.job == job), None)
    began = next((known.began for known in view.jobs if known.job == job), None)
    return None if run is not None and run.phase in OVER and began is not None and began > run.since else run


def status(call: Call) -> int:
    from torchloom.views import status as view_status
    from torchloom.views.document import plain
    from torchloom.views.goodput import goodput
    from torchloom.views.tables import Screen, wrapped

    job = call.args.job
    view, run = see_job(call, job, None if call.json or call.args.all else _SCREEN_RANKS)
    if call.json:
        call.print_json(view if job is None else plain(view) | {"run": run})
        return 0
    screen = call.screen
    if call.args.all:
        screen = Screen(screen.width, None, screen.colour)
    waits = f"{run.job} waits for {run.waiting}" if run is not None and run.waiting else ""
    call.print(view_status.status(view, screen, waits))
    if run is not None and run.goodput is not None:
        call.print(["", *wrapped(f"goodput: {goodput(run.goodput)}", screen.width, 2)])
    return 0


def jobs(call: Call) -> int:
    from torchloom.views import listings

    view = see(call, 0)
    if call.json:
        call.print_json(view.jobs)
    else:
        call.print(listings.jobs(view.jobs, view.plane.now, call.screen) if view.jobs else ["no jobs yet"])
    return 0


def devices(call: Call) -> int:
    from torchloom.views import listings

    view = see(call, readings=True)
    if call.json:
        call.print_json(view.devices)
    else:
        lines = listings.devices(view.devices, view.plane.now, call.screen) if view.devices else ["no devices yet"]
        call.print(lines)
    return 0


def drmap(call: Call) -> int:
    from torchloom.views import map as view_map

    args = call.args
    rank = names.parse_rank(args.rank) if args.rank else None  # a mistake is told before anyone is asked
    view = see(call)
    seats = view_map.chosen(
        view.seats,
        device=names.known_device(view, args.device) if args.device else None,
        replica=names.known_replica(view, args.replica) if args.replica else None,
        node=names.known_node(view, args.node) if args.node else None,
        rank=names.known_rank(view, rank) if rank else None,
    )
    if call.json:
        devices = {d: [str(r) for r in replicas] for d, replicas in view_map.by_device(seats).items()}
        replicas = {str(r): devices for r, devices in view_map.by_replica(seats).items()}
        call.print_json({"seats": seats, "devices": devices, "replicas": replicas})
    else:
        call.print(view_map.drmap(seats, view.devices, call.screen))
    return 0


def incidents(call: Call) -> int:
    from torchloom.views import listings

    job = call.args.job
    view, _ = see_job(call, job, 0)
    found = [
        incident
        for incident in view.incidents
        if job in {None, incident.job, incident.stopped} and not (call.args.open and incident.closed is not None)
    ]
    none = "no open incidents" if call.args.open else "no incidents"
    if call.json:
        call.print_json(found)
    else:
        call.print(listings.incidents(found, view.plane.now, call.screen) if found else [none])
    return 0


def curves(call: Call) -> int:
    from torchloom.bus.asking import Asking
    from torchloom.subjects import Role
    from torchloom.views import curves as view_curves

    if "/" in (call.args.replica or ""):
        raise BadInput("--replica is the replica's name here, the job is given already")

    async def look() -> tuple[FabricView, CurvesView]:
        async with Asking(call.settings, Role.VIEWER) as weaver:
            view = await weaver.fabric()
            job = names.known_job(view, call.args.job)
            if call.args.replica:
                names.known_replica(view, f"{job}/{call.args.replica}")
            return view, await weaver.curves(job, call.args.replica, None if call.json else _SCREEN_CURVES)

    view, found = call.wait(look())
    if call.json:
        call.print_json(found)
    else:
        call.print(view_curves.curves(found, view.plane.now, call.screen))
    return 0
