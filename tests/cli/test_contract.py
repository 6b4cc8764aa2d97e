"""What others rely on, frozen: verbs, options, exit codes and public names. A change here is a change for users."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import torchloom
from torchloom import errors
from torchloom.cli.parser import EXIT_CODES, build
from torchloom.cli.verb_call import options_of
from torchloom.errors import Damaged, NoValidCheckpoint

EVERYWHERE = {"-h", "--help", "--state", "--no-color"}
CONTRACT = Path(__file__).with_name("verbs.txt")


def contract() -> str:
    """Every verb with its arguments and its options, but for those that all verbs have."""
    lines = []
    for name, verb in sorted(build().verbs.items()):
        arguments = [action.dest for action in verb._actions if not action.option_strings]
        lines.append(f"{name}: {' '.join([*arguments, *sorted(set(options_of(verb)) - EVERYWHERE)])}".rstrip())
    return "\n".join(lines) + "\n"


def test_verbs_and_options() -> None:
    assert contract() == CONTRACT.read_text(), "if this is intended, run `python -m tests.cli.test_contract`"
    assert all(set(options_of(verb)) >= EVERYWHERE for verb in build().verbs.values())
    assert set(options_of(build())) == EVERYWHERE | {"--version"}


def test_every_verb_has_a_summary_and_an_example() -> None:
    for name, verb in build().verbs.items():
        text = verb.format_help()
        assert f"loom {name}" in text.partition("\n")[2], f"{name} shows no example"
        assert verb.description
        assert verb.description.partition("\n")[0].endswith(".")


def test_public_names() -> None:
    assert sorted(torchloom.__all__) == [
        "AsyncClient",
        "Checkpoints",
        "Client",
        "Keep",
        "Threadlet",
        "TorchLoomError",
        "__version__",
        "attach",
        "attach_manager",
    ]
    assert dir(torchloom) == sorted(torchloom.__all__)


def test_the_two_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, str]:
        return {name: str(signature(method)) for name, method in vars(kind).items() if not name.startswith("_")}

    assert methods(torchloom.Client) == methods(torchloom.AsyncClient)
    assert sorted(methods(torchloom.Client)) == [
        "annotate", "changes", "checkpoint", "checkpoints", "close", "evict", "fail", "jobs", "kill", "knobs", "parse",
        "pause", "predict", "recover", "register", "resume", "revert", "schedule", "set", "set_schedule", "stacks",
        "status", "stop",
    ]  # fmt: skip


def test_what_a_training_script_may_call() -> None:
    assert [name for name in dir(torchloom.Threadlet) if not name.startswith("_")] == [
        "accumulation", "batches", "checkpoint_interval", "clip", "close", "connected", "disown", "end", "incarnation",
        "keep", "knob", "knobs", "load_state_dict", "log_interval", "on_checkpoint", "phase", "resume_at", "state_dict",
        "step", "step_number", "stopping", "tell", "use_loader", "values", "watch",
    ]  # fmt: skip


def test_exit_codes_are_documented() -> None:
    codes = {
        kind.exit_code
        for kind in (*vars(errors).values(), Damaged, NoValidCheckpoint)
        if isinstance(kind, type) and issubclass(kind, errors.TorchLoomError)
    }
    assert codes == {1, 2, 3, 4, 5, 6, 7, 8}
    for code in codes | {0, 130, 141}:
        assert f"\n  {code}  " in EXIT_CODES
    assert EXIT_CODES.splitlines()[0] in build().format_help()


if __name__ == "__main__":
    CONTRACT.write_text(contract())
