"""Processes that do as a benchmark tells them: one JSON object per line in, one out. They end with their stdin."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import msgspec

from benchmarks.plane import child

Answer = dict[str, Any]


class Puppet:
    """The end that gives the orders."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self.process = process
        self.name = name

    def tell(self, do: str, **details: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"do": do, **details}) + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Answer:
        """Its answer to the oldest order not yet answered."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: exit code {self.process.wait(5)}")
        answer: Answer = msgspec.json.decode(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, do: str, **details: object) -> Answer:
        self.tell(do, **details)
        return self.hear()


@contextlib.contextmanager
def puppet(module: str, *words: str, env: dict[str, str], stderr: object = None) -> Iterator[Puppet]:
    command = [sys.executable, "-m", module, *words]
    pipe = subprocess.PIPE
    with child(command, env, stdin=pipe, stdout=pipe, stderr=stderr) as process:
        found = Puppet(process, f"{module} {' '.join(words)}")
        found.hear()  # its first word: ready
        yield found


async def obey(orders: Mapping[str, Callable[[Answer], Awaitable[Answer]]]) -> None:
    """The end that takes them, one after the other, until stdin closes."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say({"ready": True})
    while line := await reader.readline():
        order: Answer = msgspec.json.decode(line)
        try:
            _say(await orders[order.pop("do")](order))
        except Exception as error:  # noqa: BLE001  whoever gave the order has to know, whatever it was
            _say({"error": "; ".join(map(repr, getattr(error, "exceptions", [error])[:3]))})


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
