"""Jobs of replicas: each fails and is started again by itself, and together they are one job."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.core.site import JOB, Site, incidents
from tests.core.torchft.made import evicted, group, join, member, phases, records, run_of, shine
from torchloom.core.events import BeatReceived, ReportReceived, RequestReceived
from torchloom.core.state.rank_states import Presence
from torchloom.core.torchft.replica_groups import split_job, timeouts
from torchloom.protocol.codec import decode_entry, encode
from torchloom.protocol.job_spec import Task, Torchft
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.operator import Cancel, Done, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat, Goodbye, Hello, Joined
from torchloom.protocol.records import Entry, JobEnded

# ── what a job is made of ──


def test_a_job_without_torchft_is_one_run() -> None:
    task = Task(argv=("train.py",))
    assert split_job("a", task) == [("a", task)]


def test_a_job_of_replicas_is_a_run_for_each_and_one_for_the_lighthouse() -> None:
    made = dict(split_job("a", Task(argv=("train.py",), env={"X": "1"}, torchft=Torchft(replicas=2, spares=1))))
    assert list(made) == ["a:lighthouse", "a:0", "a:1", "a:2"]
    assert [made[f"a:{n}"].env["REPLICA_GROUP_ID"] for n in range(3)] == ["0", "1", "2"]
    assert {made[f"a:{n}"].env["NUM_REPLICA_GROUPS"] for n in range(3)} == {"3"}
    assert [made[f"a:{n}"].replica for n in range(3)] == ["a_0", "a_1", "a_2"]
    assert made["a:0"].env["X"] == "1"
    assert "--min-replicas" in made["a:lighthouse"].argv
    assert not made["a:lighthouse"].standby


@pytest.mark.parametrize(("which", "option"), [("loom", "--folder"), ("stock", "--stock")])
def test_the_lighthouse_is_ours_or_torchfts_own(which: str, option: str) -> None:
    task = Task(argv=("train.py",), torchft=Torchft(replicas=1, lighthouse=which))
    assert dict(split_job("a", task))["a:lighthouse"].argv[:3] == ("-m", "torchloom.lighthouse", option)


def test_somebody_elses_lighthouse_is_not_started_and_named_to_the_replicas() -> None:
    site = group(lighthouse="http://there:29510")
    assert phases(site) == {"0": "running", "1": "running"}
    assert {launch.task.env["TORCHFT_LIGHTHOUSE"] for launch in site.agents["n1"].launches} == {"http://there:29510"}


@pytest.mark.parametrize(("length", "lighthouse"), [(117, "loom"), (126, "http://there:29510")])
def test_a_name_is_refused_that_leaves_no_room_for_the_names_of_its_replicas(length: int, lighthouse: str) -> None:
    """The log could not be read any more: names are checked where it is read, too."""
    ft = Torchft(replicas=2, lighthouse=lighthouse)
    site = Site(cores=16)
    assert isinstance(site.submit(1, job="a" * length, torchft=ft, per_node=1), Done)
    names = [run.name for run in site.loom.cluster.runs.by_name.values()]
    assert max(map(len, (*names, f"{'a' * length}_0"))) == 128
    (stored,) = [entry for _, entry in site.loom.log if entry]
    assert decode_entry(encode(Entry(term=1, at=0.0, records=stored))).records == stored
    refused = site.submit(2, job="b" * (length + 1), torchft=ft, per_node=1)
    assert refused == No(why=phrase("job_name_too_long"), hint=phrase("choose_shorter_name"))


def test_every_timeout_is_longer_than_what_it_waits_for() -> None:
    ft = Torchft(replicas=2, heartbeat_timeout=20, join_timeout=100)
    assert ft.heartbeat_timeout < ft.join_timeout < int(timeouts(ft)["TORCHFT_QUORUM_TIMEOUT_SEC"])


def test_what_a_script_gives_its_manager_is_not_overruled_without_need() -> None:
    for timeout, told in ((10.0, set()), (100.0, {"TORCHFT_QUORUM_TIMEOUT_SEC"})):
        task = Task(argv=("train.py",), torchft=Torchft(replicas=1, join_timeout=timeout))
        env = dict(split_job("a", task))["a:0"].env
        assert {name for name in env if name.startswith("TORCHFT_")} == {"TORCHFT_QUORUM_RETRIES", *told}


def test_what_the_job_says_about_timeouts_counts() -> None:
    task = Task(argv=("train.py",), env={"TORCHFT_TIMEOUT_SEC": "7"}, torchft=Torchft(replicas=1))
    assert dict(split_job("a", task))["a:0"].env["TORCHFT_TIMEOUT_SEC"] == "7"


# ── starting ──


def test_replicas_start_when_it_is_known_where_their_lighthouse_is() -> None:
    site = Site(cores=16)
    site.agents["n1"].deaf = True
    site.submit(torchft=Torchft(replicas=2), per_node=1)
    site.settle(1.0)
    assert phases(site) == {"lighthouse": "placing", "0": "submitted", "1": "submitted"}
    site.agents["n1"].deaf = False
    site.settle(1.0)
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "running"}
    told = [launch.task.env.get("TORCHFT_LIGHTHOUSE") for launch in site.agents["n1"].launches]
    assert told == [None, "http://n1.local:5000", "http://n1.local:5000"]


def test_a_name_that_is_in_use_is_refused_and_the_same_question_answered_again() -> None:
    site = group()
    assert isinstance(site.submit(2, torchft=Torchft(replicas=2), per_node=1), No)
    assert isinstance(site.submit(1, torchft=Torchft(replicas=2), per_node=1), Done)
    assert isinstance(site.submit(3), No)
    assert len(site.loom.cluster.runs.by_name) == 3


def test_a_lighthouse_comes_back_where_it_was() -> None:
    site = group()
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:lighthouse")
    site.settle(2.0)
    light = run_of(site, "lighthouse")
    assert (light.phase, light.ordinal, light.host, light.port) == ("running", 2, "n1.local", 5000)
    assert phases(site)["0"] == "running"
    assert run_of(site, 0).ordinal == 1


def test_a_lighthouse_takes_nobodys_place() -> None:
    site = Site(cores=2)
    site.submit(torchft=Torchft(replicas=2), per_node=1)
    site.settle(1.0)
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "running"}


def test_replicas_have_devices_of_their_own() -> None:
    site = Site(cores=8, devices=("GPU-a", "GPU-b"))
    site.agents["n1"].tied = True
    site.hear()
    site.submit(torchft=Torchft(replicas=2), per_node=1, node="n1", attended=True)
    site.settle(1.0)
    assert sorted(run_of(site, n).places[0].device for n in (0, 1)) == ["GPU-a", "GPU-b"]
    assert run_of(site, "lighthouse").places[0].device == ""


# ── failing ──


def test_a_replica_that_dies_is_evicted_and_started_again_while_the_others_go_on() -> None:
    site = group(3)
    for number in range(3):
        join(site, number)
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(2.0)
    assert evicted(site) == [(member(1),)]
    assert [run_of(site, n).ordinal for n in range(3)] == [1, 2, 1]
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "running", "2": "running"}
    assert len(incidents(site)) == 1
    assert all(incident.closed is not None for incident in site.loom.cluster.incidents.values())


def test_a_replica_with_peers_that_train_needs_no_checkpoint() -> None:
    site = Site(cores=16)
    site.submit(torchft=Torchft(replicas=2), per_node=1, checkpoint_dir="kept")
    site.settle(1.0)
    prepared = {p.job: p.task.checkpoint_dir for p in site.agents["n1"].prepares}
    assert prepared[f"{JOB}:0"] == prepared[f"{JOB}:1"] == "kept"
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(2.0)
    assert site.agents["n1"].prepares[-1].task.checkpoint_dir == ""
    for number in (0, 1):
        site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:{number}")
    site.settle(3.0)
    assert "kept" in {p.task.checkpoint_dir for p in site.agents["n1"].prepares[-2:]}


def test_a_replica_that_is_given_up_leaves_the_others_alone() -> None:
    site = Site(cores=16)
    site.submit(torchft=Torchft(replicas=2), per_node=1, max_restarts=0)
    site.settle(1.0)
    site.agents["n1"].end(0, code=1, job=f"{JOB}:1")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "failed"}
    assert records(site, JobEnded) == []
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "done", "0": "done", "1": "failed"}
    assert [(r.outcome, r.reason) for r in records(site, JobEnded) if isinstance(r, JobEnded)] == [
        ("finished", phrase("replicas_ended_well", done=1, count=2))
    ]


def test_a_job_fails_when_fewer_replicas_ended_well_than_are_needed() -> None:
    site = Site(cores=16)
    site.submit(torchft=Torchft(replicas=2, min_replicas=2), per_node=1, max_restarts=0)
    site.settle(1.0)
    site.agents["n1"].end(0, code=1, job=f"{JOB}:1")
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert [r.outcome for r in records(site, JobEnded) if isinstance(r, JobEnded)] == ["failed"]


def test_cancelling_the_job_ends_all_of_it() -> None:
    site = group()
    ask = Cancel(request=f"{7:032x}", job=JOB, why="enough")
    site.tell(site.loom.happen(RequestReceived(ask, "me")))
    site.settle(3.0)
    assert phases(site) == {"lighthouse": "done", "0": "cancelled", "1": "cancelled"}
    assert [r.outcome for r in records(site, JobEnded) if isinstance(r, JobEnded)] == ["stopped"]


def test_replicas_are_cancelled_also_if_a_run_without_replicas_had_their_name() -> None:
    site = Site(cores=16)
    site.submit(1, per_node=1)
    site.settle()
    site.agents["n1"].end(0, code=0)
    site.settle()
    site.submit(2, torchft=Torchft(replicas=2), per_node=1)
    site.settle(1.0)
    assert phases(site) == {JOB: "done", "lighthouse": "running", "0": "running", "1": "running"}
    site.tell(site.loom.happen(RequestReceived(Cancel(request=f"{7:032x}", job=JOB), "me")))
    site.settle(3.0)
    assert phases(site) == {JOB: "done", "lighthouse": "done", "0": "cancelled", "1": "cancelled"}


def test_a_weaver_that_is_started_anew_goes_on_with_all_of_it() -> None:
    site = group()
    for number in (0, 1):
        join(site, number)
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.restart_weaver()
    site.settle(10.0)
    assert evicted(site) == [(member(1),)]
    assert run_of(site, 1).ordinal == 2
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "running"}


def test_one_that_was_stopped_long_before_does_not_stand_for_one_that_is_lost() -> None:
    site = group()
    ranks = [join(site, number) for number in (0, 1)]
    for number, step in ((1, 124), (0, 265)):
        life = run_of(site, number).places[0].incarnation
        site.loom.happen(BeatReceived(ranks[number], Beat(incarnation=life, step=step)))
    site.agents["n1"].end(0, code=0, job=f"{JOB}:1")  # as `loom stop JOB/REPLICA` has it
    site.settle(1.0)
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "done"}
    assert run_of(site, 0).ordinal == 2
    assert not run_of(site, 0).note.heals


def test_a_process_that_had_said_that_it_is_done_may_be_aborted_while_it_goes() -> None:
    site = group()
    for number in (0, 1):
        rank = join(site, number)
        life = run_of(site, number).places[0].incarnation
        site.loom.happen(ReportReceived(rank, Goodbye(incarnation=life, how="finished")))
        site.agents["n1"].end(0, signal="SIGABRT", job=f"{JOB}:{number}")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "done", "0": "done", "1": "done"}


def test_one_that_was_aborted_before_it_was_done_has_failed() -> None:
    site = group()
    join(site, 1)
    site.agents["n1"].end(0, signal="SIGABRT", job=f"{JOB}:1")
    site.settle(2.0)
    assert run_of(site, 1).ordinal == 2


# ── evicting ──


def test_the_lighthouse_is_told_until_it_knows() -> None:
    site = group()
    for number in (0, 1):
        join(site, number)
    assert shine(site, member(0), member(1)) == ()
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(1.0)
    ((job, told),) = shine(site, member(0), member(1))
    assert (job, told.members) == (JOB, (member(1),))
    assert shine(site, member(0), evicted=(member(1),)) == ()


def test_a_lighthouse_that_counts_on_one_who_is_gone_is_told_so() -> None:
    site = group()
    rank = join(site, 1)
    # As a weaver finds it that was away when the rank left.
    site.loom.cluster.ranks[rank] = replace(site.loom.cluster.ranks[rank], presence=Presence.LEFT)
    ((_, told),) = shine(site, member(0), member(1))
    assert told.members == (member(1),)


def test_one_whose_id_was_heard_of_too_late_is_evicted_then() -> None:
    site = group()
    run = run_of(site, 1)
    rank, place = run.rank(0), run.places[0]
    site.loom.happen(ReportReceived(rank, Hello(incarnation=place.incarnation, node="n1", pid=1, devices=())))
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(0.0)
    assert evicted(site) == []
    site.loom.happen(ReportReceived(rank, Joined(incarnation=place.incarnation, member=member(1))))
    assert evicted(site) == [(member(1),)]


def test_one_that_ends_well_is_not_waited_for_either() -> None:
    site = group()
    for number in (0, 1):
        join(site, number)
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(1.0)
    assert evicted(site) == [(member(0),)]
    assert phases(site)["1"] == "running"


def test_a_script_that_does_not_say_who_it_is_is_known_by_where_its_ranks_meet() -> None:
    site = group()
    run = run_of(site, 1)
    beat = LighthouseBeat(
        incarnation="0" * 24, address="n1:1", quorum=1, stores={"x:1": f"{run.host}:{run.port}", "y:2": "n1.local:1"}
    )
    site.loom.cluster.runtime.hear_lighthouse(JOB, beat)
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(0.0)
    assert evicted(site)[0] == ("x:1",)


def test_what_a_replica_did_before_it_was_lost_is_not_lost_with_it() -> None:
    site = group()
    rank = join(site, 1)
    place = run_of(site, 1).places[0]
    site.loom.happen(BeatReceived(rank, Beat(incarnation=place.incarnation, step=500)))
    site.settle(100.0)
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(2.0)
    spent = site.loom.cluster.goodput.of(f"{JOB}:1", site.loom.now)
    assert spent is not None
    assert spent.productive > 90
    assert "redone" not in spent.lost
    (incident,) = (i for i in site.loom.cluster.incidents.values() if i.stopped is not None)
    assert incident.lost_steps == 0
    assert phrase("heals") in [entry for _, entry in incident.history]
