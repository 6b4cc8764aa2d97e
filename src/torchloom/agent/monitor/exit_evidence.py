"""What tells how a rank ended: the last it wrote, the error torch recorded, the kernel's count of processes it killed.

Nothing here fails: evidence that is missing or damaged is no evidence.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchloom.agent.supervisor.protocol import Ended
from torchloom.protocol.node import ExitCause
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.shared.json_decoding import decoder

LINES = 20
MAX_BYTES = 16 * 1024
MAX_LINE = 500
EVIDENCE = 1900
"""Characters of the last lines of a rank that are reported."""
OOM_KILLS = {"memory": "memory.oom_control", "": "memory.events"}
"""The file with the count, by the controllers of a cgroup: of version 1, and of version 2, which names none."""
TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?")


def last_lines(path: str | Path, lines: int = LINES, max_bytes: int = MAX_BYTES) -> tuple[str, ...]:
    """The end of a text, oldest line first; a last line without its end counts. Other bytes than UTF-8 become �."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except OSError:
        return ()
    text = data.decode(errors="replace").replace("\r\n", "\n").split("\n")
    if size > max_bytes and len(text) > 1:
        text = text[1:]  # cut in two
    if text[-1] == "":
        text.pop()
    # A progress bar rewrites its line over and over; what it last said is what stood there.
    return tuple(line.rstrip("\r").rpartition("\r")[2][:MAX_LINE] for line in text[-lines:])


def recorded_error(path: str | Path) -> str:
    """What torch wrote to TORCHELASTIC_ERROR_FILE: "ValueError: ..."; empty if there is nothing."""
    try:
        message = decoder(dict)(Path(path).read_bytes()).get("message")
    except (OSError, msgspec.MsgspecError):
        return ""
    if isinstance(message, dict):
        message = message.get("message")
    return message.strip()[:MAX_LINE] if isinstance(message, str) else ""


def raised(lines: Sequence[str]) -> str:
    """The exception that a traceback in these lines ends with; empty if there is none."""
    starts = [place for place, line in enumerate(lines) if line.strip() == TRACEBACK]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if line and not line[0].isspace() and _RAISED.fullmatch(line):
            return line
    # A syntax error has no frames, and what is above a long traceback may be cut off.
    last = lines[-1] if lines else ""
    return last if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", last) else ""


def oom_kills(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this one's memory cgroup the kernel has killed so far; 0 where it does not tell.

    The kernel counts there also when the whole machine, not the cgroup, was out of memory.
    """
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return 0
    for _, controllers, path in groups:
        top = root / controllers
        # In a container its own cgroup may be mounted as the root.
        for folder in (top / path.lstrip("/"), top) if controllers in OOM_KILLS else ():
            with contextlib.suppress(OSError, ValueError, KeyError):
                counts = dict(line.split(" ", 1) for line in (folder / OOM_KILLS[controllers]).read_text().splitlines())
                return int(counts["oom_kill"])
    return 0


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(ended: Ended, error: str) -> tuple[ExitCause, Prose]:
    """Why it ended, as far as is known. `error` is the exception, as torch recorded it or from the end of stderr."""
    if ended.lost:
        return "", ""
    if ended.signal == signal.SIGKILL and ended.oom_kills:  # it looks like the kernel's OOM killer
        return "out_of_memory", phrase("out_of_memory", kills=ended.oom_kills)
    return ("exception", error) if ended.code and error else ("", "")


def describe_exit(status: int) -> Phrase:
    """How a process ended that `subprocess` has waited for."""
    return phrase("killed_by", signal=signal_name(-status)) if status < 0 else phrase("exit_code", status=status)


def how_it_ended(ended: Ended) -> Phrase:
    if ended.lost:
        return phrase("killed_with_supervisor")
    if ended.signal is not None:
        return phrase("killed_core_dumped" if ended.core_dumped else "killed_by", signal=signal_name(ended.signal))
    return phrase("exit_code" if ended.code else "rank_ended_well", status=ended.code)


def examine_end(ended: Ended, stderr: Path, error_file: Path) -> dict[str, Any]:
    """The fields of a rank's status that say how it ended."""
    lines = last_lines(stderr)
    last = lines[-1] if lines else ""
    cause, error = cause_of(ended, recorded_error(error_file) or raised(lines) or last)
    return {
        "code": ended.code if ended.signal is None else None,
        "signal": "" if ended.signal is None else signal_name(ended.signal),
        "evidence": phrase("rank_end", lines="\n".join(lines)[-EVIDENCE:], how=how_it_ended(ended), error=error),
        "error": error[:200] if isinstance(error, str) else error,
        "cause": cause,
    }
