"""Who is not where the others are: the stacks of all ranks side by side.

When one rank of a job hangs, the stacks of the others are all alike: they wait in the same collective. What is to be
read is the one that is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torchloom.core.detect.hang import spans
from torchloom.protocol.phrase import Phrase, phrase

MOST_TEXT = 20_000
"""Characters of a dump that are read."""
MOST_FRAMES = 12
"""Of a stack that are kept, the innermost."""
MOST_LINES = 16
MOST_WORD = 60
_LOOKED_AT = 8
"""Innermost frames in which waiting shows."""

_THREAD = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]+\b.*$")
_FAULTHANDLER = re.compile(r'^\s*File "([^"]*)", line (\d+) in (.*)$')
_PY_SPY = re.compile(r"^\s+(\S.*?) \((.+?)(?::(\d+))?\)$")
_WAITING_PLACES = ("torch/distributed/", "/c10d", "torch/nn/parallel/", "torch/cuda/streams", "torch/futures")
_WAITING_CALLS = frozenset(
    {"wait", "barrier", "monitored_barrier", "all_reduce", "allreduce", "all_gather", "all_gather_object", "allgather"}
    | {"reduce_scatter", "broadcast", "broadcast_object_list", "all_to_all", "recv", "irecv", "send", "synchronize"}
    | {"_engine_run_backward", "acquire", "join"}
)
_SHELLS = frozenset(
    {"wrapper", "_wrapped", "inner", "_call_impl", "_wrapped_call_impl", "decorate_context", "__call__"}
)
"""Frames that say nothing: the next one out is named."""
_LIBRARY = ("site-packages/", "dist-packages/", "lib/python", "torch/", "threading.py", "<frozen")
_OURS = "torchloom/threadlet/"
"""What measures the waiting is not what waits."""


class Frame(NamedTuple):
    call: str
    file: str
    line: int

    def __str__(self) -> str:
        short = self.file.replace("\\", "/").rpartition("/")[2]
        return f"{self.call[:MOST_WORD]} ({short[:MOST_WORD]}{f':{self.line}' if self.line else ''})"


class Group(NamedTuple):
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    """Of the main thread, innermost first; empty: it could not be read."""
    waits: bool
    """It looks like waiting for other ranks."""


def group_stacks(stacks: Mapping[int, str]) -> tuple[Group, ...]:
    """Those with the same stack of the main thread together; the largest group first."""
    alike: dict[tuple[Frame, ...], list[int]] = {}
    for rank, text in stacks.items():
        alike.setdefault(_main_stack(text), []).append(rank)
    groups = [Group(tuple(sorted(members)), frames, _waits(frames)) for frames, members in alike.items()]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def describe_groups(groups: Iterable[Group], culprits: Iterable[int] = ()) -> tuple[Phrase, ...]:
    """A few lines that tell where all are, and who is the odd one out."""
    shown = list(groups)
    odd = _odd(shown, set(culprits))
    shown.sort(key=lambda group: group in odd)  # the last line is what is to be read
    left_out = sum(len(group.ranks) for group in shown[MOST_LINES - 1 : -1])
    del shown[MOST_LINES - 1 : -1]
    lines = [phrase("odd_one_out", line=_line(group)) if group in odd else _line(group) for group in shown]
    if left_out:
        lines.append(phrase("more_ranks_elsewhere", count=left_out))
    return tuple(lines)


def _odd(groups: list[Group], culprits: set[int]) -> list[Group]:
    if len(groups) < 2:
        return []
    if blamed := [group for group in groups if culprits.intersection(group.ranks)]:
        return blamed if len(blamed) < len(groups) else []
    readable = [group for group in groups if group.frames]
    if any(group.waits for group in readable):
        return [group for group in readable if not group.waits]
    most = len(groups[0].ranks)
    rest = groups[1:]
    return [group for group in rest if group.frames] if most > sum(len(group.ranks) for group in rest) else []


def _line(group: Group) -> Phrase:
    who, frames = spans(group.ranks), group.frames
    if not frames:
        return phrase("stack_unread", ranks=who)
    inner = next((frame for frame in frames if frame.call not in _SHELLS), frames[0])
    own = (frame for frame in frames if not any(part in frame.file for part in _LIBRARY))
    called = next(own, inner)
    caller = str(called) if called != inner else ""
    return phrase("ranks_wait_in" if group.waits else "ranks_are_in", ranks=who, frame=str(inner), caller=caller)


def _waits(frames: tuple[Frame, ...]) -> bool:
    return any(
        frame.call.rpartition(".")[2] in _WAITING_CALLS or any(part in frame.file for part in _WAITING_PLACES)
        for frame in frames[:_LOOKED_AT]
    )


# ── reading dumps ────────────────────────────────────────────────────────────────────────────────────────────────────


def _main_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames in what faulthandler or py-spy wrote; empty of anything else."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text[:MOST_TEXT].splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif (frame := _frame(line)) is not None:
            if not threads:
                threads.append(("", []))
            if _OURS not in frame.file:
                threads[-1][1].append(frame)
    threads = [(head, frames) for head, frames in threads if frames]
    if not threads:
        return ()
    named = [frames for head, frames in threads if "MainThread" in head]
    outermost = [frames for _, frames in threads if not frames[-1].call.startswith("_bootstrap")]
    # faulthandler writes the main thread last and does not name it; other threads begin in threading.py.
    return tuple((named or outermost or [threads[-1][1]])[-1][:MOST_FRAMES])


def _frame(line: str) -> Frame | None:
    if len(line) > 1000:
        return None
    if match := _FAULTHANDLER.match(line):
        return Frame(match[3].strip(), match[1], int(match[2][:9]))
    if match := _PY_SPY.match(line):
        return Frame(match[1], match[2], int((match[3] or "0")[:9]))
    return None
