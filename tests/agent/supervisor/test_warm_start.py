"""A warm rank sees and leaves what a fresh interpreter would: one script is run both ways, and compared."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ENV, SupervisorHarness
from torchloom.agent.supervisor.supervisor_client import SupervisorOptions

LOOK = """
import json, os, signal, sys, threading
main = sys.modules["__main__"]
def handler(number):
    found = signal.getsignal(number)
    return getattr(found, "__name__", str(found))
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "executable": sys.executable, "prefix": sys.prefix,
    "file": __file__, "name": __name__, "package": __package__, "spec": __spec__ and [__spec__.name, __spec__.origin],
    "doc": __doc__, "cached": globals().get("__cached__"), "annotations": __annotations__,
    "loader": [type(__loader__).__name__, __loader__.name, __loader__.path],
    "globals": sorted(set(globals())), "main": main.__dict__ is globals(), "builtins": type(__builtins__).__name__,
    "cwd": os.getcwd(), "environ": dict(os.environ), "umask": os.umask(0o22),
    "flags": str(sys.flags), "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "optimised": not __debug__,
    "leads": [os.getpid() == os.getpgrp(), os.getpid() == os.getsid(0)],
    "handlers": {n.name: handler(n) for n in signal.Signals},
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup": signal.set_wakeup_fd(-1),
    "fds": sorted(n for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)),
    "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno(), s.isatty()]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "thread": threading.current_thread() is threading.main_thread(), "threads": threading.active_count(),
    "sigint": sys.gettrace(), "hook": sys.excepthook is sys.__excepthook__, "context": repr(sys.exc_info()),
}
import multiprocessing.process, multiprocessing.spawn
seen["original_dir"] = multiprocessing.process.ORIGINAL_DIR
seen["preparation"] = sorted(multiprocessing.spawn.get_preparation_data("x"))
"""
TELL = "print(json.dumps(seen))\n"


async def both(harness: SupervisorHarness, *argv: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    warm, cold = await asyncio.gather(harness.live(*argv, warm=True, **more), harness.live(*argv, warm=False, **more))
    assert warm.begun.warm
    assert not cold.begun.warm
    assert (warm.end[:2], warm.err) == (cold.end[:2], cold.err) == ((0, None), "")
    return json.loads(warm.out), json.loads(cold.out)


@pytest.mark.parametrize("how", ["train.py", "./train.py", "sub/../train.py", "sub/deep.py", "link.py", "absolute"])
async def test_a_script_sees_the_same(light: SupervisorHarness, how: str) -> None:
    text = '"""What it does."""\n' + LOOK + "import beside\nseen['beside'] = beside.__file__\n" + TELL
    path = light.script(text)
    light.script(text, "sub/deep.py")
    light.script("", "beside.py")
    light.script("", "sub/beside.py")
    light.script("", "elsewhere/beside.py")
    (light.home / "link.py").symlink_to(light.script(text, "elsewhere/real.py"))
    warm, cold = await both(light, path if how == "absolute" else how, "--lr", "0.1", "", "ü", env={"RANK": "3"})
    assert warm == cold
    assert warm["argv"][1:] == ["--lr", "0.1", "", "ü"]
    assert warm["environ"]["RANK"] == "3"
    assert warm["file"].startswith(str(light.home))


async def test_a_rank_ignores_no_signal_because_its_agent_does(tmp_path: Path) -> None:
    """As an agent does that a shell has started in the background."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        harness = SupervisorHarness(tmp_path)
        options = SupervisorOptions(tied=True, preload=("multiprocessing.spawn",), env=ENV)
        await harness.start(tmp_path / "supervisor", options)
    finally:
        signal.signal(signal.SIGQUIT, before)
    harness.script(LOOK + TELL)
    warm, cold = await both(harness, "train.py")
    assert warm["handlers"] == cold["handlers"]
    assert warm["handlers"]["SIGQUIT"] == warm["handlers"]["SIGUSR1"]
    await harness.link.dismiss()


@pytest.mark.parametrize("module", ["package.train", "package", "alone"])
async def test_a_module_sees_the_same(light: SupervisorHarness, module: str) -> None:
    light.script("value = 7\n", "package/__init__.py")
    light.script("value = 8\n", "package/beside.py")
    text = LOOK + "from . import value\nfrom .beside import value as other\nseen['relative'] = [value, other]\n" + TELL
    light.script(text, "package/train.py")
    light.script(text, "package/__main__.py")
    light.script(LOOK + TELL, "alone.py")
    warm, cold = await both(light, "-m", module, "a", "-m", "b")
    assert warm == cold
    assert warm["path"][0] == str(light.home)
    assert warm["argv"][1:] == ["a", "-m", "b"]
    assert warm.get("relative", [7, 8]) == [7, 8]


async def test_another_working_folder_is_entered(light: SupervisorHarness) -> None:
    (light.home / "other").mkdir()
    path = light.script(LOOK + TELL)
    warm, cold = await both(light, os.path.relpath(path, light.home / "other"), cwd=light.home / "other")
    assert warm == cold
    assert warm["cwd"] == warm["original_dir"] == str(light.home / "other")


ENDS = {
    "nothing": "",
    "falls off the end with output": "print('a line'); print('no end', end='')",
    "exit": "import sys; sys.exit()",
    "exit code": "import sys; sys.exit(3)",
    "exit code beyond a byte": "raise SystemExit(256 + 7)",
    "negative exit code": "import sys; sys.exit(-1)",
    "exit with a text": "import sys; sys.exit('no data')",
    "exit with none": "raise SystemExit(None)",
    "exit with True": "raise SystemExit(True)",
    "immediate exit": "import os; print('lost'); os._exit(5)",
    "exception": "def f():\n    raise ValueError('bad\\nvalue')\nprint('before')\nf()",
    "chained exceptions": "try:\n    1/0\nexcept ZeroDivisionError:\n    {}['x']",
    "exception with a cause": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('y') from e",
    "exception group": "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])",
    "syntax error": "print('never')\nx = = 3\n",
    "undecodable source": "# -*- coding: utf-8 -*-\nx = '\udcff'",
    "exception with a note": "e = ValueError('x')\ne.add_note('look here')\nraise e",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "keyboard interrupt by a signal": "import os, signal; os.kill(os.getpid(), 2); [0 for _ in range(9**6)]",
    "own excepthook": "import sys\nsys.excepthook = lambda t, v, tb: print(t, tb.tb_lineno, tb.tb_next)\n1/0",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "broken pipe": "import os\nr, w = os.pipe(); os.close(r)\nos.write(w, b'x')",
    "atexit": "from atexit import *\nregister(print, 1)\nregister(print, 2)\nprint('main')\nraise SystemExit(4)",
    "failing atexit": "import atexit, sys\natexit.register(sys.exit, 9)\nprint('main')",
    "threads are joined": (
        "from threading import *\nThread(target=lambda: [main_thread().join(), print('thread')]).start()\nprint('main')"
    ),
    "daemon threads are not": "from threading import *\nt = Timer(99, print)\nt.daemon = True\nt.start()",
    "thread fails": "import threading\nt = threading.Thread(target=lambda: 1/0); t.start(); t.join()",
    "an object's last words": "class A:\n    def __del__(self): print('deleted')\na = A()",
    "last words in a library": "import random\nclass A:\n    def __del__(self): print('deleted')\nrandom.a = A()",
    "a file left open": "import os\nf = open(f'{os.getpid()}.left', 'w')\nf.write('all of it')",
    "binary output": "import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nsys.stderr.write('\\udcff\\n')",
    "input": "print(repr(input()))",
    "stack": "import traceback, sys\ntraceback.print_stack(sys._getframe(0), limit=1)",
    "future": "from __future__ import annotations\ndef f(x: nothing): ...\nprint(f.__annotations__)",
    "no future of ours": "def f(x: int): ...\nprint(f.__annotations__)",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
async def test_a_script_ends_the_same(light: SupervisorHarness, name: str) -> None:
    (light.home / "train.py").write_bytes(ENDS[name].encode(errors="surrogateescape"))
    warm, cold = await asyncio.gather(light.live("train.py", warm=True), light.live("train.py", warm=False))
    assert warm.end == cold.end
    if name == "a file left open":
        assert [file.read_text() for file in light.home.glob("*.left")] == ["all of it"] * 2


@pytest.mark.parametrize("argv", [("gone.py",), ("-m", "no_such_module"), ("-m", "package.gone"), ("-m", "package")])
async def test_what_is_not_there_is_missed_the_same(light: SupervisorHarness, argv: tuple[str, ...]) -> None:
    light.script("", "package/__init__.py")
    warm, cold = await asyncio.gather(light.live(*argv, warm=True), light.live(*argv, warm=False))
    assert warm.end == cold.end
    assert warm.ended.code in {1, 2}
    assert "gone" in warm.err or "no_such_module" in warm.err or "package" in warm.err


async def test_a_failing_module_shows_the_same_traceback(light: SupervisorHarness) -> None:
    light.script("import sys\ndef f(): raise ValueError('x')\nf()\n", "alone.py")
    warm, cold = await asyncio.gather(light.live("-m", "alone", warm=True), light.live("-m", "alone", warm=False))
    assert warm.end == cold.end
    assert warm.err.endswith("ValueError: x\n")


async def test_functions_of_the_script_reach_spawned_processes(light: SupervisorHarness) -> None:
    light.script("""
import multiprocessing
def square(x): return x * x, __name__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [1, 2]))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(square, [3]))
""")
    warm = await light.live("train.py", warm=True)
    assert (warm.out, warm.err) == ("[(1, '__mp_main__'), (4, '__mp_main__')]\n[(9, '__main__')]\n", "")
