"""The zygote: a process from which loader processes are forked while training runs.

It starts when an iteration starts, by the start method of the loader. With `fork` it is a copy of the training process
at that moment, which then does nothing but fork: loaders that start later are never forked from the running training
process with its threads and devices. With `forkserver` and `spawn` it is a clean interpreter that has unpickled the
dataset once.

It learns of the end of a loader as its parent, and reports it. The end of the stream alone would not do: a process that
a dataset forks may keep the socket of its loader open. If the zygote is killed, the kernel kills its loaders.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from multiprocessing import util
from typing import Any

from torchloom.data.loaders import loader_process, process_control, transport
from torchloom.data.loaders.pool import Exit
from torchloom.data.recipe import Recipe

START, EXITED = b"f", b"x"
"""Kinds of packets: to the zygote, with the socket of a new loader, and from it."""
_START = struct.Struct("<qq")
_EXITED = struct.Struct("<qq")
GRACE_SECONDS = 5.0
"""Time for a loader to finish its batch after training has closed its end; then it is killed."""
SHORTAGE_SECONDS = 0.02
"""Until a request is looked at again for which the zygote has no descriptor."""


class Zygote:
    """The training process's handle of the zygote."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        """`context`: a multiprocessing context, or torch.multiprocessing for the default start method."""
        self._end, there = transport.socket_pair()
        self._receiver = transport.Receiver(self._end)
        self.exits: dict[int, Exit] = {}
        """By the serial number of the loader: those that were reported and not yet taken."""
        try:
            self._process = context.Process(target=main, args=(there, recipe), daemon=True, name="torchloom-zygote")
            self._process.start()
        except BaseException:
            self._end.close()
            raise
        finally:
            there.close()
        self.pid: int = self._process.pid or 0

    def fileno(self) -> int:
        return self._end.fileno()

    def start_loader(self, loader: int, count: int, serial: int) -> socket.socket:
        """Start a loader process; returns the training process's end of its socket.

        OSError if the zygote has died, or with an errno in SHORTAGES.
        """
        here, there = transport.socket_pair()
        try:
            transport.send(self._end, START, _START.pack(loader, count), number=serial, descriptors=[there.fileno()])
        except OSError:
            here.close()
            raise
        finally:
            there.close()
        return here

    def listen(self, seconds: float = 0.0) -> bool:
        """Read what the zygote reports, after at most this time, into `exits`. False if it has died."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        if not poller.poll(seconds * 1000):
            return True
        with contextlib.suppress(BlockingIOError):
            while (packet := self._receiver.receive(wait=False)) is not None:
                self.exits[packet.number] = Exit(*_EXITED.unpack(packet.payload))
            return False
        return True

    def release(self) -> None:
        """Let the zygote end, after its loaders; `close` waits for it."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> int | None:
        """Wait for its end; returns its exit status. A copy of multiprocessing's pipe, which `join` with a time would
        wait for, may be open in a process that a dataset forked."""
        self.release()
        deadline = time.monotonic() + GRACE_SECONDS + 2.0
        while self.listen(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                self._process.kill()
                break
        self._process.join()
        status: int | None = self._process.exitcode
        with contextlib.suppress(ValueError):  # a handler of SIGCHLD in the training process took its status
            self._process.close()
        self._end.close()
        return status


def main(end: socket.socket, recipe: Recipe) -> None:
    """Fork a loader for each request, and end with the training process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    process_control.set_name("loom-zygote")
    gc.freeze()  # a collection in a loader would copy every page that it shares with the training process
    receiver = transport.Receiver(end)
    children = _Children(end)
    poller = select.poll()
    poller.register(children.alarm, select.POLLIN)
    try:
        while True:
            poller.register(end, select.POLLIN | (select.POLLOUT if children.reports else 0))
            for descriptor, what in poller.poll():
                if descriptor == children.alarm:
                    children.reap()
                    continue
                children.report()
                if what & ~select.POLLOUT:
                    try:
                        packet = receiver.receive()
                    except OSError as error:
                        if error.errno not in transport.SHORTAGES:
                            raise
                        time.sleep(SHORTAGE_SECONDS)  # a loader that ends gives back what it had
                        continue
                    if packet is None:
                        return
                    loader, count = _START.unpack(packet.payload)
                    children.fork(packet.descriptors[0], recipe, loader, count, packet.number)
    except ConnectionError:
        pass  # the training process has gone
    finally:
        children.end()


def _ignore(*_: object) -> None:
    """The end of the stream ends the zygote, and nothing else."""


class _Children:
    """The loader processes of a zygote."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._serials: dict[int, int] = {}
        """By process id."""
        self.reports: deque[tuple[int, Exit]] = deque()
        """Exits that the socket did not accept yet."""
        self.alarm, self._writing = os.pipe()
        """Readable after a signal: that a child has ended."""
        os.set_blocking(self.alarm, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._previous = signal.signal(signal.SIGCHLD, _ignore)

    def fork(self, descriptor: int, recipe: Recipe, loader: int, count: int, serial: int) -> None:
        zygote = os.getpid()
        try:
            child = os.fork()
        except OSError as error:  # no memory, too many processes
            os.close(descriptor)
            self.reports.append((serial, Exit(0, error.errno or 0)))
            self.report()
            return
        if child == 0:
            status = 1
            try:
                process_control.end_with_parent(zygote)
                self._leave()
                with socket.socket(fileno=descriptor) as own:
                    loader_process.run(own, recipe, loader, count)
                util._exit_function()  # type: ignore[attr-defined]  # as at the end of every process of multiprocessing
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
        self._serials[child] = serial

    def _leave(self) -> None:
        """In a loader: it is not the zygote."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if self._previous is None else self._previous)
        os.close(self.alarm)
        os.close(self._writing)
        self._end.close()

    def reap(self) -> None:
        """Read the alarm, and report the children that have ended."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.alarm, 4096):
                pass
        for child, serial in list(self._serials.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del self._serials[child]
                self.reports.append((serial, Exit(pid, os.waitstatus_to_exitcode(status))))
        self.report()

    def report(self) -> None:
        """Never wait for the training process: it may be waiting for us."""
        with contextlib.suppress(OSError):  # it has gone
            while self.reports:
                serial, exit_ = self.reports[0]
                if not transport.send(self._end, EXITED, _EXITED.pack(*exit_), number=serial, wait=False):
                    return
                self.reports.popleft()

    def end(self) -> None:
        """Wait for those that run, and kill them after a time."""
        poller = select.poll()
        poller.register(self.alarm, select.POLLIN)
        deadline = time.monotonic() + GRACE_SECONDS
        self.reap()
        while self._serials and (left := deadline - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                self.reap()
        for child in self._serials:
            os.kill(child, signal.SIGKILL)
        for child in self._serials:
            os.waitpid(child, 0)
