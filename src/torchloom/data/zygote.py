"""The zygote: a process from which loader processes are forked while training runs.

It starts when an iteration starts, by the start method of the loader. With `fork` it is a copy of the training process
at that moment, which then does nothing but fork: loaders that start later are never forked from the running training
process with its threads and devices. With `forkserver` and `spawn` it is a clean interpreter that has unpickled the
dataset once.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from torchloom.data import loader_process, transport
from torchloom.data.loader_process import Recipe

START = b"f"
GRACE_SECONDS = 5.0
"""Time for a loader to finish its batch after training has closed its end; then it is killed."""


class Zygote:
    """The training process's handle of the zygote."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        """`context`: a multiprocessing context, or torch.multiprocessing for the default start method."""
        self._end, there = transport.socket_pair()
        try:
            self._process = context.Process(target=main, args=(there, recipe), daemon=True, name="torchloom-zygote")
            self._process.start()
        except BaseException:
            self._end.close()
            raise
        finally:
            there.close()

    def fileno(self) -> int:
        return self._end.fileno()

    def start_loader(self, loader: int, count: int) -> socket.socket:
        """Start a loader process; returns the training process's end of its socket. OSError if the zygote has died."""
        here, there = transport.socket_pair()
        try:
            transport.send(self._end, START, pickle.dumps((loader, count)), descriptors=[there.fileno()])
        except OSError:
            here.close()
            raise
        finally:
            there.close()
        return here

    def release(self) -> None:
        """Let the zygote end, after its loaders; `close` waits for it."""
        transport.shut_down(self._end)

    def close(self) -> None:
        self.release()
        self._process.join(GRACE_SECONDS + 2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def main(end: socket.socket, recipe: Recipe) -> None:
    """Fork a loader for each request, and end with the training process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    gc.freeze()  # a collection in a loader would copy every page that it shares with the training process
    receiver = transport.Receiver(end)
    children: dict[int, int] = {}
    """By the reading end of a pipe whose writing end the loader has: its end means that the loader has ended."""
    poller = select.poll()
    poller.register(end, select.POLLIN)
    try:
        while True:
            for descriptor, _ in poller.poll():
                if descriptor in children:
                    poller.unregister(descriptor)
                    _reap(children, descriptor)
                    continue
                packet = receiver.receive()
                if packet is None:
                    return
                loader, count = pickle.loads(packet.payload)
                pipe = _fork(end, children, packet.descriptors[0], recipe, loader, count)
                if pipe is not None:
                    poller.register(pipe, select.POLLIN)
    finally:
        _end_children(children)


def _ignore(*_: object) -> None:
    """The end of the stream ends the zygote, and nothing else."""


def _fork(
    end: socket.socket, children: dict[int, int], descriptor: int, recipe: Recipe, loader: int, count: int
) -> int | None:
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError:  # no memory, too many processes: the closed socket reports it
        for each in (descriptor, reading, writing):
            os.close(each)
        return None
    if child == 0:
        status = 1
        try:
            end.close()
            for other in (reading, *children):
                os.close(other)
            with socket.socket(fileno=descriptor) as own:
                loader_process.run(own, recipe, loader, count)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(descriptor)
    os.close(writing)
    children[reading] = child
    return reading


def _reap(children: dict[int, int], descriptor: int) -> None:
    os.close(descriptor)
    child = children.pop(descriptor, None)
    if child is not None:
        os.waitpid(child, 0)


def _end_children(children: dict[int, int]) -> None:
    poller = select.poll()
    for descriptor in children:
        poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + GRACE_SECONDS
    while children and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left * 1000):
            poller.unregister(descriptor)
            _reap(children, descriptor)
    for child in children.values():
        os.kill(child, signal.SIGKILL)
    for descriptor in list(children):
        _reap(children, descriptor)
