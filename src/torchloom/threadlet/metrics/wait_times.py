"""Measures how long a step waits: for peers in collectives, for data in a loader.

The script need not be changed. Four functions of torch are replaced by timed ones, as soon as torch is imported and
there is something to wait for; they are restored when the last threadlet leaves:

- `Work.wait`, in which collectives called from Python wait, the blocking ones too;
- `torch.distributed._broadcast_coalesced`, with which DistributedDataParallel sends buffers before a forward;
- `DistributedDataParallel.forward`, to learn when its backward starts. The wait for its gradients is in C++, at the
  end of backward, in a callback of the autograd engine. Callbacks run in the order in which they were queued: one
  queued as backward starts runs just before that wait, and one that this callback queues runs just after it;
- `_BaseDataLoaderIter.__next__`, and the same of ElasticLoader.

On accelerators this says nothing about a rank's own work, because waiting is queued on the device like everything else;
there nothing is measured. Functional collectives (DTensor) and monitored_barrier wait in C++ and are not seen: their
time counts as the rank's own, on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from threading import RLock, get_ident
from typing import Any

from torchloom.threadlet.metrics.meter import Meter, StepTimeRing

_DEVICES = ("cuda", "xpu", "npu", "hpu", "mtia")
_OUTPUTS = 8
"""Most tensors of a forward's result that are examined, and most containers in it that are searched for them."""
_followed: dict[int, Meter] = {}
"""By training thread."""
_replaced: dict[str, Callable[[], None]] = {}
"""What was replaced, with the function that restores it; that does nothing if replacing failed."""
_since: dict[int, float] = {}
"""By thread, when the wait at the end of a backward started."""
_lock = RLock()


def follow(meter: Meter) -> None:
    """Measure the waits of the meter's thread, as soon as that is possible. Called repeatedly; never raises.

    To be called on any thread but the training thread.
    """
    with _lock:
        if meter.over:
            return
        if _followed.get(meter.thread) is not meter:
            _release(meter)
            _followed[meter.thread] = meter
        loaders = sys.modules.get("torch.utils.data.dataloader")
        if loaders is not None:
            _once("loader", lambda: _time(loaders._BaseDataLoaderIter, "__next__", attrgetter("loading")))
        elastic = sys.modules.get("torchloom.data.epoch_iterator")
        if elastic is not None:
            _once("elastic", lambda: _time(elastic.EpochIterator, "__next__", attrgetter("loading")))
        if not _has_peers(meter):
            meter.waits_from = None
            return
        torch = sys.modules["torch"]
        _once("work", lambda: _time(torch._C._distributed_c10d.Work, "wait", attrgetter("waiting")))
        _once("buffers", lambda: _time(torch.distributed, "_broadcast_coalesced", attrgetter("waiting")))
        _once("backward", lambda: _watch_backward(torch))
        if meter.waits_from is None:
            meter.waits_from = meter.count + 1  # the current step may have waited before


def unfollow(meter: Meter) -> None:
    """Stop measuring; with the last meter, torch's functions are restored."""
    with _lock:
        meter.over = True
        _release(meter)
        if not _followed:
            while _replaced:
                _replaced.popitem()[1]()


def forget() -> None:
    """In a forked child: it is not the rank, though its thread has the same id."""
    global _lock  # noqa: PLW0603  a thread that does not exist in the child may hold it
    _lock = RLock()
    _followed.clear()


def _release(meter: Meter) -> None:
    for thread in [thread for thread, followed in _followed.items() if followed is meter]:
        del _followed[thread]


def _has_peers(meter: Meter) -> bool:
    """Whether there is a process group whose waits can be measured here."""
    torch = sys.modules.get("torch")
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # torch is being imported, or is another version
        if torch is not None and groups is not None and (meter.has_group or groups.is_initialized()):
            used = [getattr(getattr(torch, name, None), "is_initialized", bool) for name in _DEVICES]
            return not any(is_used() for is_used in used)
    return False


def _once(what: str, replace: Callable[[], Callable[[], None]]) -> None:
    if what not in _replaced:
        _replaced[what] = lambda: None
        with contextlib.suppress(Exception):  # another version of torch: this wait is not measured
            _replaced[what] = replace()


def _time(owner: Any, name: str, kind: Callable[[Meter], StepTimeRing]) -> Callable[[], None]:
    """Time each call of a training thread; returns a function that undoes this."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        meter = _followed.get(get_ident())
        if meter is None or meter.is_aside:
            return call(*args, **kwargs)
        began = meter.clock()
        try:
            meter.is_aside = True
            return call(*args, **kwargs)
        finally:
            meter.is_aside = False
            kind(meter).add(meter.count + 1, meter.clock() - began)

    return replace_attribute(owner, name, timed)


def replace_attribute(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Returns a function that undoes this."""
    old = vars(owner).get(name)  # None: inherited
    setattr(owner, name, new)

    def put_back() -> None:
        if vars(owner).get(name) is new:  # otherwise another library has replaced it since
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    return put_back


class _Backward:
    """The wait at the end of the backward of one forward. Several forwards may share one backward, which waits once."""

    def __init__(self, meter: Meter, hand_in: Callable[[Callable[[], None]], None]) -> None:
        self._meter = meter
        self._hand_in = hand_in
        self._begun = False

    def begins(self, *_: Any) -> None:
        """Called by the engine before it computes anything; returns None, so that nothing is changed."""
        torch = sys.modules["torch"]
        if self._begun or torch.compiler.is_compiling() or _followed.get(get_ident()) is not self._meter:
            return
        self._begun = True
        with contextlib.suppress(Exception):  # called outside of a backward
            self._hand_in(self._computed)

    def _computed(self) -> None:
        try:
            self._hand_in(self._reduced)
        except Exception:  # noqa: BLE001  this wait is not measured
            return
        if not self._meter.is_aside:
            _since[get_ident()] = self._meter.clock()

    def _reduced(self) -> None:
        since = _since.pop(get_ident(), None)
        if since is not None:
            self._meter.waiting.add(self._meter.count + 1, self._meter.clock() - since)


def _watch_backward(torch: Any) -> Callable[[], None]:
    """Observe each backward of a DistributedDataParallel; returns a function that undoes this."""
    owner = torch.nn.parallel.DistributedDataParallel
    call = owner.forward
    hand_in = torch.autograd.Variable._execution_engine.queue_callback

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if torch.compiler.is_compiling():  # keep this hook out of compiled graphs
            return result
        meter = _followed.get(get_ident())
        if meter is not None:
            with contextlib.suppress(Exception):  # this backward is not measured
                backward = _Backward(meter, hand_in)
                for node in _nodes(result, torch.Tensor):
                    node.register_prehook(backward.begins)
        return result

    return replace_attribute(owner, "forward", forward)


def _nodes(result: Any, tensor: type) -> Iterator[Any]:
    """The nodes at which backward may enter the graph of a result: a tensor, or containers of tensors."""
    values, count = [result], 0
    for value in values:
        if isinstance(value, tensor):
            node = getattr(value, "grad_fn", None)
            if node is not None:
                yield node
                count += 1
        elif len(values) < _OUTPUTS:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            values.extend(list(inner)[:_OUTPUTS])
        if count >= _OUTPUTS:
            return
