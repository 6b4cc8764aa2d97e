"""`loom shell`: the same verbs at a prompt, also from a file or a pipe; `loom completion`: for other shells."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Iterator

from torchloom.cli.main import run
from torchloom.cli.parser import VERBS, build
from torchloom.cli.verb_call import Call, Verbs, options_of, print_error
from torchloom.errors import BadInput

_PROMPT = "loom> "
_HISTORY = 1000


def add(verbs: Verbs) -> None:
    verbs["shell"].define(shell, "echo status | loom shell", output=False)

    scripts = ('bash: eval "$(loom completion bash)"', 'zsh:  eval "$(loom completion zsh)"')
    verb = verbs["completion"].define(completion, *scripts, "fish: loom completion fish | source", output=False)
    verb.add_argument("shell", choices=["bash", "zsh", "fish"], metavar="SHELL", help="Shell: bash, zsh or fish")


def completion(call: Call) -> int:
    """Put it where your shell starts:"""
    import argcomplete

    call.print([argcomplete.shellcode(["loom"], shell=call.args.shell)])
    return 0


def shell(call: Call) -> int:
    """Any verb without the `loom` before it; `help [VERB]`, `exit` or Ctrl-D. Lines may come from a pipe: then the
    exit code is that of the last line that failed.
    """
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
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        return _refuse(f"{line.strip()!r}: {error}")
    if not words:
        return 0
    if words[0] in {"exit", "quit"}:
        return None
    if words[0] == "help":
        words = [*words[1:3], "--help"]
    if words[0] == "shell":
        return _refuse("this is a shell already")
    code = run([*_inherited(call), *words])
    sys.stdout.flush()
    return code


def _refuse(message: str) -> int:
    problem = BadInput(message)
    print_error(problem)
    return problem.exit_code


def _inherited(call: Call) -> list[str]:
    """The options of the shell itself, which hold for every line."""
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
    readline.set_completer(_complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY)
        with contextlib.suppress(OSError):
            if history.parent.is_dir():
                readline.write_history_file(history)


def _complete(text: str, index: int) -> str | None:
    """For readline: the verbs for the first word, that verb's options after it."""
    import readline

    offers = offered(readline.get_line_buffer()[: readline.get_begidx()], text)
    return offers[index] if index < len(offers) else None


@functools.cache  # readline asks for one after the other
def offered(before: str, text: str) -> list[str]:
    words = before.split()
    if not words or words == ["help"]:
        names = [*VERBS, "help", "exit"]
    else:
        verbs = build(words[0]).verbs
        verb = verbs.get(" ".join(words[:2])) or verbs.get(words[0])
        names = options_of(verb) if verb else []
        names += [name.partition(" ")[2] for name in VERBS if words == name.split()[:-1]]
    return [f"{name} " for name in sorted(names) if name.startswith(text)]
