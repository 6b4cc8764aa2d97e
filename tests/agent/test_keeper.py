"""Ranks begin, are signalled, and end; the keeper tells, remembers and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.agent.stand import ENV, SECONDS, RankProgress, lives, until
from torchloom.agent.supervisor.exit_records import ExitRecordStore
from torchloom.agent.supervisor.protocol import Begin
from torchloom.agent.supervisor.supervisor_client import SupervisorClient, SupervisorGone, SupervisorOptions
from torchloom.errors import AlreadyUp, BadInput, TorchLoomError, Unreachable

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""


HEAR = """
import signal
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: print("heard", flush=True))
"""
OUTLIVE = """
child.wait()
print(child.returncode, flush=True)
time.sleep(600)
"""


async def test_an_end_is_told_and_written_down_until_it_is_forgotten(stand: RankProgress) -> None:
    stand.script("raise SystemExit(3)")
    life = await stand.live("train.py")
    key = life.ended.key
    folder = stand.link.folder
    assert (life.ended.code, life.ended.signal, life.ended.lost) == (3, None, False)
    assert life.ended.at >= life.begun.at
    assert json.loads((folder / f"{key}.end.json").read_bytes())["code"] == 3
    assert ExitRecordStore(folder).read()[key].ended == life.ended
    assert [kept.ended for kept in (await stand.link.look()).kept] == [life.ended]
    stand.link.forget(key)
    assert (await stand.link.look()).kept == ()
    assert not list(folder.glob("*.json"))


async def test_a_rank_that_runs_is_not_forgotten(stand: RankProgress) -> None:
    stand.script(SLEEP)
    begin = stand.order("train.py")
    begun = await stand.begin(begin)
    stand.link.forget(begin.key)
    assert [kept.begun for kept in (await stand.link.look()).kept] == [begun]


async def test_a_signal_ends_it(stand: RankProgress) -> None:
    stand.script(SLEEP)
    begin = stand.order("train.py")
    await stand.begin(begin)
    await stand.line(begin)
    stand.link.signal(begin.key, signal.SIGTERM)
    ended = await stand.end_of(begin.key)
    assert (ended.code, ended.signal) == (None, signal.SIGTERM)
    stand.link.signal(begin.key, signal.SIGTERM)  # once more does no harm
    stand.link.signal("never-heard-of", signal.SIGTERM)
    assert (await stand.link.look()).kept[0].ended == ended


async def test_a_signal_reaches_grandchildren_or_the_rank_alone(stand: RankProgress) -> None:
    stand.script(HEAR + FAMILY + OUTLIVE)
    begin = stand.order("train.py")
    await stand.begin(begin)
    child = int((await stand.line(begin))[0])
    stand.link.signal(begin.key, signal.SIGUSR1, whole=False)
    assert (await stand.line(begin, 2))[1] == "heard"
    assert lives(child)
    stand.link.signal(begin.key, signal.SIGUSR2)
    lines = await stand.line(begin, 4)
    assert sorted(lines[2:]) == [str(-signal.SIGUSR2), "heard"]


@pytest.mark.parametrize("sweep", [True, False])
async def test_what_a_rank_leaves_in_its_group_is_swept_if_wished(stand: RankProgress, sweep: bool) -> None:
    stand.script(FAMILY + "os._exit(4)")
    life = await stand.live("train.py", sweep=sweep)
    child = int(life.out)
    assert life.ended.code == 4
    if sweep:
        await until(lambda: not lives(child))
    else:
        assert lives(child)
        os.kill(child, signal.SIGKILL)


async def test_output_is_appended_whatever_it_is(stand: RankProgress) -> None:
    stand.script("import sys\nprint('out', flush=True)\nsys.stderr.write('half a line')")
    begin = stand.order("train.py")
    Path(begin.stdout).write_text("before\n")
    await stand.begin(begin)
    await stand.end_of(begin.key)
    assert stand.text(begin.stdout) == "before\nout\n"
    assert stand.text(begin.stderr) == "half a line"
    assert stat.S_IMODE(Path(begin.stderr).stat().st_mode) == 0o600


async def test_one_file_can_take_both_outputs(stand: RankProgress) -> None:
    stand.script("import sys\nfor i in range(3):\n    print(i, flush=True)\n    print('e', i, file=sys.stderr)")
    begin = stand.order("train.py")
    begin = Begin(key="both", argv=begin.argv, env=begin.env, cwd=begin.cwd, stdout=begin.stdout, stderr=begin.stdout)
    assert not (await stand.link.begin(begin)).warm  # type: ignore[union-attr]
    await stand.end_of("both")
    assert stand.text(begin.stdout).split("\n") == ["0", "e 0", "1", "e 1", "2", "e 2", ""]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"argv": ("/no/such/python", "x.py")}, "cannot run /no/such/python: No such file or directory"),
        ({"argv": ("/etc/passwd",)}, "cannot run /etc/passwd: Permission denied"),
        ({"argv": ("no-such-command",)}, "cannot run no-such-command: No such file or directory"),
        ({"cwd": "/no/such/folder"}, "cannot enter /no/such/folder: No such file or directory"),
        ({"stdout": "/no/such/file"}, "cannot write to /no/such/file: No such file or directory"),
        ({"stderr": "relative"}, "the path of an output must be absolute: relative"),
        ({"env": {"A": "x" * 200_000}}, f"cannot run {sys.executable}: Argument list too long"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    stand: RankProgress, change: dict[str, object], why: str
) -> None:
    begin: Begin = msgspec.structs.replace(stand.order("train.py"), **change)
    assert await stand.refused(begin) == why
    state = await stand.link.look()
    assert state.kept == ()
    assert psutil.Process(state.pid).children() == []


async def test_a_pipe_that_nobody_reads_does_not_stop_the_keeper(stand: RankProgress) -> None:
    pipe = stand.home / "pipe"
    os.mkfifo(pipe)
    begin = msgspec.structs.replace(stand.order("train.py"), stderr=str(pipe))
    assert await stand.refused(begin) == f"cannot write to {pipe}: No such device or address"


async def test_a_warm_start_that_fails_says_why_too(light: RankProgress) -> None:
    light.script("")
    begin = msgspec.structs.replace(light.order("train.py", warm=True), cwd="/no/such/folder")
    assert await light.refused(begin) == "cannot enter /no/such/folder: No such file or directory"


async def test_a_key_is_started_once(stand: RankProgress) -> None:
    stand.script("")
    begin = stand.order("train.py")
    await stand.begin(begin)
    assert await stand.refused(begin) == "it was started before"


@pytest.mark.parametrize(
    "change", [{"key": "../escape"}, {"key": ""}, {"argv": ()}, {"env": {"A": "\udcff"}}, {"argv": ("a\0b",)}]
)
async def test_a_start_that_cannot_be_meant_is_refused_before_it_is_sent(
    stand: RankProgress, change: dict[str, object]
) -> None:
    with pytest.raises(BadInput):
        await stand.link.begin(msgspec.structs.replace(stand.order("train.py"), **change))


async def test_a_large_environment_arrives_whole(stand: RankProgress) -> None:
    stand.script("import os\nprint(sum(len(v) for k, v in os.environ.items() if k.startswith('BIG')))")
    life = await stand.live("train.py", env={f"BIG{n}": "x" * 50_000 for n in range(20)})
    assert life.out == "1000000\n"


def names(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


async def test_many_starts_leave_no_zombie_no_descriptor_and_no_file(light: RankProgress) -> None:
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
    stand = RankProgress(tmp_path)
    folder = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 6)
    await stand.start(folder, SupervisorOptions(tied=True, env=ENV))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "keeper.sock").stat().st_mode) == 0o600
    stand.script("")
    again = RankProgress(tmp_path)
    await again.find(folder)
    await again.live("train.py")
    await again.link.dismiss()
    with pytest.raises(Unreachable):
        await again.find(folder)


async def test_a_folder_has_one_keeper(stand: RankProgress) -> None:
    with pytest.raises(AlreadyUp):
        await RankProgress(stand.home).start(stand.link.folder, SupervisorOptions(tied=True, env=ENV))
    stand.script("")
    await stand.live("train.py")


async def test_a_keeper_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="/no/python"):
        await RankProgress(tmp_path).start(tmp_path / "keeper", SupervisorOptions(python="/no/python"))
    with pytest.raises(TorchLoomError, match="No module named 'torchloom'"):
        await RankProgress(tmp_path).start(tmp_path / "keeper", SupervisorOptions(tied=True, flags=("-S",), env=ENV))


async def test_what_cannot_be_imported_ahead_makes_starts_cold(tmp_path: Path) -> None:
    stand = RankProgress(tmp_path)
    await stand.start(tmp_path / "keeper", SupervisorOptions(tied=True, preload=("json", "no_such_module"), env=ENV))
    stand.script("")
    answer = await stand.link.begin(stand.order("train.py", warm=True))  # asked while it preloads
    assert answer.why_cold == "cannot preload no_such_module: ModuleNotFoundError: No module named 'no_such_module'"  # type: ignore[union-attr]
    assert (await stand.link.settled()).why_cold == answer.why_cold  # type: ignore[union-attr]
    await stand.link.close()


async def test_threads_left_by_preloading_make_starts_cold(tmp_path: Path) -> None:
    stand = RankProgress(tmp_path)
    stand.script(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "lib/threaded.py",
    )
    env = ENV | {"PYTHONPATH": str(tmp_path / "lib")}
    await stand.start(tmp_path / "keeper", SupervisorOptions(tied=True, preload=("threaded",), env=env))
    state = await stand.link.settled()
    assert state.why_cold == "preloading has left 1 threads, which do not survive a fork"
    await stand.link.close()


async def test_a_new_agent_takes_the_place_of_the_old(light_folder: Path, tmp_path: Path) -> None:
    old, new = RankProgress(tmp_path), RankProgress(tmp_path)
    await old.find(light_folder)
    await new.find(light_folder)
    await until(lambda: bool(old.gone))
    assert old.gone[0].replaced
    with pytest.raises(SupervisorGone):
        old.link.signal("any", 15)
    new.script("")
    life = await new.live("train.py")
    new.link.forget(life.begun.key)
    await new.link.close()


async def test_rubbish_does_not_disturb_the_keeper(stand: RankProgress) -> None:
    for rubbish in (b"{", b'{"is": "Begin"}', b"@", b'{"is": "Nothing"}', b"\xff" * 50_000):
        stand.link.connection.send(rubbish)
    stand.script("")
    assert (await stand.live("train.py")).ended.code == 0


async def agent(home: Path, how: str) -> tuple[asyncio.subprocess.Process, dict[str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.agent.agent_process", str(home), how, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    said: dict[str, int] = {}
    while "keeper" not in said:
        key, pid = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).split()
        said[key.decode()] = int(pid)
    return process, said


async def test_with_its_parent_a_tied_keeper_and_its_ranks_die(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEP)
    process, pids = await agent(tmp_path, "tied")
    assert all(lives(pid) for pid in pids.values())
    process.kill()
    await process.wait()
    await until(lambda: not any(lives(pid) for pid in pids.values()))


async def test_without_its_agent_a_standing_keeper_goes_on_and_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nwhile True: time.sleep(0.01)\n")
    process, pids = await agent(tmp_path, "standing")
    process.kill()
    await process.wait()
    keeper = pids.pop("keeper")
    first, second = pids
    os.kill(pids[first], signal.SIGSEGV)  # with nobody listening
    await until(lambda: not lives(pids[first]))
    assert lives(keeper)
    assert lives(pids[second])
    stand = RankProgress(tmp_path)
    state = await stand.find(tmp_path / "keeper")
    await stand.end_of(first)
    assert stand.ends[first].signal == signal.SIGSEGV
    assert state.pid == keeper
    assert stand.link.running == {second: pids[second]}
    stand.link.signal(second, signal.SIGKILL)
    assert (await stand.end_of(second)).signal == signal.SIGKILL
    await stand.link.dismiss()
    await until(lambda: not lives(keeper))


async def test_ranks_die_with_their_keeper_and_the_agent_hears_of_it(tmp_path: Path) -> None:
    stand = RankProgress(tmp_path)
    stand.script(SLEEP)
    await stand.start(tmp_path / "keeper", SupervisorOptions(tied=True, preload=("json",), env=ENV))
    begun = [await stand.begin(stand.order("train.py", warm=warm)) for warm in (True, False)]
    os.kill(stand.link.state.pid, signal.SIGKILL)
    await until(lambda: bool(stand.gone))
    assert sorted(stand.gone[0].keys) == sorted(rank.key for rank in begun)
    assert not stand.gone[0].replaced
    await until(lambda: not any(lives(rank.pid) for rank in begun))
    with pytest.raises(SupervisorGone):
        await stand.link.begin(stand.order("train.py"))
    with pytest.raises(Unreachable):
        await SupervisorClient.find(tmp_path / "keeper", print, print)
    assert stand.link.process
    assert stand.link.process.wait() == -signal.SIGKILL
    # The next keeper in this folder knows whom the last one took along.
    await stand.start(tmp_path / "keeper", SupervisorOptions(tied=True, env=ENV))
    assert {ended.lost for ended in stand.ends.values()} == {True}
    assert stand.ends.keys() == {rank.key for rank in begun}
    await stand.link.dismiss()


async def test_a_start_in_flight_fails_when_the_keeper_dies(tmp_path: Path) -> None:
    stand = RankProgress(tmp_path)
    stand.script("import time\ntime.sleep(600)", "lib/slow.py")
    env = ENV | {"PYTHONPATH": str(tmp_path / "lib")}
    await stand.start(tmp_path / "keeper", SupervisorOptions(tied=True, preload=("slow",), env=env))
    start = asyncio.ensure_future(stand.link.begin(stand.order("train.py", warm=True)))
    await asyncio.sleep(0)
    os.kill(stand.link.state.pid, signal.SIGKILL)
    with pytest.raises(SupervisorGone):
        await start
    assert stand.link.process
    stand.link.process.wait()


async def test_a_terminated_keeper_takes_its_ranks_and_their_children_along(tmp_path: Path) -> None:
    stand = RankProgress(tmp_path)
    stand.script(FAMILY + "time.sleep(600)")
    await stand.start(tmp_path / "keeper", SupervisorOptions(tied=True, env=ENV))
    begin = stand.order("train.py")
    begun = await stand.begin(begin)
    child = int((await stand.line(begin))[0])
    os.kill(stand.link.state.pid, signal.SIGTERM)
    await until(lambda: bool(stand.gone))
    await until(lambda: not lives(begun.pid) and not lives(child))
    assert stand.ends[begin.key].signal == signal.SIGKILL
    assert ExitRecordStore(stand.link.folder).read()[begin.key].ended == stand.ends[begin.key]
    assert stand.link.process
    assert stand.link.process.wait() == 0
