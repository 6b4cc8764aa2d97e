"""Ranks forked from a supervisor: whether that is possible, and how the fork becomes like a fresh interpreter.

The script runs in the real `__main__`, where multiprocessing and pickle look for it. It ends as Python ends: an
exception goes up to the interpreter, which prints it, joins the threads, runs the atexit functions, flushes, and gives
the exit status. That is why the supervisor unwinds its whole stack in the child before it calls `run`.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader
from types import CodeType, TracebackType
from typing import Any

from torchloom.agent.supervisor.protocol import Begin
from torchloom.integrations.torchft import rendezvous_store
from torchloom.protocol.phrase import Prose, phrase
from torchloom.threadlet import unattached

LATE = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "PWD", "OLDPWD", "SHLVL", "_",
    "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE",
})  # fmt: skip
LATE_PREFIXES = ("MASTER_", "GLOO_", "NCCL_", "TORCHELASTIC_", "TORCHLOOM_", "SLURM_")
"""Variables that are looked at only when a rank joins its group, or by the script itself."""


@dataclass(frozen=True)
class ParentEnvironment:
    """How the supervisor itself was started: what a forked rank inherits and cannot shed."""

    python: str
    env: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    """sys.path; the entry that depends on the script has been taken out already."""

    @classmethod
    def of_this_process(cls) -> ParentEnvironment:
        """To be asked first of all, before anything else is imported."""
        return cls(sys.executable, dict(os.environ), os.getcwd(), tuple(sys.path))  # noqa: PTH109


@dataclass(frozen=True)
class Target:
    """What the interpreter runs."""

    name: str
    """Path of a script as it was written, or name of a module."""
    module: bool
    arguments: tuple[str, ...]


class ColdStart(Exception):
    """The rank must be a fresh interpreter. `why` is empty if that was asked for."""

    def __init__(self, why: Prose) -> None:
        self.why = why


def fit(begin: Begin, birth: ParentEnvironment) -> Target:
    """What to run in a forked rank, or Cold."""
    target = _target(begin, birth)
    for name in sorted(begin.env.keys() | birth.env.keys()):
        late = name in LATE or name.startswith(LATE_PREFIXES)
        if begin.env.get(name) != birth.env.get(name) and not late:
            if name not in begin.env:
                raise ColdStart(phrase("environment_lacks", name=name))
            raise ColdStart(phrase("environment_differs" if name in birth.env else "environment_adds", name=name))
    parts = birth.env["PYTHONPATH"].split(os.pathsep) if birth.env.get("PYTHONPATH") else []
    if begin.cwd != birth.cwd and not all(part.startswith("/") for part in parts):
        raise ColdStart(phrase("relative_pythonpath"))
    if target.module:
        home = begin.cwd
    else:
        script = os.path.join(begin.cwd, target.name)  # noqa: PTH118
        if script.endswith(".pyc") or pkgutil.get_importer(script) is not None:
            raise ColdStart(phrase("not_a_plain_script", script=target.name))
        home = os.path.dirname(os.path.realpath(script))  # noqa: PTH120
    if not sys.flags.safe_path:
        for name in _shadowed(home):
            raise ColdStart(phrase("module_shadowed", folder=home, module=name))
    return target


def _target(begin: Begin, birth: ParentEnvironment) -> Target:
    python, rest = begin.argv[0], begin.argv[1:]
    if python != birth.python:
        raise ColdStart(phrase("other_interpreter", python=python, own=birth.python))
    match rest:
        case ["-m", module, *arguments]:
            return Target(module, True, tuple(arguments))
        case [script, *arguments] if script and not script.startswith("-"):
            return Target(script, False, tuple(arguments))
        case [("-c" | "-"), *_]:
            raise ColdStart(phrase("code_without_file"))
        case [flag, *_]:
            raise ColdStart(phrase("flag_missing", flag=flag))
    raise ColdStart(phrase("no_script_named"))


def _shadowed(home: str) -> Iterator[str]:
    """Modules that are loaded, and that a fresh interpreter would have taken from this folder instead."""
    try:
        here = {entry.partition(".")[0] for entry in os.listdir(home)}  # noqa: PTH208
    except OSError:
        return
    for name in sorted(here & sys.modules.keys() - {"__main__"} - set(sys.builtin_module_names)):
        loaded = getattr(sys.modules[name], "__spec__", None)
        local = PathFinder.find_spec(name, [home])
        if local is None or local.loader is None:  # a folder without __init__.py yields to any real module
            continue
        origin = loaded.origin if loaded is not None else None
        if origin is None or os.path.realpath(str(local.origin)) != os.path.realpath(origin):
            yield name


NO_SUCH_SCRIPT = 2
SUPERVISOR_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
"""Those for which the supervisor has handlers."""
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""Every interpreter ignores them from its start. What else is ignored, the supervisor ignores or has inherited so."""


def prepare(begin: Begin, target: Target, birth: ParentEnvironment) -> None:
    """Everything a new interpreter would have, and that a fork has not. Runs in the rank's working folder."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        ignored = signal.getsignal(number) is signal.SIG_IGN and number not in PYTHON_IGNORES
        if ignored or number in SUPERVISOR_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(begin.env)
    sys.argv = ["-m" if target.module else target.name, *target.arguments]
    sys.orig_argv = list(begin.argv)
    first = os.getcwd() if target.module else os.path.dirname(os.path.realpath(target.name))  # noqa: PTH109, PTH120
    sys.path = [*([] if sys.flags.safe_path else [first]), *birth.path]
    importlib.invalidate_caches()
    atexit.register(gc.unfreeze)  # or what the script hangs into a preloaded module would never be finalised
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]  # as for any file
    _other_chance()
    if "TORCHLOOM_LAUNCHER" in begin.env:  # as startup/sitecustomize.py does in a fresh interpreter
        unattached.install()
        rendezvous_store.install()


def run(target: Target) -> None:
    """The rank's whole life. Raises what the script raises, to be called where nothing catches it."""
    scope = sys.modules["__main__"].__dict__
    scope.clear()
    scope |= {
        "__name__": "__main__", "__doc__": None, "__package__": None, "__spec__": None, "__annotations__": {},
        "__loader__": BuiltinImporter, "__builtins__": builtins,
    }  # fmt: skip
    try:
        if target.module:
            runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            exec(_compiled(target.name, scope), scope)
    except SystemExit:
        raise
    except BaseException as error:
        _hide_ourselves(error)
        raise


def _compiled(script: str, scope: dict[str, Any]) -> CodeType:
    file = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118  and not normalised: as Python does
    try:
        with open(file, "rb") as opened:  # noqa: PTH123
            source = opened.read()
    except OSError as error:  # as Python says it
        print(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(NO_SUCH_SCRIPT)
    scope |= {"__file__": file, "__cached__": None, "__loader__": SourceFileLoader("__main__", file)}
    return compile(source, file, "exec", dont_inherit=True)


def _other_chance() -> None:
    """Two forks of one process must not draw the same numbers, nor know each other's secret."""
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109
        process.current_process().authkey = os.urandom(32)
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # of the CPU; a fresh CUDA generator has the same seed in every process


def _hide_ourselves(error: BaseException) -> None:
    """Leave our frames out of the traceback: the error is shown with the frames of the script alone."""
    chosen = getattr(sys, "excepthook", sys.__excepthook__)
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next

    def hook(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        chosen(kind, value.with_traceback(own), own)

    sys.excepthook = hook
