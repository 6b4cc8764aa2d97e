"""The state that a script passes to save(): a mapping of names to live objects (model, optimizer) or plain values.

Objects with a `state_dict` are saved and loaded through it. Everything is checked before anything is loaded, so that a
checkpoint of another model changes nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch

from torchloom.errors import BadInput, BadState

_ADDED = {"initial_lr", "param_names"}
"""Keys that schedulers and named parameters add to the groups of an optimizer."""


def is_live(value: Any) -> bool:
    """Whether it has a state_dict that can be read at any time."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_names(state: Any) -> None:
    if not isinstance(state, Mapping) or not state:
        raise BadInput(
            "the state is empty" if isinstance(state, Mapping) else f"the state is a {type(state).__name__}",
            hint='pass a dict: {"model": model, "optimizer": optimizer}',
        )
    for name in state:
        if not isinstance(name, str) or not name:
            raise BadInput(f"{name!r} is not a name for a part of the state", hint="name each part with a text")


def gather(state: Mapping[str, Any]) -> dict[str, Any]:
    """The current state of every part, without wrappers such as DistributedDataParallel."""
    return {name: unwrap(value).state_dict() if is_live(value) else value for name, value in state.items()}


def unwrap(value: Any) -> Any:
    """The module inside DistributedDataParallel: its parameter names do not depend on the number of ranks."""
    if type(value).__name__ == "DistributedDataParallel" and isinstance(value, torch.nn.Module):
        return value.module
    return value


def check_parts(saved: Iterable[str], needed: Iterable[str], strict: bool, where: str) -> tuple[list[str], list[str]]:
    """Check that a checkpoint has exactly the parts to load; if not strict, return the missing and the extra ones."""
    saved, needed = set(saved), set(needed)
    missing, extra = sorted(needed - saved), sorted(saved - needed)
    if strict and (missing or extra):
        differences = [f"it has no {', '.join(missing)}"] if missing else []
        differences += [f"nothing was given for {', '.join(extra)}"] if extra else []
        raise BadState(f"{where}: {'; '.join(differences)}", hint="strict=False takes what there is")
    if needed and not saved & needed:
        raise _misfit(f"{where} has none of {', '.join(sorted(needed))}")
    return missing, extra


def _misfit(problem: str) -> BadState:
    return BadState(problem, hint="nothing was loaded")


def check_fit(state: Mapping[str, Any], saved: Mapping[str, Any], strict: bool, where: str) -> None:
    """Raise BadState if a part cannot load what was saved for it, as far as that can be checked beforehand."""
    check_parts(saved, state, strict, where)
    for name in state:
        if name in saved:
            _check_fit(name, unwrap(state[name]), saved[name], strict, where)


def give(state: Mapping[str, Any], saved: Mapping[str, Any], strict: bool, where: str) -> ExitStack:
    """Load every part, or raise BadState and leave everything unchanged; closing the result undoes what can be."""
    check_fit(state, saved, strict, where)
    names = [name for name in state if name in saved]
    with ExitStack() as undo:
        for name in sorted(names, key=lambda name: is_large(state[name])):  # parts that can be undone come first
            try:
                _load_part(state, name, saved[name], strict, undo)
            except BadState:
                raise
            except Exception as error:
                raise _misfit(f"{where}: {name} does not take what was saved: {error}") from error
        return undo.pop_all()


def _load_part(state: Mapping[str, Any], name: str, saved: Any, strict: bool, undo: ExitStack) -> None:
    part = unwrap(state[name])
    if isinstance(part, torch.nn.Module):
        part.load_state_dict(saved, strict=strict)
    elif is_live(part):
        if not is_large(part):
            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
        part.load_state_dict(saved)
    elif isinstance(part, torch.Tensor) and isinstance(saved, torch.Tensor):
        undo.callback(_set, part, part.detach().clone())
        _set(part, saved)
    elif isinstance(state, MutableMapping):
        undo.callback(state.update, {name: state[name]})
        state[name] = saved
    else:
        raise unwritable(name)


def unwritable(name: str) -> BadState:
    return BadState(f"{name} is a plain value and the state cannot be written to", hint="pass a dict")


def fill_in(part: Any, saved: Any) -> Any:
    """The new value of a plain part: a tensor of the same shape stays the same tensor."""
    if isinstance(part, torch.Tensor) and isinstance(saved, torch.Tensor) and part.shape == saved.shape:
        _set(part, saved)
        return part
    return saved


def _set(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(saved)


def is_large(part: Any) -> bool:
    """Whether it belongs to the job rather than to a rank, and is too large to be copied for an undo."""
    return isinstance(part, (torch.nn.Module, torch.optim.Optimizer))


def _check_fit(name: str, part: Any, saved: Any, strict: bool, where: str) -> None:
    if isinstance(part, torch.nn.Module):
        _check_module(name, part.state_dict(), saved, strict, where)
    elif isinstance(part, torch.optim.Optimizer):
        groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
        shape = [len(group["params"]) for group in part.param_groups]
        if not isinstance(groups, list) or [len(group["params"]) for group in groups] != shape:
            raise _misfit(f"{where}: {name} was saved with other parameter groups")
        mine, theirs = (set().union(*map(dict.keys, each)) - _ADDED for each in (part.param_groups, groups))
        if strict and mine - theirs and theirs - mine:
            raise _misfit(f"{where}: {name} was another kind of optimizer: it has no {min(mine - theirs)}")
    elif isinstance(part, torch.Tensor) and (not isinstance(saved, torch.Tensor) or saved.shape != part.shape):
        raise _misfit(f"{where}: {name} was saved with another shape")


def _check_module(name: str, own: Mapping[str, Any], saved: Any, strict: bool, where: str) -> None:
    if not isinstance(saved, Mapping):
        raise _misfit(f"{where}: {name} was saved as something else than a module")
    if strict and own.keys() != saved.keys():
        missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        differences = f"{(missing or extra)[0]} is {'missing' if missing else 'not in this model'}"
        raise BadState(
            f"{where}: {name} is another model: {differences}", hint="strict=False takes what fits; nothing was loaded"
        )
    for key in own:
        mine, theirs = own[key], saved.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape != theirs.shape:
            shapes = f"{tuple(theirs.shape)} there and {tuple(mine.shape)} here"
            raise _misfit(f"{where}: {name}.{key} has shape {shapes}")


def is_sharded(state: Mapping[str, Any]) -> bool:
    """Whether it contains tensors that are sharded over ranks, even over a single one."""
    modules = [part for part in state.values() if isinstance(part, torch.nn.Module)]
    if any(type(module).__name__ == "FullyShardedDataParallel" for part in modules for module in part.modules()):
        return True
    tensors = sys.modules.get("torch.distributed.tensor")  # if it is not imported there are none
    if tensors is None:
        return False
    parameters = (parameter for module in modules for parameter in module.parameters())
    return any(isinstance(p, tensors.DTensor) for p in parameters) or _holds(state, tensors.DTensor)


def _holds(value: Any, kind: type) -> bool:
    return any(_holds(item, kind) for item in value.values()) if isinstance(value, Mapping) else isinstance(value, kind)
