"""How long a step waits: for peers in collectives, for data in a loader. Timed where torch itself waits.

Nothing is asked of the script. Four functions of torch are replaced by ones that look at the clock before and after,
as soon as torch is there and there is something to wait for; they are put back when the last threadlet leaves:

- `Work.wait`, through which collectives wait that are called from Python, the blocking ones too;
- `torch.distributed._broadcast_coalesced`, with which DistributedDataParallel sends buffers before a forward;
- `DistributedDataParallel.forward`, to be told when its backward begins. Its gradients are waited for in C++, at the
  end of backward, by a callback of the autograd engine. Callbacks run in the order in which they were handed in: one
  handed in as backward begins runs just before that, one which that one hands in just after;
- `_BaseDataLoaderIter.__next__`.

Where computing is not done by the processor none of this tells what a rank needed: waiting is then queued on the
device like the rest, and nothing is said. What is missed counts as the rank's own time, on every rank alike: functional
collectives (DTensor) and monitored_barrier, which wait in C++.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from threading import RLock, get_ident
from typing import Any

from torchloom.threadlet.meter import Meter
from torchloom.threadlet.spent import Spent

_DEVICES = ("cuda", "xpu", "npu", "hpu", "mtia")
_OUTPUTS = 8
"""Tensors of a forward's result that are looked at, and things in it that are searched for them."""
_followed: dict[int, Meter] = {}
"""By the thread that trains."""
_replaced: dict[str, Callable[[], None]] = {}
"""What was replaced, with how to put it back; does nothing where that was not possible."""
_since: dict[int, float] = {}
"""By thread, when the wait at the end of a backward began."""
_lock = RLock()


def follow(meter: Meter) -> None:
    """Note in this meter what its thread waits for, as soon as that is possible. Called again and again; never raises.

    On any thread but the one that trains.
    """
    with _lock:
        if not meter.over:
            _follow(meter)


def _follow(meter: Meter) -> None:
    if _followed.get(meter.thread) is not meter:
        _release(meter)
        _followed[meter.thread] = meter
    loaders = sys.modules.get("torch.utils.data.dataloader")
    if loaders is not None:
        _once("loader", lambda: _time(loaders._BaseDataLoaderIter, "__next__", _loading))
    if not _has_peers(meter):
        meter.waits_from = None
        return
    torch = sys.modules["torch"]
    _once("work", lambda: _time(torch._C._distributed_c10d.Work, "wait", _waiting))
    _once("buffers", lambda: _time(torch.distributed, "_broadcast_coalesced", _waiting))
    _once("backward", lambda: _watch_backward(torch))
    if meter.waits_from is None:
        meter.waits_from = meter.count + 1  # the step that is being made may have begun to wait before


def unfollow(meter: Meter) -> None:
    """It has left; when the last has, torch is as it was."""
    with _lock:
        meter.over = True
        _release(meter)
        if not _followed:
            while _replaced:
                _replaced.popitem()[1]()


def forget() -> None:
    """In a forked child: it is not the one that trains, though its thread has the same name."""
    global _lock  # noqa: PLW0603  a thread that is not there any more may hold it
    _lock = RLock()
    _followed.clear()


def _release(meter: Meter) -> None:
    for thread in [thread for thread, followed in _followed.items() if followed is meter]:
        del _followed[thread]


def _has_peers(meter: Meter) -> bool:
    """Whether there is a process group, and its waiting can be timed here."""
    try:
        torch = sys.modules.get("torch")
        groups = sys.modules.get("torch.distributed.distributed_c10d")
        if torch is None or groups is None or not (meter.has_group or groups.is_initialized()):
            return False
        used = [getattr(getattr(torch, name, None), "is_initialized", bool) for name in _DEVICES]
        return not any(is_used() for is_used in used)
    except Exception:  # noqa: BLE001  being imported just now, or another torch
        return False


def _once(what: str, replace: Callable[[], Callable[[], None]]) -> None:
    if what not in _replaced:
        _replaced[what] = lambda: None
        try:
            _replaced[what] = replace()
        except Exception:  # noqa: BLE001  a torch in which it is elsewhere: not known, then
            return


def _waiting(meter: Meter) -> Spent:
    return meter.waiting


def _loading(meter: Meter) -> Spent:
    return meter.loading


def _time(owner: Any, name: str, kind: Callable[[Meter], Spent]) -> Callable[[], None]:
    """Time each call that a training thread makes; what is returned ends that."""
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

    return _replace(owner, name, timed)


def _replace(owner: Any, name: str, new: Any) -> Callable[[], None]:
    old = vars(owner).get(name)  # None: inherited
    setattr(owner, name, new)

    def put_back() -> None:
        if vars(owner).get(name) is new:  # else someone has replaced ours
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    return put_back


class _Backward:
    """The wait at the end of the backward of one forward. Several may end in one backward, which waits once."""

    def __init__(self, meter: Meter, hand_in: Callable[[Callable[[], None]], None]) -> None:
        self._meter = meter
        self._hand_in = hand_in
        self._begun = False

    def begins(self, *_: Any) -> None:
        """Called by the engine, before anything is computed; nothing is returned, so nothing is changed."""
        torch = sys.modules["torch"]
        if self._begun or torch.compiler.is_compiling() or _followed.get(get_ident()) is not self._meter:
            return
        self._begun = True
        try:
            self._hand_in(self._computed)
        except Exception:  # noqa: BLE001  called outside of a backward
            return

    def _computed(self) -> None:
        try:
            self._hand_in(self._reduced)
        except Exception:  # noqa: BLE001  not known, then
            return
        if not self._meter.is_aside:
            _since[get_ident()] = self._meter.clock()

    def _reduced(self) -> None:
        since = _since.pop(get_ident(), None)
        if since is not None:
            self._meter.waiting.add(self._meter.count + 1, self._meter.clock() - since)


def _watch_backward(torch: Any) -> Callable[[], None]:
    """Be told of each backward of a DistributedDataParallel; what is returned ends that."""
    owner = torch.nn.parallel.DistributedDataParallel
    call = owner.forward
    hand_in = torch.autograd.Variable._execution_engine.queue_callback

    @functools.wraps(call)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if torch.compiler.is_compiling():  # what is being compiled must not have us in it
            return result
        meter = _followed.get(get_ident())
        if meter is not None:
            try:
                backward = _Backward(meter, hand_in)
                for node in _nodes(result, torch.Tensor):
                    node.register_prehook(backward.begins)
            except Exception:  # noqa: BLE001  this backward is not known, then
                return result
        return result

    return _replace(owner, "forward", forward)


def _nodes(result: Any, tensor: type) -> Iterator[Any]:
    """Where backward may enter the graph of a result: a tensor, or things that hold some."""
    seen, found = [result], 0
    for thing in seen:
        if isinstance(thing, tensor):
            node = getattr(thing, "grad_fn", None)
            if node is not None:
                yield node
                found += 1
        elif len(seen) < _OUTPUTS:
            inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
            seen.extend(list(inner)[:_OUTPUTS])
        if found >= _OUTPUTS:
            return
