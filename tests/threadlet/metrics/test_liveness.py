"""What a rank shows to the agent on its machine, read from another process."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.threadlet.played import RANK, PlayedWeaver, until_true
from tests.threadlet.training_process import ATTACHED, running, seen
from torchloom import attach
from torchloom.protocol.rank import Muted
from torchloom.settings import Settings
from torchloom.shared.liveness_page import COLLECTING, SHOWN, SIGNAL, STARTED, STEP, TICK, WANTED, Page, View, view
from torchloom.threadlet.metrics.liveness import LivenessPageWriter
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.metrics.stacks import Stacks, free_signal
from torchloom.threadlet.threadlet import attach_counted

NOBODY = Settings(state="nobody")


def ticks(page: View) -> None:
    before = page.marks[TICK]
    seen(lambda: page.marks[TICK] > before + 1, "a tick")


STEPPING = f"""{ATTACHED}
print(0, flush=True); input()
loom.step(step=1000); loom.step()
print(1, flush=True); input()
"""


def test_a_step_is_seen_from_outside_and_after_a_kill(tmp_path: Path) -> None:
    with running(STEPPING, tmp_path) as rank:
        rank.line()
        page = rank.page()
        assert (page.marks[STEP], page.marks[STARTED], page.phase) == (0, 0, "start")
        rank.tell()
        rank.line()
        assert (page.marks[STEP], page.marks[STARTED], page.phase) == (1001, 1, "")
        ticks(page)
        rank.process.kill()
        rank.process.wait()
        assert page.marks[STEP] == 1001
        assert page.phase == ""


def test_a_resumed_rank_shows_the_step_it_goes_on_from(tmp_path: Path) -> None:
    with running(f"{ATTACHED}\nloom.resume_at(500); print(1, flush=True); input()", tmp_path) as rank:
        rank.line()
        page = rank.page()
        assert (page.marks[STEP], page.marks[STARTED], page.phase) == (500, 0, "start")


def test_a_script_that_has_not_attached_shows_the_steps_that_are_counted() -> None:
    steps = attach_counted({"TORCHLOOM_JOB": "job", "TORCHLOOM_STATE": "nobody", "TORCHLOOM_RESUME_STEP": "100"})
    page = view(os.getpid())
    assert page is not None
    assert (page.marks[STARTED], page.phase) == (0, "start")
    steps._count_earlier(3)
    assert (page.marks[STEP], page.marks[STARTED], page.phase) == (103, 1, "")
    steps.step()
    assert page.marks[STEP] == 104


def stacks(page: View, *, empty: bool = False) -> str:
    with page.open_stacks() as file:
        text = file.read().decode()
        if empty:
            file.truncate(0)
        return text


def test_stacks_are_shown_on_wish(tmp_path: Path) -> None:
    with running(f"{ATTACHED}\ndef deep():\n    print(1, flush=True); input()\ndeep()", tmp_path) as rank:
        rank.line()
        page = rank.page()
        for wish in (1, 2):
            page.marks[WANTED] += 1
            seen(lambda wish=wish: page.marks[SHOWN] == wish, "the stacks")  # type: ignore[misc]
            text = stacks(page, empty=True)
            assert text.count(" in deep") == 1
            assert "\0" not in text  # after the reader has emptied the file, it is written from the beginning


HOLDING = f"""{ATTACHED}
hold = ctypes.PyDLL(None).sleep    # of the C library, with the interpreter's lock
def stuck():
    print(1, flush=True)
    while True: hold(60)
stuck()
"""


def test_stacks_are_shown_by_a_signal_while_c_code_holds_the_interpreter(tmp_path: Path) -> None:
    with running(HOLDING, tmp_path) as rank:
        rank.line()
        page = rank.page()

        def held() -> bool:
            """No tick between two stacks: nobody else has run."""
            before = page.marks[TICK]
            os.kill(rank.pid, page.marks[SIGNAL])
            os.kill(rank.pid, 0)
            return "in stuck" in stacks(page) and page.marks[TICK] == before

        assert signal.SIGRTMIN < page.marks[SIGNAL] < signal.SIGRTMAX
        seen(held, "the stacks")
        page.marks[WANTED] += 1
        seen(held, "the stacks again")
        assert page.marks[SHOWN] == 0
        assert rank.process.poll() is None


def test_who_never_attached_has_no_page_and_is_not_to_be_signalled(tmp_path: Path) -> None:
    with running(
        "import torchloom.shared.liveness_page as p; page = p.Page(); print(1, flush=True); input()", tmp_path
    ) as rank:
        rank.line()
        assert rank.page().marks[SIGNAL] == 0
    with running("import torchloom; print(1, flush=True); input()", tmp_path) as rank:
        rank.line()
        assert view(rank.pid) is None


def test_a_signal_that_someone_uses_is_not_taken(tmp_path: Path) -> None:
    status = tmp_path / "status"

    def choose(**masks: int) -> int:
        status.write_text("".join(f"{name}:\t{mask:016x}\n" for name, mask in masks.items()))
        return free_signal(status)

    top = signal.SIGRTMAX - 2
    assert choose(SigCgt=0, SigIgn=0, SigBlk=0) == top
    assert choose(SigCgt=1 << top - 1, SigIgn=1 << top - 2, SigBlk=1 << top - 3) == top - 3
    assert choose(SigCgt=2**64 - 1) == 0
    before = signal.signal(top, lambda *_: None)
    try:
        assert choose(SigCgt=0) == top - 1
    finally:
        signal.signal(top, before)


FORKING = f"""{ATTACHED}
loom.step()
with loom.phase("eval"):
    child = os.fork()
    if child == 0:
        for _ in range(50): loom.step()
        loom.resume_at(7); gc.collect()
        with loom.phase("child"): pass
        print("child", os.getpid(), flush=True)
        input()
        sys.exit(0)
    os.waitpid(child, 0)
    print("parent", flush=True); input()
"""


def test_a_signal_that_someone_takes_later_is_not_ours_any_more() -> None:
    mine = Stacks()
    try:
        number = mine.check_signal()
        assert number
        signal.signal(number, lambda *_: None)
        assert mine.check_signal() == 0
    finally:
        if number:
            signal.signal(number, signal.SIG_DFL)
        mine.close()


def test_a_number_that_is_another_files_by_now_is_not_closed(tmp_path: Path) -> None:
    mine = Stacks()
    os.close(mine.fd)  # as a script does that closes whatever is open
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    os.dup2(other, mine.fd)  # it may have got that number already
    mine.close()
    os.fstat(mine.fd)
    for fd in {other, mine.fd}:
        os.close(fd)


def test_a_forked_child_writes_nothing_and_has_no_page(tmp_path: Path) -> None:
    with running(FORKING, tmp_path) as rank:
        child = int(rank.line().split()[1])
        page = rank.page()
        assert view(child) is None
        assert not any("torchloom" in str(fd.readlink()) for fd in Path(f"/proc/{child}/fd").iterdir())
        rank.tell()
        assert rank.line() == "parent"
        assert (page.marks[STEP], page.phase) == (1, "eval")
        ticks(page)
        os.kill(rank.pid, page.marks[SIGNAL])
        seen(lambda: "torchloom" in stacks(page), "the parent's stacks")


def test_a_life_that_leaves_says_so_and_the_next_one_is_seen_on_the_same_page() -> None:
    first = attach("job", "hi", settings=NOBODY)
    first.step(step=5)
    page = view(os.getpid())
    assert page is not None
    first.close()
    assert (page.phase, page.marks[STEP]) == ("leaving", 5)
    attach("job", "hi", settings=NOBODY)
    assert (page.phase, page.marks[STEP], page.marks[STARTED]) == ("start", 0, 0)
    ticks(page)


def test_a_collection_of_the_oldest_garbage_is_marked_while_it_lasts() -> None:
    liveness = LivenessPageWriter(Meter())
    page = view(os.getpid())
    assert page is not None
    marked: list[tuple[str, int, int]] = []

    def look(moment: str, about: dict[str, int]) -> None:
        marked.append((moment, about["generation"], page.marks[COLLECTING]))

    gc.callbacks.append(look)
    try:
        gc.collect(1)
        gc.collect()
    finally:
        gc.callbacks.remove(look)
    liveness.end()
    assert ("start", 1, 0) in marked
    assert ("start", 2, 1) in marked
    assert ("stop", 2, 0) in marked


NO_PAGE = f"""
import os
del os.memfd_create        # as on a machine that has none
{ATTACHED}
loom.step()
with loom.phase("eval"): gc.collect()
print(loom.step_number, flush=True); input()
"""


def test_without_a_page_training_goes_on(tmp_path: Path) -> None:
    with running(NO_PAGE, tmp_path) as rank:
        assert rank.line() == "1"
        assert view(rank.pid) is None
        rank.tell()
        assert rank.process.wait(20) == 0


async def test_a_rank_nobody_listens_to_any_more_is_still_seen(weaver: PlayedWeaver, lively: Settings) -> None:
    weaver.welcomes = True
    loom = attach(RANK.job, RANK.replica, settings=lively)
    await until_true(lambda: loom._link is not None and loom._link.state.welcomed, "the welcome")
    page = view(os.getpid())
    assert page is not None
    await weaver.say(Muted(term=0, incarnation=loom.incarnation, newest="f" * 24, pid=7, node="n2"))
    await until_true(lambda: not loom.connected, "silence")
    before = page.marks[TICK]
    await until_true(lambda: page.marks[TICK] > before + 2, "a tick")
    assert page.phase == "start"


def test_a_page_that_cannot_be_made_leaves_no_file_open() -> None:
    import resource

    before = len([*Path("/proc/self/fd").iterdir()])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # less than a page
    try:
        with pytest.raises(OSError, match="too large"):
            Page()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
