"""Whether a rank may be forked from the keeper: only if it would then see what a fresh interpreter would give it.

What a process has read at its start or while importing cannot be changed afterwards: interpreter, flags, PYTHON*,
thread counts, TZ, and whatever else a library looks at once. So a rank fits if its command has the keeper's interpreter
and flags, and its environment is the keeper's except for variables known to be read late. Every "no" says why.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder

from torchloom.agent.supervisor.protocol import Begin

LATE = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "PWD", "OLDPWD", "SHLVL", "_",
    "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE",
})  # fmt: skip
LATE_PREFIXES = ("MASTER_", "GLOO_", "NCCL_", "TORCHELASTIC_", "TORCHLOOM_", "SLURM_")
"""Variables that are looked at only when a rank joins its group, or by the script itself."""


@dataclass(frozen=True)
class ParentEnvironment:
    """How the keeper itself was started: what a forked rank inherits and cannot shed."""

    python: str
    flags: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    """sys.path; the entry that depends on the script has been taken out already."""

    @classmethod
    def of_this_process(cls) -> ParentEnvironment:
        """To be asked first of all, before anything else is imported."""
        given = sys.orig_argv
        end = next(place for place, word in enumerate(given) if word in {"-c", "-m"})
        return cls(sys.executable, tuple(given[1:end]), dict(os.environ), os.getcwd(), tuple(sys.path))  # noqa: PTH109


@dataclass(frozen=True)
class Target:
    """What the interpreter is told to run."""

    name: str
    """Path of a script as it was written, or name of a module."""
    module: bool
    arguments: tuple[str, ...]


class ColdStart(Exception):
    """It must be a fresh interpreter, because."""


def fit(begin: Begin, birth: ParentEnvironment) -> Target:
    """What to run in a forked rank, or Cold."""
    target = _target(begin, birth)
    for name in sorted(begin.env.keys() | birth.env.keys()):
        if begin.env.get(name) != birth.env.get(name) and not _read_late(name):
            verb = "lacks" if name not in begin.env else "differs in" if name in birth.env else "adds"
            raise ColdStart(
                f"its environment {verb} {name}, which is read only when an interpreter or a library starts"
            )
    parts = birth.env["PYTHONPATH"].split(os.pathsep) if birth.env.get("PYTHONPATH") else []
    if begin.cwd != birth.cwd and not all(part.startswith("/") for part in parts):
        raise ColdStart("PYTHONPATH has relative parts, and the working folder is another")
    if target.module:
        home = begin.cwd
    else:
        script = os.path.join(begin.cwd, target.name)  # noqa: PTH118
        if script.endswith(".pyc") or pkgutil.get_importer(script) is not None:
            raise ColdStart(f"{target.name} is not a plain script")
        home = os.path.dirname(os.path.realpath(script))  # noqa: PTH120
    if not sys.flags.safe_path:
        for name in _shadowed(home):
            raise ColdStart(f"{home} has a module {name} of its own, and another one is loaded already")
    return target


def _target(begin: Begin, birth: ParentEnvironment) -> Target:
    python, rest = begin.argv[0], begin.argv[1:]
    if python != birth.python:
        raise ColdStart(f"the interpreter is {python}, the keeper's is {birth.python}")
    flags = birth.flags
    if rest[: len(flags)] != flags:
        raise ColdStart(f"the keeper's interpreter was started with the flags {' '.join(flags)}")
    match rest[len(flags) :]:
        case ["-m", module, *arguments]:
            return Target(module, True, tuple(arguments))
        case [script, *arguments] if script and not script.startswith("-"):
            return Target(script, False, tuple(arguments))
        case [("-c" | "-"), *_]:
            raise ColdStart("code that is not in a file")
        case [flag, *_]:
            raise ColdStart(f"the keeper's interpreter was not started with the flag {flag}")
    raise ColdStart("no script is named")


def _read_late(name: str) -> bool:
    return name in LATE or name.startswith(LATE_PREFIXES)


def _shadowed(home: str) -> Iterator[str]:
    """Modules that are loaded, and that a fresh interpreter would have taken from this folder instead."""
    try:
        here = {entry.partition(".")[0] for entry in os.listdir(home)}  # noqa: PTH208
    except OSError:
        return
    for name in sorted(here & sys.modules.keys() - {"__main__"} - set(sys.builtin_module_names)):
        loaded = getattr(sys.modules[name], "__spec__", None)
        found = PathFinder.find_spec(name, [home])
        if found is None or found.loader is None:  # a folder without __init__.py yields to any real module
            continue
        if (
            loaded is None
            or loaded.origin is None
            or os.path.realpath(str(found.origin)) != os.path.realpath(loaded.origin)
        ):
            yield name
