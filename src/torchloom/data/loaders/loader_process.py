"""A loader process: it receives indices, loads and collates the samples, and sends the batch."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker

from torchloom.data.loaders import loader_stacks, transport
from torchloom.data.loaders.batch_encoding import encode
from torchloom.data.loaders.shared_memory import MOST_UNANNOUNCED, SlotRing
from torchloom.data.recipe import Recipe
from torchloom.data.seeding import seed_process
from torchloom.data.shards import ShardHost
from torchloom.data.stage_times import NO_TIMES, StageTimes, clock

BATCH, SLOTS, LOAD = b"b", b"s", b"l"
"""Kinds of packets: a batch, new and retired slots, indices to load."""

_IGNORED = (signal.SIGINT, signal.SIGTERM)


def run(end: socket.socket, recipe: Recipe, loader: int, count: int) -> None:
    """Load until the training process closes its end."""
    for number in _IGNORED:  # the training process decides when loaders end
        signal.signal(number, _ignore)
    loader_stacks.prepare(loader)
    torch.set_num_threads(1)
    ring = SlotRing(announce=lambda: _send_slots(end, ring))
    _allocate_from(ring, end)
    seed = seed_process(recipe.base_seed, loader, recipe.seeding)
    worker._worker_info = worker.WorkerInfo(id=loader, num_workers=count, seed=seed, dataset=recipe.dataset)
    failure: ExceptionWrapper | None = None
    try:
        if recipe.worker_init_fn is not None and recipe.shard_plan is None:
            recipe.worker_init_fn(loader)
    except Exception:  # noqa: BLE001  # the user's: raised in training, for each batch
        failure = ExceptionWrapper(where=_where(loader))
    receiver = transport.Receiver(end)
    transfer = 0.0
    epoch, host = -1, recipe.host(in_training=False)
    try:
        while (packet := receiver.receive()) is not None:
            indices, position, key, (returned, copied) = pickle.loads(packet.payload)
            ring.take_back(returned, copied)
            if host is not None and packet.epoch != epoch:
                epoch = packet.epoch
                host.restart()
            result, times = (failure, NO_TIMES) if failure else _load(recipe, indices, position, key, host, loader)
            began = clock()
            _send(end, ring, packet, (result, *times[:3], transfer), loader)
            transfer = clock() - began
    except ConnectionError:
        pass  # the training process has gone


def _allocate_from(ring: SlotRing, end: socket.socket) -> None:
    """Let `default_collate` write into shared memory, in this process and not in those that the dataset forks."""
    original = torch.UntypedStorage._new_shared
    forking = threading.local()

    def prepare() -> None:
        # A signal to the forked process waits until it has handlers of its own: a Pool ends its processes by SIGTERM.
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        ring.mark_copied()

    def stay() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def leave() -> None:
        torch.UntypedStorage._new_shared = original
        end.close()
        for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is _ignore:
                signal.signal(number, default)
        stay()

    torch.UntypedStorage._new_shared = ring.new_shared
    os.register_at_fork(before=prepare, after_in_parent=stay, after_in_child=leave)


def _ignore(*_: object) -> None:
    """Not SIG_IGN: a program that the dataset starts would inherit that."""


def _where(loader: int) -> str:
    return f"in DataLoader worker process {loader}"


def _load(
    recipe: Recipe, indices: Any, position: int, key: int, host: ShardHost | None, loader: int
) -> tuple[Any, StageTimes]:
    try:
        return recipe.load(indices, position, key, host)
    except Exception:  # noqa: BLE001  # the user's: raised in training
        return ExceptionWrapper(where=_where(loader)), NO_TIMES


def _send(end: socket.socket, ring: SlotRing, packet: transport.Packet, content: tuple[Any, ...], loader: int) -> None:
    """`content`: the batch, or an exception in its place, and the seconds of each stage."""
    result, *times = content
    try:
        payload = encode(content, ring)
    except Exception:  # noqa: BLE001  # a batch, or the class of an exception, that cannot be pickled
        if isinstance(result, ExceptionWrapper):
            failure = ExceptionWrapper((RuntimeError, RuntimeError(result.exc_msg), None), where=_where(loader))
        else:
            failure = ExceptionWrapper(where=_where(loader))
        try:
            payload = encode((failure, *times), ring)
        except Exception:  # noqa: BLE001
            plain = ExceptionWrapper((RuntimeError, RuntimeError(failure.exc_msg), None), where=_where(loader))
            payload = encode((plain, *times), ring)
    _send_slots(end, ring)
    transport.send(end, BATCH, payload, epoch=packet.epoch, number=packet.number)


def _send_slots(end: socket.socket, ring: SlotRing) -> None:
    with ring.lock:
        while ring.announced or ring.retired:
            announced, retired = ring.take_unannounced(MOST_UNANNOUNCED)
            payload = pickle.dumps(([entry[:2] for entry in announced], retired))
            descriptors = [entry[2] for entry in announced]
            try:
                transport.send(end, SLOTS, payload, descriptors=descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
