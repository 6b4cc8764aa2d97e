"""What was typed: guessed if mistyped, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Loom
from torchloom import __version__
from torchloom.cli.parser import VERBS, build
from torchloom.cli.verbs.join import parse_lifetime
from torchloom.cli.verbs.services import parse_listen
from torchloom.errors import BadInput


def test_version_and_help(loom: Loom) -> None:
    assert loom("--version") == (0, f"loom {__version__}\n", "")
    assert "exit codes" in loom("--help").out
    assert loom().out == loom("--help").out
    assert "loom events -f" in loom("events", "--help").out


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (["stauts"], "did you mean status"),
        (["status", "--al"], "did you mean --all"),
        (["events", "--flolow"], "did you mean --follow?"),
        (["run", "--nproc", "2", "a.py"], "did you mean --nproc-per-node?"),
        (["run", "--width", "0", "a.py"], "`loom run --help` lists them; options of the script come after it"),
        (["status", "--nodes"], "`loom status --help` lists them"),
        (["jobs", "-o", "jsn"], "did you mean json"),
        (["jobs", "extra"], "--help"),
        (["zzzzzz"], "there are: up, down"),
        (["token", "--role", "viewr"], "did you mean viewer"),
        (["fail"], "--help"),
        (["checkpoints"], "--help"),
        (["checkpoints", "prun", "x"], "did you mean prune"),
        (["checkpoints", "a", "b"], "loom checkpoints --help"),
        (["checkpoints", "x", "--last", "3"], "`loom checkpoints prune` has it"),
        (["checkpoints", "x", "--verfy"], "did you mean --verify"),
        (["checkpoints", "prune", "--lats", "3", "x"], "did you mean --last"),
        (["checkpoints", "prune", "x"], "--last 5"),
        (["checkpoints", "prune", "x", "--last", "0"], "leave it out"),
        (["checkpoints", "prune", "x", "--hours", "nan"], "leave it out"),
        (["checkpoints", "prune", "x", "--every", "often"], "--help"),
        (["checkpoints", "a.b"], "names have 1 to 128"),
        (["events", "--last", "many"], "--help"),
        (["events", "--last", "-3"], ""),
        (["map", "--rank", "x"], "JOB/REPLICA/RANK"),
        (["fail", "a.b"], "names have 1 to 128"),
        (["token", "--expires", "soon"], "12h"),
        (["up", "--listen", "1.2.3.4:5", "--port", "6"], "one of them"),
        (["up", "--tls-cert", "x"], "both"),
        (["up", "--tls-cert", "/nowhere/x", "--tls-key", "/nowhere/y"], ""),
    ],
)
def test_mistakes_are_told_with_what_to_do(loom: Loom, tmp_path: Path, words: list[str], guess: str) -> None:
    ran = loom("--state", str(tmp_path / "none"), *words)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("loom: ")
    assert guess in ran.err
    if guess:
        assert "\n  → " in ran.err
    assert not (tmp_path / "none").exists()


def test_state_may_stand_before_or_after_the_verb(loom: Loom, tmp_path: Path) -> None:
    for words in (["--state", str(tmp_path / "x"), "settings"], ["settings", "--state", str(tmp_path / "x")]):
        assert str(tmp_path / "x") in loom(*words).out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.5", ("10.0.0.5", None)), ("10.0.0.5:99", ("10.0.0.5", 99)), ("host:0", ("host", 0)),
        ("fd00::1", ("fd00::1", None)), ("[fd00::1]:99", ("fd00::1", 99)), ("[fd00::1]", ("fd00::1", None)),
    ],
)  # fmt: skip
def test_addresses(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", ":99", "host:x", "[fd00::1", "[fd00::1]x", "[]:1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(BadInput):
        parse_listen(text)


def test_lifetimes() -> None:
    assert parse_lifetime("7d") == 604_800
    assert parse_lifetime("90s") == 90
    assert parse_lifetime("never") is None
    for bad in ("", "d", "0d", "-1d", "7", "7w", "1.5h"):
        with pytest.raises(BadInput):
            parse_lifetime(bad)


def test_every_verb_is_in_the_module_that_the_table_names() -> None:
    for name in VERBS:
        assert callable(build(name.partition(" ")[0]).verbs[name].get_default("run"))


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("build('')", []),
        ("parse(['events'])\nparse(['up'])", []),
        ("parse(['status'])\nparse(['checkpoints', 'x'])", ["msgspec"]),
        ("build()", ["msgspec", "nkeys", "socket"]),
    ],
)
def test_nothing_heavy_is_imported_before_a_verb_needs_it(code: str, imported: list[str]) -> None:
    """What shows something cannot do without msgspec, nor `token` without nkeys."""
    code = (
        f"import sys\nfrom torchloom.cli.parser import build, parse\n{code}\n"
        "heavy = {'nats', 'asyncio', 'msgspec', 'nkeys', 'argcomplete', 'torch', 'ssl', 'socket'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(imported)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(loom: Loom, shell: str) -> None:
    ran = loom("completion", shell)
    assert ran.code == 0
    assert "loom" in ran.out
    assert "_ARGCOMPLETE" in ran.out or "argcomplete" in ran.out


def test_settings(loom: Loom, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setenv("TORCHLOOM_GRACE_SECONDS", "7.5")
    rows = {row["variable"]: row for row in json.loads(loom("settings", "-o", "json").out)}
    assert rows["TORCHLOOM_GRACE_SECONDS"]["value"] == "7.5"
    assert rows["TORCHLOOM_GRACE_SECONDS"]["default"] == "3.0"
    assert rows["TORCHLOOM_GRACE_SECONDS"]["meaning"]
    assert "| `TORCHLOOM_GRACE_SECONDS` | `3.0` |" in loom("settings", "--markdown").out
    monkeypatch.setenv("TORCHLOOM_GRACE_SECONDS", "soon")
    ran = loom("settings")
    assert ran.code == 2
    assert "TORCHLOOM_GRACE_SECONDS" in ran.err
