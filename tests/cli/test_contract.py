"""What others rely on, frozen: verbs, options, exit codes and public names. A change here is a change for users."""

from __future__ import annotations

from inspect import signature

import torchloom
from torchloom import errors
from torchloom.checkpoints.manifest import Damaged
from torchloom.checkpoints.search import NoValidCheckpoint
from torchloom.cli.parser import EXIT_CODES, build, options_of, verbs_of

EVERYWHERE = {"-h", "--help", "--state", "--no-color"}
LISTING = {"-o", "--output"}
STEERING = LISTING | {"--timeout"}
RULES = {"--on", "--dry-run-policy", "--check"}
VERBS: dict[str, tuple[list[str], set[str]]] = {
    "up": ([], {"--port", "--listen", "--tls-cert", "--tls-key", "--detach"}),
    "down": ([], {"-y", "--yes"}),
    "weaver": ([], {"--takeover"}),
    "status": (["job"], LISTING | {"--all"}),
    "jobs": ([], LISTING),
    "devices": ([], LISTING),
    "map": ([], LISTING | {"--device", "--replica", "--node", "--rank"}),
    "incidents": ([], LISTING | {"--job", "--open"}),
    "why": (["name"], LISTING),
    "policy": (["job"], LISTING),
    "curves": (["job"], LISTING | {"--replica"}),
    "events": ([], LISTING | {"-f", "--follow", "--job", "--last"}),
    "set": (
        ["target", "values"],
        STEERING | {"--at-step", "--replica", "--over", "--dry-run", "--no-wait"},
    ),
    "knobs": (["job"], LISTING),
    "changes": (["job"], LISTING),
    "revert": (["job", "change"], STEERING),
    "log-level": (["target", "level"], STEERING),
    "pause": (["target"], STEERING),
    "resume": (["target"], STEERING),
    "checkpoint": (["target"], STEERING),
    "stop": (["target"], STEERING | {"-y", "--yes"}),
    "kill": (["target"], STEERING | {"-y", "--yes"}),
    "evict": (["target"], STEERING | {"-y", "--yes"}),
    "stacks": (["target"], STEERING),
    "checkpoints": (["target"], LISTING | {"--verify", "--pattern"}),
    "run": (
        [],
        {
            "--nproc-per-node",
            "--nnodes",
            "--job",
            "--max-restarts",
            "--restart-window",
            "--checkpoint-dir",
            "--checkpoint-pattern",
            "--resume-arg",
            "--standby",
            "--preload",
            "--env",
            "--log-dir",
            "--grace",
            "--torchft",
            "--replicas",
            "--min-replicas",
            "--spares",
            "--lighthouse",
            "-m",
        }
        | RULES,
    ),
    "submit": (["file"], STEERING | RULES | {"--job", "--wait"}),
    "wait": (["job"], {"--timeout"}),
    "cancel": (["job"], STEERING | {"-y", "--yes"}),
    "logs": (["job"], {"--rank", "--attempt", "-f", "--follow"}),
    "agent": ([], {"--name", "--host", "--folder", "--standby", "--tied"}),
    "lighthouse": (
        [],
        {
            "--job",
            "--bind",
            "--min-replicas",
            "--join-timeout-ms",
            "--heartbeat-timeout-ms",
            "--quorum-tick-ms",
            "--folder",
        },
    ),
    "nodes": ([], LISTING),
    "drain": (["node"], LISTING | {"--undo"}),
    "checkpoints prune": (["target"], LISTING | {"--last", "--hours", "--every", "--dry-run", "-y", "--yes"}),
    "fail": (["device"], LISTING | {"--cause"}),
    "recover": (["device"], LISTING),
    "register": (["device", "replica"], LISTING | {"--job"}),
    "token": ([], {"--role", "--expires", "--host"}),
    "token ingress": ([], set()),
    "join": (["token"], set()),
    "doctor": ([], LISTING),
    "check-node": (["nodes"], LISTING | {"--checkpoint-dir"}),
    "settings": ([], LISTING | {"--markdown"}),
    "shell": ([], set()),
    "completion": (["shell"], set()),
}


def test_verbs_and_options() -> None:
    found = {
        name: ([a.dest for a in verb._actions if not a.option_strings], set(options_of(verb)) - EVERYWHERE)
        for name, verb in verbs_of(build()).items()
    }
    assert found == VERBS
    assert all(set(options_of(verb)) >= EVERYWHERE for verb in verbs_of(build()).values())
    assert set(options_of(build())) == EVERYWHERE | {"--version"}


def test_every_verb_has_a_summary_and_an_example() -> None:
    for name, verb in verbs_of(build()).items():
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
        "changes", "checkpoint", "checkpoints", "close", "evict", "fail", "jobs", "kill", "knobs", "parse", "pause",
        "recover", "register", "resume", "revert", "set", "stacks", "status", "stop",
    ]  # fmt: skip


def test_what_a_training_script_may_call() -> None:
    assert [name for name in dir(torchloom.Threadlet) if not name.startswith("_")] == [
        "accumulation", "batches", "checkpoint_interval", "clip", "close", "connected", "disown", "end", "incarnation",
        "keep", "knob", "knobs", "load_state_dict", "log_interval", "on_checkpoint", "phase", "resume_at", "state_dict",
        "step", "step_number", "stopping", "tell", "values", "watch",
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
