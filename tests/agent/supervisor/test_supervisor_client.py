"""Ranks begin, are signalled, and end; the supervisor tells, remembers and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.agent.harness import ENV, SECONDS, SupervisorHarness, lives, until
from tests.damaged_json import GARBAGE, damage
from torchloom.agent.supervisor.child_processes import read_records
from torchloom.agent.supervisor.main import MOST_SILENT
from torchloom.agent.supervisor.protocol import (
    MAX_BYTES,
    Begin,
    Begun,
    Connection,
    Ended,
    Look,
    NotBegun,
    RankRecord,
    Replaced,
    State,
    connect,
    encode,
    from_agent,
    from_supervisor,
)
from torchloom.agent.supervisor.supervisor_client import LOG, Gone, SupervisorClient, SupervisorGone, SupervisorOptions
from torchloom.errors import AlreadyUp, BadInput, TorchLoomError, Unreachable
from torchloom.protocol.phrase import Phrase, phrase

MISSING = "No such file or directory"
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""


HEAR = """
import os, signal
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"heard\\n"))  # not print: it may interrupt another print
"""
OUTLIVE = """
child.wait()
print(child.returncode, flush=True)
time.sleep(600)
"""


def cannot(what: str, **args: str) -> Phrase:
    return phrase(f"cannot_{what}", **args)


async def test_an_end_is_told_and_written_down_until_it_is_forgotten(harness: SupervisorHarness) -> None:
    harness.script("raise SystemExit(3)")
    life = await harness.live("train.py")
    key = life.ended.key
    folder = harness.link.folder
    assert (life.ended.code, life.ended.signal, life.ended.lost) == (3, None, False)
    assert life.ended.at >= life.begun.at
    assert json.loads((folder / f"{key}.json").read_bytes())["ended"]["code"] == 3
    assert read_records(folder)[key].ended == life.ended
    assert [kept.ended for kept in (await harness.link.look()).kept] == [life.ended]
    harness.link.forget(key)
    assert (await harness.link.look()).kept == ()
    assert not list(folder.glob("*.json"))


async def test_a_rank_that_runs_is_not_forgotten(harness: SupervisorHarness) -> None:
    harness.script(SLEEP)
    begin = harness.order("train.py")
    begun = await harness.begin(begin)
    harness.link.forget(begin.key)
    assert [kept.begun for kept in (await harness.link.look()).kept] == [begun]


async def test_a_signal_ends_it(harness: SupervisorHarness) -> None:
    harness.script(SLEEP)
    begin = harness.order("train.py")
    await harness.begin(begin)
    await harness.line(begin)
    harness.link.signal(begin.key, signal.SIGTERM)
    ended = await harness.end_of(begin.key)
    assert (ended.code, ended.signal) == (None, signal.SIGTERM)
    harness.link.signal(begin.key, signal.SIGTERM)  # once more does no harm
    harness.link.signal("never-heard-of", signal.SIGTERM)
    assert (await harness.link.look()).kept[0].ended == ended


async def test_a_signal_reaches_grandchildren(harness: SupervisorHarness) -> None:
    harness.script(HEAR + FAMILY + OUTLIVE)
    begin = harness.order("train.py")
    await harness.begin(begin)
    child = int((await harness.line(begin))[0])
    assert lives(child)
    harness.link.signal(begin.key, signal.SIGUSR2)
    lines = await harness.line(begin, 3)
    assert sorted(lines[1:]) == [str(-signal.SIGUSR2), "heard"]


async def test_what_a_rank_leaves_in_its_group_is_swept(harness: SupervisorHarness) -> None:
    harness.script(FAMILY + "os._exit(4)")
    life = await harness.live("train.py")
    child = int(life.out)
    assert life.ended.code == 4
    await until(lambda: not lives(child))


async def test_output_is_appended_whatever_it_is(harness: SupervisorHarness) -> None:
    harness.script("import sys\nprint('out', flush=True)\nsys.stderr.write('half a line')")
    begin = harness.order("train.py")
    Path(begin.stdout).write_text("before\n")
    await harness.begin(begin)
    await harness.end_of(begin.key)
    assert harness.text(begin.stdout) == "before\nout\n"
    assert harness.text(begin.stderr) == "half a line"
    assert stat.S_IMODE(Path(begin.stderr).stat().st_mode) == 0o600


async def test_one_file_can_take_both_outputs(harness: SupervisorHarness) -> None:
    harness.script("import sys\nfor i in range(3):\n    print(i, flush=True)\n    print('e', i, file=sys.stderr)")
    begin = harness.order("train.py")
    begin = Begin(key="both", argv=begin.argv, env=begin.env, cwd=begin.cwd, stdout=begin.stdout, stderr=begin.stdout)
    assert not (await harness.link.begin(begin)).warm  # type: ignore[union-attr]
    await harness.end_of("both")
    assert harness.text(begin.stdout).split("\n") == ["0", "e 0", "1", "e 1", "2", "e 2", ""]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"argv": ("/no/such/python", "x.py")}, cannot("run", program="/no/such/python", error=MISSING)),
        ({"argv": ("/etc/passwd",)}, cannot("run", program="/etc/passwd", error="Permission denied")),
        ({"argv": ("no-such-command",)}, cannot("run", program="no-such-command", error=MISSING)),
        ({"cwd": "/no/such/folder"}, cannot("enter", folder="/no/such/folder", error=MISSING)),
        ({"stdout": "/no/such/file"}, cannot("write_to", path="/no/such/file", error=MISSING)),
        ({"stderr": "relative"}, phrase("output_not_absolute", path="relative")),
        ({"env": {"A": "x" * 200_000}}, cannot("run", program=sys.executable, error="Argument list too long")),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    harness: SupervisorHarness, change: dict[str, object], why: Phrase
) -> None:
    begin: Begin = msgspec.structs.replace(harness.order("train.py"), **change)
    assert await harness.refused(begin) == why
    state = await harness.link.look()
    assert state.kept == ()
    assert psutil.Process(state.pid).children() == []


async def test_a_pipe_that_nobody_reads_does_not_stop_the_supervisor(harness: SupervisorHarness) -> None:
    pipe = harness.home / "pipe"
    os.mkfifo(pipe)
    begin = msgspec.structs.replace(harness.order("train.py"), stderr=str(pipe))
    assert await harness.refused(begin) == cannot("write_to", path=str(pipe), error="No such device or address")


async def test_a_warm_start_that_fails_says_why_too(light: SupervisorHarness) -> None:
    light.script("")
    begin = msgspec.structs.replace(light.order("train.py", warm=True), cwd="/no/such/folder")
    assert await light.refused(begin) == cannot("enter", folder="/no/such/folder", error=MISSING)


async def test_a_key_is_started_once(harness: SupervisorHarness) -> None:
    harness.script("")
    begin = harness.order("train.py")
    await harness.begin(begin)
    assert await harness.refused(begin) == phrase("started_before")


@pytest.mark.parametrize(
    "change", [{"key": "../escape"}, {"key": ""}, {"argv": ()}, {"env": {"A": "\udcff"}}, {"argv": ("a\0b",)}]
)
async def test_a_start_that_cannot_be_meant_is_refused_before_it_is_sent(
    harness: SupervisorHarness, change: dict[str, object]
) -> None:
    with pytest.raises(BadInput):
        await harness.link.begin(msgspec.structs.replace(harness.order("train.py"), **change))


async def test_a_large_environment_arrives_whole(harness: SupervisorHarness) -> None:
    harness.script("import os\nprint(sum(len(v) for k, v in os.environ.items() if k.startswith('BIG')))")
    life = await harness.live("train.py", env={f"BIG{n}": "x" * 50_000 for n in range(20)})
    assert life.out == "1000000\n"


async def test_ends_are_written_down_also_when_the_folder_was_renamed(harness: SupervisorHarness) -> None:
    harness.script("raise SystemExit(3)")
    folder = harness.link.folder.rename(harness.home / "taken by a job")
    life = await harness.live("train.py")
    assert read_records(folder)[life.ended.key].ended == life.ended


def names(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


async def test_many_starts_leave_no_zombie_no_descriptor_and_no_file(light: SupervisorHarness) -> None:
    light.script("")
    pid = light.link.state.pid
    await light.live("train.py")
    light.link.forget(next(iter(light.ends)))
    await light.link.look()
    before = names(f"/proc/{pid}/fd"), names(light.link.folder)
    ours = len(names("/proc/self/fd"))
    lives = await asyncio.gather(*(light.live("train.py", warm=n % 2 == 0) for n in range(20)))
    assert {life.ended.code for life in lives} == {0}
    for life in lives:
        light.link.forget(life.begun.key)
    await light.link.look()
    assert psutil.Process(pid).children() == []
    assert (names(f"/proc/{pid}/fd"), names(light.link.folder)) == before
    assert len(names("/proc/self/fd")) == ours


async def test_a_folder_too_deep_for_a_socket_address_works(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    folder = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 6)
    await harness.start(folder, SupervisorOptions(tied=True, env=ENV))
    harness.link.close()  # it dies with the test, but not with its first agent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "supervisor.sock").stat().st_mode) == 0o600
    harness.script("")
    again = SupervisorHarness(tmp_path)
    await again.find(folder)
    await again.live("train.py")
    await again.link.dismiss()
    with pytest.raises(Unreachable):
        await again.find(folder)


async def test_a_folder_has_one_supervisor(harness: SupervisorHarness) -> None:
    with pytest.raises(AlreadyUp):
        await SupervisorHarness(harness.home).start(harness.link.folder, SupervisorOptions(tied=True, env=ENV))
    harness.script("")
    await harness.live("train.py")


async def test_a_supervisor_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="/no/python"):
        await SupervisorHarness(tmp_path).start(tmp_path / "supervisor", SupervisorOptions(python="/no/python"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o700)
    with pytest.raises(TorchLoomError, match="No module named 'torchloom'"):
        await SupervisorHarness(tmp_path).start(
            tmp_path / "supervisor", SupervisorOptions(tied=True, python=str(bare), env=ENV)
        )


async def test_what_cannot_be_imported_ahead_makes_starts_cold(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    await harness.start(
        tmp_path / "supervisor", SupervisorOptions(tied=True, preload=("json", "no_such_module"), env=ENV)
    )
    harness.script("")
    answer = await harness.link.begin(harness.order("train.py", warm=True))  # asked while it preloads
    error = "ModuleNotFoundError: No module named 'no_such_module'"
    assert answer.why_cold == phrase("cannot_preload", module="no_such_module", error=error)  # type: ignore[union-attr]
    assert (await harness.link.settled()).why_cold == answer.why_cold  # type: ignore[union-attr]
    await harness.link.dismiss()


async def test_threads_left_by_preloading_make_starts_cold(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    harness.script(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "lib/threaded.py",
    )
    env = ENV | {"PYTHONPATH": str(tmp_path / "lib")}
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, preload=("threaded",), env=env))
    state = await harness.link.settled()
    assert state.why_cold == phrase("threads_preloaded", count=1)
    await harness.link.dismiss()


async def test_a_new_agent_takes_the_place_of_the_old(standing: SupervisorHarness) -> None:
    new = SupervisorHarness(standing.home)
    await new.find(standing.link.folder)
    await until(lambda: bool(standing.gone))
    assert standing.gone == [Gone(phrase("supervisor_replaced"), replaced=True)]
    with pytest.raises(SupervisorGone):
        standing.link.signal("any", 15)
    new.script("")
    await new.live("train.py")
    new.link.close()


async def test_a_connection_that_says_nothing_valid_replaces_nobody(standing: SupervisorHarness) -> None:
    curious = []
    for number in range(3 * MOST_SILENT):
        curious.append(connect(standing.link.folder))
        curious[-1].sendall(GARBAGE[number % len(GARBAGE)][:1000] + b"\n")
        await standing.link.look()
    for early in curious[:-MOST_SILENT]:  # there may be many of them
        early.settimeout(SECONDS)
        assert early.recv(1) == b""
    standing.script("")
    await standing.live("train.py")
    assert not standing.gone
    for stream in curious:
        stream.close()


async def test_nobody_replaces_the_agent_of_a_tied_supervisor(harness: SupervisorHarness) -> None:
    with pytest.raises(SupervisorGone) as caught:
        await SupervisorClient.find(harness.link.folder, None)
    assert caught.value.replaced
    harness.script("")
    await harness.live("train.py")
    assert not harness.gone


async def test_an_agent_that_reads_late_still_learns_that_it_was_replaced(standing: SupervisorHarness) -> None:
    late = connect(standing.link.folder)
    refused = msgspec.structs.replace(standing.order("train.py"), stdout="x" * (4 << 20))  # the answer repeats it
    await asyncio.to_thread(late.sendall, encode(refused) + b"\n")
    await until(lambda: bool(standing.gone))
    new = SupervisorHarness(standing.home)
    await new.find(standing.link.folder)
    late.settimeout(SECONDS)
    lines = late.makefile("rb")
    answers = [await asyncio.to_thread(lines.readline) for _ in range(2)]
    assert [type(from_supervisor(answer)) for answer in answers] == [NotBegun, Replaced]
    late.sendall(encode(Look()) + b"\n")
    late.close()
    await new.link.look()
    assert not new.gone
    new.link.close()


async def test_rubbish_disturbs_neither_the_supervisor_nor_its_ranks(harness: SupervisorHarness) -> None:
    harness.script(SLEEP)
    begun = await harness.begin(harness.order("train.py"))
    for rubbish in (*GARBAGE, *damage(encode(harness.order("train.py"))), b"\xff" * 50_000):
        harness.link.connection.unsent += rubbish + b"\n"
    state = await harness.link.look()
    assert [(kept.begun, kept.ended) for kept in state.kept] == [(begun, None)]
    assert lives(begun.pid)
    harness.script("")
    assert (await harness.live("train.py")).ended.code == 0


async def test_rubbish_does_not_fill_the_log(harness: SupervisorHarness) -> None:
    harness.link.connection.unsent += b"rubbish\n" * 5000 + b'{"is":"' + b"x" * 100_000 + b'"}\n'
    await harness.link.look()
    assert 0 < (harness.link.folder / LOG).stat().st_size < 10_000


async def test_damaged_records_are_passed_over_and_the_others_kept(tmp_path: Path) -> None:
    folder = tmp_path / "supervisor"
    folder.mkdir(mode=0o700)
    whole = RankRecord(begun=Begun(key="whole", pid=1, at=1.0), ended=Ended(key="whole", at=2.0, code=3))
    (folder / "whole.json").write_bytes(encode(whole))
    for number, data in enumerate(damage(encode(whole))):
        (folder / f"damaged-{number}.json").write_bytes(data)
    assert read_records(folder) == {"whole": whole}
    harness = SupervisorHarness(tmp_path)
    assert (await harness.start(folder, SupervisorOptions(tied=True, env=ENV))).kept == (whole,)
    harness.script("")
    assert (await harness.live("train.py")).ended.code == 0
    assert "damaged-0.json cannot be read" in (folder / LOG).read_text()
    await harness.link.dismiss()


def test_a_message_of_many_megabytes_arrives_whole() -> None:
    mine, theirs = map(Connection, socket.socketpair())
    begin = SupervisorHarness(Path()).order(env={"BIG": "x" * (60 << 20)})
    mine.send(begin, Look())
    messages: list[bytes] = []
    while len(messages) < 2:
        messages += theirs.receive()[0]
        mine.send()
    assert [from_agent(message) for message in messages] == [begin, Look()]


async def test_an_agent_that_does_not_read_is_given_up_and_finds_in_the_state_what_it_missed(
    standing: SupervisorHarness,
) -> None:
    harness = standing
    harness.script("raise SystemExit(3)")
    begin = harness.order("train.py")
    silent = connect(harness.link.folder)
    silent.settimeout(SECONDS)
    silent.sendall(encode(begin) + b"\n")
    # A path that the answer repeats.
    refused = encode(msgspec.structs.replace(begin, key="other", stdout="x" * (4 << 20))) + b"\n"
    with pytest.raises(ConnectionError):
        await asyncio.to_thread(silent.sendall, refused * 40)
    assert psutil.Process(harness.link.state.pid).memory_info().rss < 4 * MAX_BYTES
    again = SupervisorHarness(harness.home)
    await again.find(harness.link.folder)
    assert (await again.end_of(begin.key)).code == 3
    await again.link.dismiss()


async def test_half_a_message_of_an_agent_that_was_killed_is_not_carried_out(harness: SupervisorHarness) -> None:
    begin = harness.order("train.py")
    harness.link.connection.stream.send(encode(begin)[:-1])
    harness.link.connection.stream.shutdown(socket.SHUT_WR)
    await until(lambda: bool(harness.gone))
    again = SupervisorHarness(harness.home)
    assert (await again.find(harness.link.folder)).kept == ()
    again.script("raise SystemExit(3)")
    assert (await again.live("train.py")).ended.code == 3
    await again.link.dismiss()


async def test_a_new_descriptor_with_the_number_of_a_closed_one_is_not_taken_for_it(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    for name in ("first", "second"):
        harness.script(
            f"import os, time\nopen('{tmp_path}/{name}.loads', 'w')\n"
            f"while not os.path.exists('{tmp_path}/{name}'): time.sleep(0.005)",
            f"lib/{name}.py",
        )
    env = ENV | {"PYTHONPATH": str(tmp_path / "lib")}
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, preload=("first", "second"), env=env))
    supervisor = psutil.Process(harness.link.state.pid)

    async def start(count: int) -> list[asyncio.Task[Begun | NotBegun]]:
        orders = [msgspec.structs.replace(harness.order(), argv=("true",)) for _ in range(count)]
        tasks = [asyncio.create_task(harness.link.begin(order)) for order in orders]
        await asyncio.sleep(0)
        return tasks

    await until((tmp_path / "first.loads").exists)
    early = await start(3)
    (tmp_path / "first").touch()
    # It hears of their starts, of their ends and of the next ranks at once. Those get the numbers of closed pipes.
    await until((tmp_path / "second.loads").exists)
    await until(lambda: [rank.status() for rank in supervisor.children()] == [psutil.STATUS_ZOMBIE] * 3)
    late = await start(40)
    (tmp_path / "second").touch()
    answers = await asyncio.wait_for(asyncio.gather(*early, *late), SECONDS)
    assert all(isinstance(answer, Begun) for answer in answers)
    await until(lambda: len(harness.ends) == 43)
    assert all(record.ended for record in (await harness.link.look()).kept)
    await harness.link.dismiss()


async def test_a_full_disk_does_not_end_the_supervisor(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    folder = tmp_path / "supervisor"
    begin = harness.order("train.py")
    (folder / f"{begin.key}.json").mkdir(parents=True)  # so that it cannot be written
    (folder / LOG).symlink_to("/dev/full")
    await harness.start(folder, SupervisorOptions(tied=True, env=ENV))
    harness.script("raise SystemExit(3)")
    await harness.begin(begin)
    assert (await harness.end_of(begin.key)).code == 3
    harness.link.connection.stream.sendall(b"rubbish\n")
    assert [kept.ended for kept in (await harness.link.look()).kept] == [harness.ends[begin.key]]
    await harness.link.dismiss()


async def test_an_owner_that_fails_does_not_lose_the_messages_that_follow(tmp_path: Path) -> None:
    class Failing(SupervisorHarness):
        def rank_ended(self, ended: Ended) -> None:
            super().rank_ended(ended)
            raise ValueError("on purpose")

    mine, theirs = map(Connection, socket.socketpair())
    harness = Failing(tmp_path)
    harness._link = SupervisorClient(tmp_path, mine, harness)
    theirs.send(State(pid=1), Ended(key="a", at=1.0), Ended(key="b", at=2.0))
    await harness.link._open()
    assert list(harness.ends) == ["a", "b"]
    harness.link.close()
    theirs.stream.close()


async def test_ranks_that_a_dismissed_supervisor_takes_along_are_reported(harness: SupervisorHarness) -> None:
    harness.script(SLEEP)
    begin = harness.order("train.py")
    await harness.begin(begin)
    await harness.link.dismiss()
    assert harness.ends[begin.key].signal == signal.SIGKILL
    assert not harness.gone


async def agent(home: Path, how: str) -> tuple[asyncio.subprocess.Process, dict[str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.agent.supervisor.agent_process", str(home), how, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    said: dict[str, int] = {}
    while "supervisor" not in said:
        key, pid = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).split()
        said[key.decode()] = int(pid)
    return process, said


async def test_with_its_parent_a_tied_supervisor_and_its_ranks_die(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEP)
    process, pids = await agent(tmp_path, "tied")
    assert all(lives(pid) for pid in pids.values())
    process.kill()
    await process.wait()
    await until(lambda: not any(lives(pid) for pid in pids.values()))


async def test_without_its_agent_a_standing_supervisor_goes_on_and_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nwhile True: time.sleep(0.01)\n")
    process, pids = await agent(tmp_path, "standing")
    process.kill()
    await process.wait()
    supervisor = pids.pop("supervisor")
    first, second = pids
    os.kill(pids[first], signal.SIGSEGV)  # with nobody listening
    await until(lambda: not lives(pids[first]))
    assert lives(supervisor)
    assert lives(pids[second])
    harness = SupervisorHarness(tmp_path)
    state = await harness.find(tmp_path / "supervisor")
    await harness.end_of(first)
    assert harness.ends[first].signal == signal.SIGSEGV
    assert state.pid == supervisor
    running = {kept.begun.key: kept.begun.pid for kept in state.kept if kept.begun.key not in harness.ends}
    assert running == {second: pids[second]}
    harness.link.signal(second, signal.SIGKILL)
    assert (await harness.end_of(second)).signal == signal.SIGKILL
    await harness.link.dismiss()
    await until(lambda: not lives(supervisor))


async def test_ranks_die_with_their_supervisor_and_the_agent_hears_of_it(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    harness.script(SLEEP)
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, preload=("json",), env=ENV))
    begun = [await harness.begin(harness.order("train.py", warm=warm)) for warm in (True, False)]
    os.kill(harness.link.state.pid, signal.SIGKILL)
    await until(lambda: bool(harness.gone))
    assert not harness.gone[0].replaced
    assert (harness.gone[0].why.code, harness.gone[0].why.args["pid"]) == ("supervisor_dead", harness.link.state.pid)
    await until(lambda: not any(lives(rank.pid) for rank in begun))
    with pytest.raises(SupervisorGone):
        await harness.link.begin(harness.order("train.py"))
    with pytest.raises(Unreachable):
        await SupervisorClient.find(tmp_path / "supervisor", harness)
    assert harness.link.process
    assert harness.link.process.wait() == -signal.SIGKILL
    # The next supervisor in this folder knows whom the last one took along.
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, env=ENV))
    assert {ended.lost for ended in harness.ends.values()} == {True}
    assert harness.ends.keys() == {rank.key for rank in begun}
    await harness.link.dismiss()


async def test_a_start_in_flight_fails_when_the_supervisor_dies(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    harness.script("import time\ntime.sleep(600)", "lib/slow.py")
    env = ENV | {"PYTHONPATH": str(tmp_path / "lib")}
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, preload=("slow",), env=env))
    start = asyncio.ensure_future(harness.link.begin(harness.order("train.py", warm=True)))
    await asyncio.sleep(0)
    os.kill(harness.link.state.pid, signal.SIGKILL)
    with pytest.raises(SupervisorGone):
        await start
    assert harness.link.process
    harness.link.process.wait()


async def test_a_terminated_supervisor_takes_its_ranks_and_their_children_along(tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    harness.script(FAMILY + "time.sleep(600)")
    await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, env=ENV))
    begin = harness.order("train.py")
    begun = await harness.begin(begin)
    child = int((await harness.line(begin))[0])
    os.kill(harness.link.state.pid, signal.SIGTERM)
    await until(lambda: bool(harness.gone))
    await until(lambda: not lives(begun.pid) and not lives(child))
    assert harness.ends[begin.key].signal == signal.SIGKILL
    assert read_records(harness.link.folder)[begin.key].ended == harness.ends[begin.key]
    assert harness.link.process
    assert harness.link.process.wait() == 0
