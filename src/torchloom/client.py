"""The same verbs from Python: look at what trains, and steer it.

    with torchloom.Client() as loom:
        loom.set("mnist", lr=3e-4)          # on all ranks at one step; the answer says at which
        loom.checkpoint("mnist")

`AsyncClient` has the same methods to await. A client connects at its first call and outlives a restart of the control
plane: what nobody answers is sent again until the timeout, always under the same request, so it is done once. What is
refused raises `Refused`, a value that a knob cannot take `BadInput`, and no answer `Unreachable`.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Self, TypeVar
from uuid import uuid4

import msgspec

from torchloom import knob_validation
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import BadInput, Refused
from torchloom.protocol import operator as asks
from torchloom.protocol.codec import decode_ask, encode
from torchloom.protocol.ids import check_name
from torchloom.protocol.operator import Ask, Done
from torchloom.protocol.rank import KnobSpec, Value
from torchloom.protocol.scheduling import (
    ObjectiveName,
    PolicyName,
    PredictionView,
    QueryPrediction,
    QuerySchedule,
    ScheduleView,
)
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import ChangeView, CheckpointsView, ClusterView, JobView, KnobsView
from torchloom.settings import Settings
from torchloom.shared.suggestions import did_you_mean, unknown

P = ParamSpec("P")
T = TypeVar("T")
Verb = Literal["pause", "resume", "stop", "checkpoint", "kill", "stacks"]
TIMEOUT = 30.0
"""Seconds until an answer is no longer waited for."""


class Target(NamedTuple):
    """The target of a command: a job, one of its replicas, or one rank."""

    job: str
    replica: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return "/".join(str(part) for part in self if part is not None)


def parse_target(text: str) -> Target:
    """`JOB`, `JOB/REPLICA` or `JOB/REPLICA/RANK`."""
    job, *rest = text.split("/")
    if len(rest) > 2 or (len(rest) == 2 and not rest[1].isdecimal()):
        raise BadInput(f"{text!r} is not a target", hint="write JOB, JOB/REPLICA or JOB/REPLICA/RANK")
    replica = check_name("replica", rest[0]) if rest else None
    return Target(check_name("job", job), replica, int(rest[1]) if len(rest) == 2 else None)


def operator() -> str:
    """Who asks, as the log will say."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


class AsyncClient:
    def __init__(
        self,
        settings: Settings | None = None,
        *,
        role: str = Role.OPERATOR,
        timeout: float = TIMEOUT,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """As what the environment says, unless told otherwise. `on_wait` is called when an answer is late."""
        self.timeout = timeout
        self.operator = operator()
        self._asking = WeaverClient(settings or Settings.from_env(), Role(role), patience=timeout, on_wait=on_wait)
        self._open = AsyncExitStack()
        self._connected: WeaverClient | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._weaver()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._connected = None
        await self._open.aclose()

    # ── looking ──

    async def status(self, job: str | None = None) -> ClusterView:
        """Everything, or what belongs to one job."""
        return await (await self._weaver()).cluster(None if job is None else check_name("job", job))

    async def jobs(self) -> tuple[JobView, ...]:
        return (await (await self._weaver()).cluster(most=0)).jobs

    async def knobs(self, job: str) -> KnobsView:
        """What may be changed in a job, its values now, and every change made."""
        view = await (await self._weaver()).knobs(check_name("job", job))
        if not view.knobs and not view.changes:
            await self._check_job(job)
        return view

    async def changes(self, job: str) -> tuple[ChangeView, ...]:
        """Newest first."""
        return (await self.knobs(job)).changes

    async def checkpoints(self, job: str) -> CheckpointsView:
        """What a job has reported about its checkpoints: the latest, the last failure, where it resumed."""
        view = await (await self._weaver()).checkpoints(check_name("job", job))
        if view == CheckpointsView(job=job):
            await self._check_job(job)
        return view

    async def _check_job(self, job: str) -> None:
        """Nothing is known about it: perhaps because there is no such job."""
        names = [view.job for view in await self.jobs()]
        if job not in names:
            raise unknown("job", job, names)

    # ── changing ──

    async def set(
        self,
        job: str,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        replica: str | None = None,
        rank: int | None = None,
        at_step: int | None = None,
        over: int = 0,
        keep_global_batch: bool = False,
        lr_rule: asks.LrRule = "none",
        dry_run: bool = False,
        wait: bool = True,
        typed: bool = False,
        **knobs: Any,
    ) -> Done:
        """Change knobs on all ranks at one step, or on none. A knob whose name is not a keyword stands in `values`.

        With a new `batch_size`, `keep_global_batch` changes the accumulation too, so that a step has as many samples as
        before, and `lr_rule` scales learning rates with the samples in a step.
        With `typed` the values are texts that a person typed.
        """
        given = {**(values or {}), **knobs}
        wanted: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        if not wanted:
            raise BadInput("there is nothing to set", hint=f"`loom knobs {job}` lists what may be changed")
        if rank is not None and replica is None:
            raise BadInput(f"rank {rank} of which replica?", hint="give replica too")
        specs, check = await self._specs(job, wanted), knob_validation.parse if typed else knob_validation.check
        checked = {name: check(specs[name], value) for name, value in wanted.items()}
        return await self._ask(
            asks.SetKnobs(
                request=uuid4().hex,
                job=job,
                values=checked,
                replica=replica,
                rank=rank,
                at_step=at_step,
                over=over,
                keep_global_batch=keep_global_batch,
                lr_rule=lr_rule,
                dry_run=dry_run,
                wait=wait,
            )
        )

    async def parse(self, job: str, texts: Mapping[str, str]) -> dict[str, Value]:
        """The values that a person typed for some knobs of a job."""
        specs = await self._specs(job, texts)
        return {name: knob_validation.parse(specs[name], text) for name, text in texts.items()}

    async def revert(self, job: str, change: str) -> Done:
        """The values that a change found come back."""
        check_name("job", job)
        check_name("change", change)
        return await self._ask(asks.Revert(request=uuid4().hex, job=job, change=change))

    async def annotate(self, job: str, text: str) -> Done:
        """Add a note to a job; `loom events`, `loom why` and `loom curves` show it."""
        check_name("job", job)
        return await self._ask(asks.Annotate(request=uuid4().hex, job=job, text=text))

    # ── steering: a target is written JOB, JOB/REPLICA or JOB/REPLICA/RANK ──

    async def pause(self, target: str, *, release: bool = False) -> Done:
        """Training stands still, and keeps its devices. With `release` a whole job saves, ends, and gives them back."""
        if not release:
            return await self._steer("pause", target)
        job, replica, _ = parse_target(target)
        if replica is not None:
            raise BadInput(f"{target!r} is not a job", hint="a whole job is released: write JOB")
        return await self._ask(asks.Release(request=uuid4().hex, job=job))

    async def resume(self, target: str) -> Done:
        """Continue what is paused; a job that was released starts again from its checkpoint when there is room."""
        return await self._steer("resume", target)

    async def stop(self, target: str) -> Done:
        """The loop ends cleanly, on all ranks after the same step."""
        return await self._steer("stop", target)

    async def checkpoint(self, target: str) -> Done:
        """Save now; the results say where."""
        return await self._steer("checkpoint", target)

    async def kill(self, target: str) -> Done:
        """End the processes without asking them."""
        return await self._steer("kill", target)

    async def evict(self, target: str) -> Done:
        """JOB/REPLICA, under torchft: end it at once, while the others continue without it; then restart it."""
        job, replica, rank = parse_target(target)
        if replica is None or rank is not None:
            raise BadInput(f"{target!r} is not a replica", hint="write JOB/REPLICA; `loom map` lists them")
        return await self._ask(asks.EvictReplica(job=job, replica=replica))

    async def stacks(self, target: str) -> Done:
        """Where every thread of every rank is; the results hold the text."""
        return await self._steer("stacks", target)

    # ── loaders ──

    async def schedule(self) -> ScheduleView:
        """Which loaders each job has, and by which rules."""
        return await (await self._weaver()).look(QuerySchedule(), ScheduleView)

    async def predict(self, job: str) -> PredictionView:
        """The throughput of a job with other numbers of loaders."""
        return await (await self._weaver()).look(QueryPrediction(job=check_name("job", job)), PredictionView)

    async def set_schedule(
        self,
        policy: PolicyName | None = None,
        *,
        objective: ObjectiveName | None = None,
        budgets: Mapping[str, int | None] | None = None,
    ) -> Done:
        """Change by which rules loaders are allocated; the budget None of a node is what its agent says."""
        return await self._ask(asks.SetSchedule(policy=policy, objective=objective, budgets=dict(budgets or {})))

    # ── devices ──

    async def fail(self, device: str, cause: str = "unspecified") -> Done:
        check_name("device", device)
        return await self._ask(asks.Fail(device=device, cause=cause[:2000]))

    async def recover(self, device: str) -> Done:
        return await self._ask(asks.Recover(device=check_name("device", device)))

    async def register(self, device: str, job: str, replica: str) -> Done:
        check_name("device", device)
        check_name("job", job)
        check_name("replica", replica)
        return await self._ask(asks.Register(device=device, job=job, replica=replica))

    # ── how ──

    async def _weaver(self) -> WeaverClient:
        async with self._connecting:
            if self._connected is None:
                self._connected = await self._open.enter_async_context(self._asking)
            return self._connected

    async def _specs(self, job: str, names: Mapping[str, object]) -> dict[str, KnobSpec]:
        offered = {knob.spec.name: knob.spec for knob in (await self.knobs(job)).knobs}
        for name in names:
            if name not in offered:
                hint = did_you_mean(name, sorted(offered)) or f"it offers {len(offered) or 'no'} knobs"
                if name == knob_validation.BATCH_SIZE and knob_validation.LOADERS in offered:
                    # A loader makes the one known by itself, the other only through watch().
                    hint = "call loom.watch(loader) in the script to offer it"
                raise Refused(f"job {job} has no knob {name}", hint=hint)
        return offered

    async def _steer(self, verb: Verb, target: str) -> Done:
        job, replica, rank = parse_target(target)
        return await self._ask(asks.Steer(request=uuid4().hex, verb=verb, job=job, replica=replica, rank=rank))

    async def _ask(self, ask: Ask) -> Done:
        ask = msgspec.structs.replace(ask, operator=self.operator)
        if isinstance(ask, (asks.SetKnobs, asks.Revert, asks.Steer)):
            # It is answered before we stop waiting, if it is certain by then.
            ask = msgspec.structs.replace(ask, patience=max(0.3, min(10.0, 0.6 * self.timeout)))
        try:
            decode_ask(encode(ask))  # the check at the weaver's door, before anything is sent
        except msgspec.MsgspecError as error:
            raise BadInput(f"this cannot be asked: {error}") from None
        return await (await self._weaver()).ask(ask, self.timeout)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Make a method of `Client` that waits for the method of `AsyncClient`."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait_for(method(self._client, *args, **kwargs))

    return call


class Client:
    """The methods of `AsyncClient` for code that does not await. The connection runs on a thread of the client."""

    def __init__(
        self, settings: Settings | None = None, *, role: str = Role.OPERATOR, timeout: float = TIMEOUT
    ) -> None:
        self._client = AsyncClient(settings, role=role, timeout=timeout)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        self._wait_for(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        loop = self._loop
        try:
            self._wait_for(self._client.close())
        finally:
            self._loop = None
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    status = _blocking(AsyncClient.status)
    jobs = _blocking(AsyncClient.jobs)
    knobs = _blocking(AsyncClient.knobs)
    changes = _blocking(AsyncClient.changes)
    checkpoints = _blocking(AsyncClient.checkpoints)
    set = _blocking(AsyncClient.set)
    parse = _blocking(AsyncClient.parse)
    revert = _blocking(AsyncClient.revert)
    annotate = _blocking(AsyncClient.annotate)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    stop = _blocking(AsyncClient.stop)
    checkpoint = _blocking(AsyncClient.checkpoint)
    kill = _blocking(AsyncClient.kill)
    evict = _blocking(AsyncClient.evict)
    stacks = _blocking(AsyncClient.stacks)
    schedule = _blocking(AsyncClient.schedule)
    predict = _blocking(AsyncClient.predict)
    set_schedule = _blocking(AsyncClient.set_schedule)
    fail = _blocking(AsyncClient.fail)
    recover = _blocking(AsyncClient.recover)
    register = _blocking(AsyncClient.register)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="torchloom client", daemon=True)
                self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: nobody waits for it any more
            future.cancel()
            raise
