"""Being a fresh interpreter, in a process forked from the keeper: the script sees no difference.

The script runs in the real `__main__`, where multiprocessing and pickle look for it. It ends as Python ends: an
exception goes up to the interpreter, which prints it, joins the threads, runs the atexit functions, flushes, and gives
the exit status. That is why the keeper unwinds its whole stack in the child before it calls `run`.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import os
import runpy
import signal
import sys
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import CodeType, TracebackType
from typing import Any, NoReturn

from torchloom.agent.supervisor.fork_check import ParentEnvironment, Target
from torchloom.agent.supervisor.protocol import Begin
from torchloom.integrations.torchft import rendezvous_store
from torchloom.threadlet import unattached

NO_SUCH_SCRIPT = 2
KEEPERS_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)


def prepare(begin: Begin, target: Target, birth: ParentEnvironment) -> None:
    """Everything a new interpreter would have, and that a fork has not. Runs in the rank's working folder."""
    signal.set_wakeup_fd(-1)
    for number in KEEPERS_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(begin.env)
    sys.argv = ["-m" if target.module else target.name, *target.arguments]
    sys.orig_argv = list(begin.argv)
    sys.path = [*([] if sys.flags.safe_path else [_first_path(target)]), *birth.path]
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


def _first_path(target: Target) -> str:
    here = os.getcwd()  # noqa: PTH109
    return here if target.module else os.path.dirname(os.path.realpath(target.name))  # noqa: PTH120


def _compiled(script: str, scope: dict[str, Any]) -> CodeType:
    here = os.getcwd()  # noqa: PTH109
    file = os.path.join(here, script)  # noqa: PTH118  and not normalised: as Python does
    try:
        with open(file, "rb") as opened:  # noqa: PTH123
            source = opened.read()
    except OSError as error:
        _no_script(file, error)
    scope |= {"__file__": file, "__cached__": None, "__loader__": SourceFileLoader("__main__", file)}
    return compile(source, file, "exec", dont_inherit=True)


def _no_script(file: str, error: OSError) -> NoReturn:
    print(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
    sys.exit(NO_SUCH_SCRIPT)


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
    """Our frames under the script's are nobody's business: whoever prints the error shall find the script's alone."""
    chosen = getattr(sys, "excepthook", sys.__excepthook__)
    own = _without_ours(error.__traceback__)

    def hook(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        chosen(kind, value.with_traceback(own), own)

    sys.excepthook = hook


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
