"""Shell completion: `loom completion bash` prints what to source; names are asked from the live weaver."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "completion", completion, "print the script that makes the shell complete verbs and names",
        'Put it where your shell starts:\n\n  bash: eval "$(loom completion bash)"\n'
        '  zsh:  eval "$(loom completion zsh)"\n  fish: loom completion fish | source',
    )  # fmt: skip
    verb.add_argument("shell", choices=["bash", "zsh", "fish"], metavar="SHELL", help="Shell: bash, zsh or fish")


def completion(call: Call) -> int:
    import argcomplete

    call.print([argcomplete.shellcode(["loom"], shell=call.args.shell)])
    return 0


def complete() -> None:
    """Called by the shell while someone types; ends the process."""
    import argcomplete

    from torchloom.cli.parser import build, verbs_of

    parser = build()
    # The second word of a verb is offered after its first.
    argcomplete.autocomplete(parser, exclude=[name for name in verbs_of(parser) if " " in name])
