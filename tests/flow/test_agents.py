"""`loom agent`: nodes that run what is submitted, and whose ranks outlive them. One control plane serves all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.flow.agents import LOOM, PATIENCE, Cluster, cluster, needs_nodes, ours, said
from tests.flow.records import BY_SIGKILL, KILLED, phrases, rank_failed
from torchloom.agent.supervisor.protocol import Look, connect, encode
from torchloom.agent.supervisor.supervisor_client import LOG
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.run_records import RunEnded
from torchloom.views.wording.phrases import render


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # An agent that is killed here is waited for until the next one of its name has begun.
    with cluster(tmp_path_factory.mktemp("agents"), TORCHLOOM_NODE_PATIENCE_SECONDS="120") as one:
        one.start_agent("n1")
        one.start_agent("n2")
        yield one


@pytest.fixture
def site(up: Cluster) -> Iterator[Cluster]:
    """With nothing left of the test before."""
    for name in ("finish", "fail", "pid-0", "pid-1", "pid-2", "pid-3"):
        (up.folder / name).unlink(missing_ok=True)
    yield up
    up.loom("cancel", "mnist", "--yes")
    up.loom("wait", "mnist", "--timeout", "60")


def test_a_job_is_placed_on_both_nodes_its_output_is_read_from_them_and_its_end_is_told(site: Cluster) -> None:
    site.submit(nnodes=2, nproc_per_node=2)
    site.until(lambda: site.trains(4), "four ranks")
    site.until(lambda: sorted(node.used for node in site.nodes()) == [2, 2], "two on each")
    (site.folder / "finish").touch()
    waited = site.loom("wait", "mnist")
    assert waited.returncode == 0, waited.stderr
    assert "mnist is done, step" in waited.stderr
    shown = site.loom("logs", "mnist")
    assert sorted(line for line in shown.stdout.splitlines() if "on node" in line) == [
        f"[{rank}] rank {rank} of 4 on node {rank // 2} from 0 attempt 0" for rank in range(4)
    ]
    assert "[3] a complaint of 3" in shown.stderr
    assert site.loom("logs", "mnist", "--rank", "2").stdout.splitlines()[-1] == "rank 2 ends"
    wrong = site.loom("logs", "mnist", "--rank", "9")
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (4, "loom: mnist has no rank 9")


@pytest.mark.wording
def test_loom_run_over_several_nodes_shows_what_all_ranks_print_and_ends_them_when_interrupted(site: Cluster) -> None:
    words = ["run", "--nnodes", "2", "--nproc-per-node", "1", "--job", "mnist", "--standby", "0"]
    script = [str(site.folder / "train.py"), str(site.folder), "100000"]
    output = site.folder / "run.txt"
    with output.open("wb") as file:
        process = subprocess.Popen([*LOOM, *words, *script], env=site.env, stdout=file, stderr=file, cwd=site.folder)
    site.processes.append(process)
    for rank in (0, 1):
        line = f"[{rank}] rank {rank} of 2 on node {rank} from 0 attempt 0"
        site.until(lambda line=line: line in output.read_text(), f"what rank {rank} printed")  # type: ignore[misc]
    psutil.Process(site.pid(0)).kill()
    site.until(lambda: "[0] rank 0 of 2 on node 0 from 0 attempt 1" in output.read_text(), "a second attempt")
    failure = f"loom: {rank_failed(0, BY_SIGKILL)}"
    site.until(lambda: failure in output.read_text(), "why")
    assert KILLED in phrases(*site.records("mnist"))
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert f"mnist is cancelled: {render('interrupted')}" in output.read_text()
    assert not any(psutil.pid_exists(site.pid(rank)) for rank in (0, 1))


def test_the_exit_code_of_a_job_that_fails_is_that_of_loom_wait(site: Cluster) -> None:
    site.submit(max_restarts=0)
    (site.folder / "fail").touch()
    (site.folder / "finish").touch()
    waited = site.loom("wait", "mnist")
    assert waited.returncode == 7
    assert "mnist is failed" in waited.stderr
    reason = [record.reason for record in site.records("mnist") if isinstance(record, RunEnded)][-1]
    assert isinstance(reason, Phrase)
    assert (reason.code, reason.args["rank"]) == ("rank_of_run_failed", 0)
    assert reason.args["how"] == phrase("exit_code", status=7)


def test_ranks_outlive_a_killed_agent_the_next_one_finds_them_and_restarts_them_when_one_dies(site: Cluster) -> None:
    site.submit(nnodes=2, nproc_per_node=2)
    site.until(lambda: site.trains(4), "four ranks")
    pids = [site.pid(rank) for rank in range(4)]
    for name in ("n1", "n2"):
        psutil.Process(site.agent(name)).kill()
    time.sleep(1)
    assert all(psutil.pid_exists(pid) for pid in pids)
    site.start_agent("n1")
    site.start_agent("n2")
    site.until(lambda: sum(node.used for node in site.nodes()) == 4, "its ranks are known")
    assert [site.pid(rank) for rank in range(4)] == pids
    psutil.Process(pids[3]).kill()
    site.until(lambda: site.trains(4, attempt=1), "all ranks once more")
    assert not set(pids) & {site.pid(rank) for rank in range(4)}
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_ends_while_there_is_no_agent_is_known_to_the_next_one(site: Cluster) -> None:
    site.submit()
    site.until(lambda: site.trains(1), "a rank")
    site.until(lambda: any(node.used for node in site.nodes()), "its node")
    node = next(node.node for node in site.nodes() if node.used)
    rank = psutil.Process(site.pid(0))
    psutil.Process(site.agent(node)).kill()
    (site.folder / "finish").touch()
    _, alive = psutil.wait_procs([rank], timeout=60)
    assert not alive
    site.start_agent(node)
    waited = site.loom("wait", "mnist", "--timeout", "60")
    assert (waited.returncode, "restart" in waited.stderr) == (0, False), waited.stderr


def test_a_cancelled_job_leaves_nothing_behind_but_what_it_printed(site: Cluster) -> None:
    site.submit(nnodes=2, nproc_per_node=2)
    site.until(lambda: site.trains(4), "four ranks")
    unsure = site.loom("cancel", "mnist")
    assert (unsure.returncode, "this will end mnist" in unsure.stderr) == (2, True)
    assert site.loom("cancel", "mnist", "--yes").returncode == 0
    assert site.loom("wait", "mnist").returncode == 130
    pids = [site.pid(rank) for rank in range(4)]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    site.until(
        lambda: not [p for p in ours(site.folder) if "torchloom.agent.supervisor.main" in said(p)], "supervisors go"
    )
    assert "[0] rank 0 of 4" in site.loom("logs", "mnist").stdout


def test_nothing_is_started_on_a_drained_node_and_the_one_who_waits_is_told_what_for(site: Cluster) -> None:
    assert site.loom("drain", "n1").returncode == 0
    site.submit(nnodes=2)
    there = needs_nodes(2, 1, n1=phrase("room_drained"), n2=phrase("room_free", free=2, count=2, failed=None))
    site.until(lambda: site.waits_for() == there, "a job that waits")
    waited = site.loom("wait", "mnist", "--timeout", "1")
    assert (waited.returncode, f"mnist waits for {there}" in waited.stderr) == (124, True)
    assert {node.node: node.drained for node in site.nodes()} == {"n1": True, "n2": False}
    assert "drained" in site.loom("nodes").stdout
    assert site.loom("drain", "n1", "--undo").returncode == 0
    site.until(lambda: site.trains(2), "two ranks")
    unknown = site.loom("drain", "n7")
    assert (unknown.returncode, render(phrase("no_agent_on_node", node="n7")) in unknown.stderr) == (4, True)


def test_two_agents_of_one_name_are_one_too_many(site: Cluster, tmp_path: Path) -> None:
    again = site.loom("agent", "--name", "n1")
    assert (again.returncode, "an agent for n1 runs already" in again.stderr) == (5, True)
    elsewhere = site.loom("agent", "--name", "n1", "--folder", str(tmp_path))
    assert (elsewhere.returncode, "another agent serves n1 already" in elsewhere.stderr) == (5, True)


@pytest.mark.wording
def test_an_agent_that_is_told_to_leave_says_what_goes_on(site: Cluster) -> None:
    site.submit(node="n2")
    site.until(lambda: site.trains(1), "a rank")
    agent = psutil.Process(site.agent("n2"))
    agent.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs([agent], timeout=60)
    assert not alive
    assert psutil.pid_exists(site.pid(0))
    assert "1 rank continues; `loom agent` finds it again" in site.log()
    site.start_agent("n2")


def test_a_curious_connection_changes_nothing_and_a_replaced_agent_leaves_its_ranks_to_the_next(site: Cluster) -> None:
    site.submit(node="n2")
    site.until(lambda: site.trains(1), "a rank")
    site.until(lambda: {node.node: node.used for node in site.nodes()}["n2"] == 1, "its node")
    pid, agent = site.pid(0), site.agent("n2")
    (folder,) = site.folder.glob("state/agents/n2/jobs/mnist/supervisor")
    with connect(folder) as curious:
        curious.sendall(b"\xff\n{}\n")
        site.until(lambda: "not understood" in (folder / LOG).read_text(), "it was heard")
    with connect(folder) as other:
        other.sendall(encode(Look()) + b"\n")
        _, alive = psutil.wait_procs([psutil.Process(agent)], timeout=PATIENCE)
        assert not alive
    assert "another agent has taken over the ranks of mnist on n2; they continue" in site.log()
    site.start_agent("n2")
    site.until(lambda: {node.node: node.used for node in site.nodes()}["n2"] == 1, "its rank is known")
    assert (site.pid(0), psutil.pid_exists(pid)) == (pid, True)
    (site.folder / "finish").touch()
    waited = site.loom("wait", "mnist", "--timeout", "60")
    assert (waited.returncode, "restart" in waited.stderr) == (0, False), waited.stderr


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Cluster]:
    """One agent, which is not waited for much longer than it may be silent."""
    with cluster(tmp_path, TORCHLOOM_NODE_PATIENCE_SECONDS="8") as one:
        one.start_agent("n1")
        yield one


def test_a_server_that_hangs_makes_nobody_start_anything_anew(impatient: Cluster) -> None:
    """The rank is one that says nothing itself: only the agent tells of it, and nothing can be heard for a while."""
    site = impatient
    site.submit(env={"TORCHLOOM_OFF": "1"})
    site.until(lambda: site.trains(1), "a rank")
    pid = site.pid(0)
    (server,) = [p for p in psutil.process_iter() if "nats-server" in said(p) and str(site.folder) in said(p)]
    server.suspend()
    time.sleep(6 + 3)  # longer than an agent may be silent, and than it is waited for here
    server.resume()
    time.sleep(2)
    assert site.loom("jobs").stdout.splitlines()[1].split()[1] == "running"
    assert (site.pid(0), psutil.pid_exists(pid)) == (pid, True)
    assert "silent" not in site.loom("incidents", "--open").stdout


def spares(site: Cluster, node: str = "") -> list[psutil.Process]:
    """Supervisors that were made for no job; ranks forked from them look like them."""
    alike = [process for process in ours(site.folder) if f"{node}/spare-" in said(process)]
    found = []
    for process in alike:
        with contextlib.suppress(psutil.Error):  # it ends just now
            if process.parent() not in alike:
                found.append(process)
    return found


@pytest.mark.long
def test_a_job_takes_the_process_that_has_imported_torch_and_another_is_made(site: Cluster) -> None:
    agent = site.start_agent("n3", standby=1)
    site.until(lambda: site.standby_mb("n3") > 0, "a spare process")
    first, size = spares(site), site.standby_mb("n3")
    site.submit(node="n3", nproc_per_node=2, standby=True)
    site.until(lambda: site.trains(2), "two ranks")
    assert "Job mnist runs, 2 warm" in site.loom("events", "--last", "20").stdout
    supervisor = psutil.Process(site.pid(0)).parent()
    assert supervisor in first

    def another() -> bool:
        taken = site.standby_mb("n3")
        assert taken >= size  # the first one still takes what it took
        return taken > size and spares(site) != first

    site.until(another, "another one")
    agent.kill()  # the next agent finds the ranks in it, and ends the spare one that nobody knows
    agent.wait()
    lost = [process for process in spares(site) if process != supervisor]
    again = site.start_agent("n3")
    assert psutil.Process(site.pid(0)).parent() == supervisor
    _, alive = psutil.wait_procs(lost, timeout=60)
    assert not alive
    (site.folder / "finish").touch()
    assert site.loom("wait", "mnist").returncode == 0
    site.until(lambda: not spares(site), "its supervisor goes")
    again.terminate()
    assert again.wait(60) == 0


def warm(site: Cluster, node: str) -> list[bool]:
    """Of each rank that runs there, whether it was forked from a process that had imported torch."""
    attempts = [attempt for view in site.nodes() if view.node == node for attempt in view.beat.attempts]
    return [rank.warm for attempt in attempts for rank in attempt.ranks if rank.state == "running"]


@pytest.mark.long
def test_a_job_that_runs_again_on_the_same_agent_finds_a_process_that_is_ready_though_the_first_was_killed(
    site: Cluster,
) -> None:
    """The agent has a variable that is no text: no rank is given it, so the process that waits must not have it."""
    agent = site.start_agent("n4", standby=1, ODD=os.fsdecode(b"\xff"))
    site.until(lambda: site.standby_mb("n4") > 0, "a spare process")
    (killed,) = spares(site, "n4")
    killed.kill()  # while it waits: nobody asks anything of it
    for again in range(2):
        site.until(lambda: site.standby_mb("n4") > 0 and any(p != killed for p in spares(site, "n4")), "another one")
        site.submit(node="n4", nproc_per_node=2, standby=True)
        site.until(lambda: site.trains(2), f"two ranks, time {again}")
        site.until(lambda: warm(site, "n4") == [True, True], f"both of them warm, time {again}")
        (supervisor,) = {psutil.Process(site.pid(rank)).parent() for rank in (0, 1)}
        assert supervisor is not None
        (site.folder / "finish").touch()
        assert site.loom("wait", "mnist").returncode == 0
        _, alive = psutil.wait_procs([supervisor], timeout=60)
        assert not alive
        (site.folder / "finish").unlink()
    agent.terminate()
    assert agent.wait(60) == 0


@pytest.mark.parametrize(
    ("settings", "code", "refusal"),
    [
        ({"nproc_per_node": 1000}, 4, phrase("task_too_large", ranks=1000, most=2, node="n1")),
        ({"node": "n9"}, 4, phrase("no_agent_on_node", node="n9")),
        ({"script": ""}, 2, None),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(
    site: Cluster, settings: dict[str, object], code: int, refusal: Phrase | None
) -> None:
    text = "".join(f"{key} = {value!r}\n" for key, value in ({"script": "train.py"} | settings).items())
    (site.folder / "wrong.toml").write_text(text)
    done = site.loom("submit", "wrong.toml")
    reason = render(refusal) if refusal is not None else "names neither script nor module"  # of the file itself
    assert (done.returncode, reason in done.stderr) == (code, True), done.stderr
    assert site.records("wrong") == []


def test_a_script_or_an_interpreter_that_is_not_there_is_said_where_it_was_looked_for(site: Cluster) -> None:
    site.submit(script="missing.py", max_restarts=0)
    waited = site.loom("wait", "mnist")
    assert waited.returncode == 2
    assert "can't open file" in site.loom("logs", "mnist").stderr
    site.submit(python="no-such-python", max_restarts=0)
    waited = site.loom("wait", "mnist")
    assert waited.returncode not in {0, 130}
    why = phrase("cannot_run", program="no-such-python", error="No such file or directory")
    assert (why.code, why.args) in phrases(*site.records("mnist"))
    assert f"mnist is failed: {rank_failed(0, phrase('exit_code', status=127), why)}" in waited.stderr
