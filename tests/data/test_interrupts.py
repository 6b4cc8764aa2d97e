"""KeyboardInterrupt, or an exception of another signal handler, at any line of next(): no batch is lost in silence."""

from __future__ import annotations

import linecache
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from tests.data.samples import Large, processes
from torchloom.data import ElasticLoader, loader
from torchloom.errors import LoaderInterrupted

SIZE = 6
LAST_LINES = ("return result", "if result.__class__ is ExceptionWrapper:")
"""The way out of next(), without a call: there Python lets no signal handler run."""
PACKAGE = loader.__file__.removesuffix("loader.py")


class InterruptAt:
    """Raises KeyboardInterrupt before this line of the package that is executed, as a signal handler can."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(LAST_LINES):
                return self
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def epoch(count: int, **arguments: Any) -> ElasticLoader:
    return ElasticLoader(Large(SIZE), batch_size=1, num_workers=count, **arguments)


def interrupted(iterator: Any, line: int) -> tuple[list[float], bool]:
    """What next() yields, if anything, and whether it was interrupted."""
    previous = sys.gettrace()
    sys.settrace(InterruptAt(line))
    try:
        return [float(next(iterator).mean())], False
    except KeyboardInterrupt:
        return [], True
    finally:
        sys.settrace(previous)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "count", "persistent", "stride"),
    [
        ("process", 0, False, 2),
        ("process", 1, False, 7),
        ("process", 1, True, 19),
        ("thread", 1, False, 1),
        ("thread", 1, True, 3),
    ],
)
def test_an_interrupt_at_any_line(workers: Any, count: int, persistent: bool, stride: int) -> None:
    line, reached, refused = 1, True, 0
    while reached:
        line += stride
        loader = epoch(count, persistent_workers=persistent, workers=workers)
        iterator = iter(loader)
        batches = [float(next(iterator).mean())]
        yielded, reached = interrupted(iterator, line)
        batches += yielded
        try:
            batches += [float(batch.mean()) for batch in iterator]
        except LoaderInterrupted:
            refused += 1
            loader.load_state_dict(loader.state_dict())
            batches += [float(batch.mean()) for batch in loader]
        assert batches == list(range(SIZE)), f"interrupted at line {line}"
    assert line > 20
    assert refused


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_while_it_waits_an_interrupt_changes_nothing(workers: Any) -> None:
    """The usual case: a person waits for a batch, too."""
    iterator = iter(epoch(1, workers=workers))
    next(iterator)
    iterator._pool.wait = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    batches = []
    for _ in range(1000 if workers == "process" else 100_000):  # a thread gets little of the interpreter meanwhile
        try:
            batches.append(float(next(iterator).mean()))
        except KeyboardInterrupt:
            continue
        except StopIteration:
            break
    assert batches == list(range(1, SIZE))


SCRIPT = """
import sys
import threading
from tests.data.samples import Large
from tests.data.test_interrupts import InterruptAt
from torchloom.data import ElasticLoader
iterator = iter(ElasticLoader(Large(6), batch_size=1, num_workers=1))
next(iterator)
sys.settrace(InterruptAt({line}))
{act}
"""


@pytest.mark.long
@pytest.mark.parametrize(("act", "line"), [("iterator.close()", 9), ("iterator.close()", 20), ("list(iterator)", 20)])
def test_training_that_is_interrupted_ends(act: str, line: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(line=line, act=act)], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode in (0, 1, -2)
    assert processes() == []


def test_an_interrupt_at_any_line_of_the_end_leaves_no_thread() -> None:
    line, is_interrupted = 0, True
    while is_interrupted:
        line += 1
        before = set(threading.enumerate())
        iterator = iter(epoch(2, workers="thread"))
        next(iterator)
        started = set(threading.enumerate()) - before
        previous = sys.gettrace()
        sys.settrace(InterruptAt(line))
        try:
            iterator.close()
            is_interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        del iterator
        for thread in started:
            thread.join(60)
            assert not thread.is_alive(), f"interrupted at line {line}"
    assert line > 10
