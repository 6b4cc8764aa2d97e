"""A replica of real torchft parts whose steps a test makes one by one, each replica on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torchloom
from torchloom.settings import Settings
from torchloom.threadlet.threadlet import Threadlet

JOB = "job"


class Replica:
    ranks = 1

    def __init__(self, lighthouse: str, name: str, settings: Settings | None, store: Any = None) -> None:
        """Without settings it runs without torchLoom; with the store of another it is the second rank of that one."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.loom: Threadlet
        self.manager: Any
        self.weight = 0.0
        self.values: dict[int, Any] = {}
        """The value of the knob x with which each committed step was made."""
        self._store = store
        self._begun = self._pool.submit(self._begin, lighthouse, name, settings)
        self._begun.result(60)

    def _begin(self, lighthouse: str, name: str, settings: Settings | None) -> None:
        from torch.distributed import TCPStore
        from torchft import Manager, ProcessGroupGloo

        rank, timeout = int(self._store is not None), timedelta(seconds=20)
        self._store = self._store or TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=lambda state: setattr(self, "weight", state["weight"]),
            state_dict=lambda: {"weight": self.weight},
            min_replica_size=1,
            replica_id=name,
            lighthouse_addr=lighthouse,
            store_addr="localhost",
            store_port=self._store.port,
            rank=rank,
            world_size=self.ranks,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
        )
        if settings is not None:
            self.loom = torchloom.attach_manager(self.manager, JOB, settings=settings)
            self.life = self.loom.incarnation
            self.x = self.loom.knob("x", 0.0)

    def begin(
        self,
        fail: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> Future[bool]:
        """Try a step: with `fail` it reports an error; `meanwhile` runs before the exchange, `after` after it."""
        return self._pool.submit(self._attempt, fail, meanwhile, after)

    def attempt(self, fail: bool = False) -> bool:
        return self.begin(fail).result(60)

    def do(self, work: Callable[[], Any]) -> Any:
        """On the thread that trains."""
        return self._pool.submit(work).result(60)

    def _attempt(self, fail: bool, meanwhile: Callable[[], object], after: Callable[[], object]) -> bool:
        import torch

        self.manager.start_quorum()
        gradient = torch.ones(4)
        meanwhile()
        self.manager.allreduce(gradient).wait()
        after()
        if fail:
            self.manager.report_error(RuntimeError("a bad gradient"))
        committed = bool(self.manager.should_commit())
        if committed:
            self.weight += float(gradient[0])
            self.values[self.manager.current_step()] = self.x.value if hasattr(self, "x") else None
        return committed

    def end(self) -> None:
        if hasattr(self, "loom"):
            self.do(self.loom.close)
        self.manager.shutdown(wait=False)
        self._pool.shutdown(wait=False, cancel_futures=True)


def joined(there: Replica, newcomer: Replica, **how: Any) -> None:
    """Let one that begins catch up: the other makes steps until the newcomer is part of one."""
    beginning = newcomer.begin(**how)
    while not there.manager._pg._pg or there.manager._pg._pg.size() < 2:
        there.attempt()
    beginning.result(60)


def together(*replicas: Replica, fails: Replica | None = None) -> list[bool]:
    """One step that all of them try."""
    trying = [replica.begin(fail=replica is fails) for replica in replicas]
    return [attempt.result(60) for attempt in trying]
