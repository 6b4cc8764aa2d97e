"""The same verbs at a prompt: `loom shell`, also fed from a file or a pipe."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs

_PROMPT = "loom> "
_HISTORY = 1000


def add(verbs: Verbs) -> None:
    verbs.add(
        "shell", shell, "run verbs at a prompt",
        "Any verb without the `loom` before it; `help [VERB]`, `exit` or Ctrl-D. Lines may come from a pipe: then the\n"
        "exit code is that of the last line that failed.\n\n  echo status | loom shell",
    )  # fmt: skip


def shell(call: Call) -> int:
    interactive = sys.stdin.isatty()
    failed = 0
    for line in _prompted(call) if interactive else sys.stdin:
        code = obey(call, line)
        if code is None:
            break
        failed = code or failed
    return 0 if interactive else failed


def obey(call: Call, line: str) -> int | None:
    """Run one line and return its exit code; None means leave."""
    from torchloom.cli.main import run, tell
    from torchloom.errors import BadInput

    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        problem = BadInput(f"{line.strip()!r}: {error}")
        tell(problem)
        return problem.exit_code
    if not words:
        return 0
    if words[0] in {"exit", "quit"}:
        return None
    if words[0] == "help":
        words = [*words[1:3], "--help"]
    if words[0] == "shell":
        problem = BadInput("this is a shell already")
        tell(problem)
        return problem.exit_code
    code = run([*_inherited(call), *words])
    sys.stdout.flush()
    return code


def _inherited(call: Call) -> list[str]:
    """What the shell itself was told holds for every line."""
    words = ["--state", call.args.state] if call.args.state is not None else []
    return [*words, "--no-color"] if call.args.no_color else words


def _prompted(call: Call) -> Iterator[str]:
    with _readline(call):
        while True:
            try:
                yield input(_PROMPT)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # drops the line, not the shell
                print()


@contextlib.contextmanager
def _readline(call: Call) -> Iterator[None]:
    """History across shells, and completion of verbs and options; a Python built without readline has neither."""
    try:
        import readline
    except ImportError:
        yield
        return
    history = call.settings.state_folder / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_completer_delims(" ")
    readline.set_completer(_Completer())
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY)
        with contextlib.suppress(OSError):
            if history.parent.is_dir():
                readline.write_history_file(history)


class _Completer:
    """For readline: the verbs for the first word, that verb's options after it."""

    def __init__(self) -> None:
        from torchloom.cli.parser import build, verbs_of

        self._verbs = verbs_of(build())

    def __call__(self, text: str, index: int) -> str | None:
        import readline

        found = self.candidates(readline.get_line_buffer()[: readline.get_begidx()], text)
        return found[index] if index < len(found) else None

    def candidates(self, before: str, text: str) -> list[str]:
        from torchloom.cli.parser import options_of

        words = before.split()
        if not words or words == ["help"]:
            known = [*self._verbs, "help", "exit"]
        else:
            verb = self._verbs.get(" ".join(words[:2])) or self._verbs.get(words[0])
            known = options_of(verb) if verb else []
            known += [name.partition(" ")[2] for name in self._verbs if words == name.split()[:-1]]
        return [f"{name} " for name in sorted(known) if name.startswith(text)]
