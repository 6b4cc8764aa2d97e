"""`loom` as a process: pipes, terminals, signals, the shell, completion."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.nats_servers import NOBODY
from tests.views.samples import cluster, device, job, knobs, plane, rank
from torchloom.bus import connection
from torchloom.protocol.records import JobBegan
from torchloom.settings import Settings

LOOM = [sys.executable, "-m", "torchloom.cli.main"]


def run(*words: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | more
    return subprocess.run(
        [*LOOM, *words], input=stdin, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def on_terminal(*words: str, type_in: bytes = b"", **more: str) -> tuple[int, str]:
    """Run it on a pseudo-terminal and return its exit code and all it wrote."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | more
    process = subprocess.Popen([*LOOM, *words], stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=environment)
    os.close(theirs)
    os.write(ours, type_in)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the last one closed its end
            break
        if not part:
            break
        written += part
    os.close(ours)
    return process.wait(60), written.decode()


def test_colour_only_on_a_terminal_that_wants_it(weaver: Responder, settings: Settings) -> None:
    state = ["--state", settings.state]
    assert "\x1b[" in on_terminal(*state, "status")[1]
    assert "\x1b[" not in on_terminal(*state, "status", "--no-color")[1]
    assert "\x1b[" not in on_terminal(*state, "status", NO_COLOR="1")[1]
    assert "\x1b[" not in run(*state, "status").stdout


def test_a_reader_that_goes_away_is_no_error(weaver: Responder, settings: Settings) -> None:
    for i in range(40):
        weaver.append(*(JobBegan(job=f"j{i}-{k}") for k in range(100)))
    line = f"{' '.join(LOOM)} --state {settings.state} events --last 4000 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[1] == "141"
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["status", "status -o json", "events", "doctor", "--help", "--version"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "| head -0"])
def test_closed_streams_are_no_error(weaver: Responder, settings: Settings, words: str, closed: str) -> None:
    weaver.append(JobBegan(job="a"))
    line = f"{' '.join(LOOM)} --state {settings.state} {words} {closed}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in {0, 141}
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["status", "status -o json", "events", "settings", "shell"])
def test_a_full_disk_is_said_in_one_line(weaver: Responder, settings: Settings, words: str) -> None:
    weaver.append(JobBegan(job="a"))
    line = f"echo jobs | {' '.join(LOOM)} --state {settings.state} {words} >/dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "loom: No space left on device: the output\n")


@pytest.mark.parametrize(
    "words",
    ["status \udcff", "annotate a \udcff", "cancel --yes \udcff", "run --env A=\udcff {}", "run {} --name=\udcff"],
)
def test_what_is_not_utf_8_is_refused(weaver: Responder, settings: Settings, words: str, tmp_path: Path) -> None:
    weaver.view = cluster(jobs=(job("a"),))
    (tmp_path / "train.py").write_text("")
    done = run("--state", settings.state, *words.format(tmp_path / "train.py").split())
    assert done.returncode == 2, done.stderr
    assert re.search(r"\\udcff' (cannot be encoded as utf-8|is not a name)", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    for how in ((), ("--detach",)):
        done = run("--state", f"{tmp_path}/\udcff", "up", "--port", "0", *how)
        assert done.returncode == 2, done.stderr
        assert "cannot be encoded as utf-8" in done.stderr
        assert "Traceback" not in done.stderr


def test_text_survives_a_terminal_without_unicode(weaver: Responder, settings: Settings) -> None:
    weaver.view = cluster(jobs=(job(reason="größe 漢"),))
    done = run("--state", settings.state, "jobs", PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "gr??e ?" in done.stdout


def test_the_shell_goes_on_after_a_failing_line(weaver: Responder, settings: Settings) -> None:
    weaver.view = cluster(devices=(device("GPU-1"),))
    script = 'jobs\n\n# a comment\nstauts\ndevices\nmap --device "GPU-x"\nhelp jobs\nexit\njobs\n'
    done = run("--state", settings.state, "shell", stdin=script)
    assert done.returncode == 4, "of the last line that failed"
    assert done.stdout.count("JOB ") == 1, "nothing after exit"
    assert "GPU-1" in done.stdout
    assert "usage: loom jobs" in done.stdout
    assert "did you mean status" in done.stderr
    assert "no device 'GPU-x'" in done.stderr


def test_the_shell_has_no_shell_within_and_bears_open_quotes() -> None:
    done = run("shell", stdin="shell\n'open\nsettings\n")
    assert done.returncode == 2
    assert "already" in done.stderr
    assert "No closing quotation" in done.stderr
    assert "TORCHLOOM_STATE" in done.stdout
    assert run("shell", stdin="settings\n").returncode == 0


def test_the_shell_at_a_terminal_keeps_a_history(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*LOOM, "--state", str(state), "shell"], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    written = b""
    for line in (b"stauts\n", b"settings --markdown\n", b"\x04", b""):
        before = written.count(b"loom> ")
        while written.count(b"loom> ") == before or not line:
            try:
                written += os.read(ours, 65536)
            except OSError:  # it has ended
                break
        os.write(ours, line)
    os.close(ours)
    assert process.wait(60) == 0
    assert b"loom> " in written
    assert b"did you mean status" in written
    assert (state / "history").read_text().split("\n")[:2] == ["stauts", "settings --markdown"]


def complete(line: str, **more: str) -> list[str]:
    """What a shell would offer, asked the way argcomplete's script does."""
    environment = os.environ | {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
        "COMP_TYPE": "9", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_COMP_WORDBREAKS": " ",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
    } | more  # fmt: skip
    done = subprocess.run(LOOM, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.stderr == "", done.stderr
    return [word.strip() for word in done.stdout.split("\n") if word.strip()]


def test_verbs_and_options_complete() -> None:
    assert complete("loom stat") == ["status"]
    assert complete("loom events --fo") == ["--follow"]
    assert complete("loom --state 'my runs' events --fo") == ["--follow"]
    assert set(complete("loom completion ")) >= {"bash", "zsh", "fish"}


def test_a_verb_of_two_words_completes(tmp_path: Path) -> None:
    nobody = {"TORCHLOOM_STATE": str(tmp_path / "none"), "TORCHLOOM_ADDR": "nats://127.0.0.1:9"}
    (tmp_path / "runs").mkdir()
    assert complete("loom checkpoints", **nobody) == ["checkpoints"]
    assert complete("loom checkpoints pru", **nobody) == ["prune"]
    assert complete("loom checkpoints --v", **nobody) == ["--verify"]
    assert complete("loom checkpoints prune --la", **nobody) == ["--last"]
    for words in ("checkpoints", "checkpoints prune", "checkpoints prune --last 3"):
        assert complete(f"loom {words} {tmp_path}/r", **nobody) == [f"{tmp_path}/runs/"]


def test_names_complete_from_the_live_weaver(weaver: Responder, settings: Settings) -> None:
    weaver.view = cluster(
        jobs=(job("mnist"), job("bert")), devices=(device("GPU-1"), device("GPU-2")), assignments=(),
        ranks=(rank("mnist", "hi", 0),),
    )  # fmt: skip
    state = {"TORCHLOOM_STATE": settings.state}
    assert complete("loom fail GPU-", **state) == ["GPU-1", "GPU-2"]
    assert complete("loom events --job m", **state) == ["mnist"]
    assert complete("loom register GPU-1 h", **state) == ["hi"]
    assert complete("loom map --rank m", **state) == ["mnist/hi/0"]
    assert complete("loom checkpoints prune mn", **state) == ["mnist"]


def test_targets_knobs_and_changes_complete(weaver: Responder, settings: Settings) -> None:
    weaver.view = cluster(jobs=(job("mnist"),), ranks=(rank("mnist", "hi", 0),), assignments=())
    weaver.knobs = knobs()
    state = {"TORCHLOOM_STATE": settings.state}
    assert complete("loom pause m", **state) == ["mnist", "mnist/hi", "mnist/hi/0"]
    assert complete("loom set mnist l", **state) == ["lr=", "log_level="]
    assert complete("loom set mnist/hi lr=1 a", **state) == ["accumulate="]
    assert complete("loom revert mnist c", **state) == ["c3"]


def test_nobody_to_ask_offers_nothing_and_says_nothing(tmp_path: Path) -> None:
    assert complete("loom fail GPU-", TORCHLOOM_STATE=str(tmp_path / "none"), TORCHLOOM_ADDR="nats://127.0.0.1:9") == []


def test_down_asks_where_ranks_are_live(weaver: Responder, settings: Settings) -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as keeper,  # as if `loom up` ran: it holds the folder's lock
        (Path(settings.state) / "lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{keeper.pid}\n")
        lock.flush()
        done = run("--state", settings.state, "down")
        assert done.returncode == 2
        assert "mnist (1 rank)" in done.stderr
        assert "--yes" in done.stderr
        assert keeper.poll() is None, "nothing was stopped"
        code, shown = on_terminal("--state", settings.state, "down", type_in=b"n\n")
        assert code == 0
        assert "Go ahead? [y/N]" in shown
        assert "nothing was stopped" in shown
        assert keeper.poll() is None
        keeper.kill()


def test_kill_asks_at_a_terminal(weaver: Responder, settings: Settings) -> None:
    code, shown = on_terminal("--state", settings.state, "kill", "mnist", type_in=b"n\n")
    assert code == 0
    assert "this will kill mnist: 2 ranks, at step 1,500" in shown
    assert "nothing was done" in shown
    assert not weaver.asked
    assert on_terminal("--state", settings.state, "kill", "mnist", type_in=b"y\n")[0] == 0
    assert len(weaver.asked) == 1


def test_down_does_not_ask_for_a_control_plane_of_another_machine(weaver: Responder, settings: Settings) -> None:
    done = run("--state", settings.state, "down")  # answers, but nobody holds the lock of this folder
    assert done.returncode == 0
    assert "live training" not in done.stderr


def test_doctor_on_a_healthy_plane(weaver: Responder, settings: Settings, at: Loom) -> None:
    weaver.view = cluster(plane=plane(now=time.time()))
    report = json.loads(at("doctor", "-o", "json").out)
    levels = {check["check"]: check["level"] for check in report["checks"]}
    assert {
        "python",
        "torch",
        "nats-server",
        "nats-py",
        "state folder",
        "secrets",
        "disk",
        "gpus",
        "open files",
    } <= set(levels)
    for check in ("state folder", "secrets", "control plane", "jetstream", "jetstream sync", "weaver", "clock"):
        assert levels[check] == "ok", report
    assert all(set(check) == {"check", "level", "found", "remedy"} for check in report["checks"])


def test_doctor_finds_what_is_wrong(weaver: Responder, settings: Settings, at: Loom) -> None:
    weaver.view = cluster(plane=plane(trouble="the log cannot be written"))  # its clock is years ahead, too
    Path(settings.state).chmod(0o755)
    (Path(settings.state) / "creds" / "viewer.creds").chmod(0o644)
    ran = at("doctor", "-o", "json")
    assert ran.code == 1
    found = {check["check"]: check for check in json.loads(ran.out)["checks"]}
    assert found["state folder"]["level"] == "fail"
    assert found["state folder"]["remedy"].startswith("chmod 700")
    assert found["secrets"]["level"] == "fail"
    assert found["weaver"]["level"] == "fail"
    assert found["clock"]["level"] == "warn"
    assert "→ chmod 700" in at("doctor").out


def test_doctor_before_anything_was_started(loom: Loom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DEFAULT_ADDRESS", NOBODY)  # where another control plane may be
    ran = loom("--state", str(tmp_path / "none"), "doctor", "-o", "json")
    levels = {check["check"]: check["level"] for check in json.loads(ran.out)["checks"]}
    assert levels["control plane"] == "warn"
    assert levels["state folder"] == "ok"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("how", ["argument", "stdin"])
def test_token_and_join(weaver: Responder, settings: Settings, tmp_path: Path, how: str) -> None:
    made = run("--state", settings.state, "token", "--host", "127.0.0.1", "--role", "viewer", "--expires", "1h")
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("\n") == 1, "only the token on stdout"
    assert "viewer" in made.stderr
    second = ["--state", str(tmp_path / "second")]
    token = made.stdout.strip()
    joined = run(*second, "join", token) if how == "argument" else run(*second, "join", "-", stdin=made.stdout)
    assert joined.returncode == 0, joined.stderr
    assert run(*second, "jobs").returncode == 0
    assert run(*second, "fail", "GPU-1").returncode == 6, "only a viewer was invited"
    assert run("--state", settings.state, "join", token).returncode == 6
    assert run(*second, "join", "rubbish").returncode == 2
