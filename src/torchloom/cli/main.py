"""The entry of `loom`: find the verb, run it, and turn every way it can fail into a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from errno import EDQUOT, EFBIG, ENOSPC, EPIPE
from pathlib import Path

from torchloom import __version__
from torchloom.errors import BadInput, TorchLoomError

INTERRUPTED = 130
READER_GONE = 141
NO_SPACE = {ENOSPC, EDQUOT, EFBIG}


def main(argv: Sequence[str] | None = None) -> int:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # `loom status >&-`; the next file that is opened must not become stdout
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        complete()
    try:
        code = run(words)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in {EPIPE, *NO_SPACE}:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        if error.errno == EPIPE:  # `loom events | head`: the reader has seen enough
            return READER_GONE
        with suppress(OSError):  # stderr may be the same file
            print(f"loom: {error.strerror}: {error.filename or 'the output'}", file=sys.stderr)
        return TorchLoomError.exit_code
    return code


def run(words: Sequence[str]) -> int:
    """Run one command line; errors go to stderr."""
    if words == ["--version"]:
        print(f"loom {__version__}")
        return 0
    from torchloom.cli.parser import parse
    from torchloom.cli.verb_call import print_error

    try:
        call = parse(words)
        code: int = call.args.run(call)
        return code
    except (TorchLoomError, UnicodeEncodeError) as raised:
        error = raised if isinstance(raised, TorchLoomError) else _not_text(raised)
        print_error(error)
        if "TORCHLOOM_REPORT_FD" in os.environ:  # started in the background
            from torchloom.weaver.control_plane_processes import send_error

            send_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)  # after the ^C that the terminal shows
        return INTERRUPTED
    except SystemExit as end:  # argparse after --help
        return end.code if isinstance(end.code, int) else 0


def _not_text(error: UnicodeEncodeError) -> BadInput:
    """For an argument, a path or a variable with bytes that are no text, which Python carries as surrogates."""
    before, after = error.object[: error.start].rpartition('"')[2], error.object[error.start :].partition('"')[0]
    text = ascii(before[-100:] + after[:100])
    return BadInput(f"{text} cannot be encoded as {error.encoding}", hint="arguments, paths and variables are UTF-8")


def complete() -> None:
    """Called by the shell while someone types; ends the process."""
    import argcomplete

    from torchloom.cli.parser import VERBS, build, typed_verb

    finished = argcomplete.split_line(os.environ["COMP_LINE"])[3]  # the words before the one that is being typed
    words = finished[int(os.environ["_ARGCOMPLETE"]) :]
    # The second word of a verb is offered after its first.
    argcomplete.autocomplete(build(typed_verb(words)), exclude=[name for name in VERBS if " " in name])


if __name__ == "__main__":
    sys.exit(main())
