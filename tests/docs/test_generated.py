"""The pages printed from the code say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate, packages, trouble
from torchloom.bus.nats_server import find_binary
from torchloom.cli.parser import build
from torchloom.cli.verb_call import options_of
from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.core.state.rank_states import JobPhase, Presence
from torchloom.job import job_file_reader
from torchloom.job.policy_syntax import parse_rule
from torchloom.protocol.subjects import Role


@pytest.mark.parametrize("name", [*generate.PAGES, *generate.PARTS])
def test_a_printed_page_is_up_to_date(name: str) -> None:
    assert name not in generate.out_of_date(), "run `make docs`"


def test_an_old_page_is_named_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.out_of_date() == [*generate.PAGES, *generate.PARTS]
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_every_verb_is_on_the_page() -> None:
    page = generate.page("cli.md")
    for name, verb in build().verbs.items():
        section = page.partition(f"\n## loom {name}\n")[2].partition("\n## ")[0]
        missing = [o for o in options_of(verb) if o not in section and o not in page.partition("## Exit codes")[0]]
        assert section
        assert not missing


def test_the_tour_is_short_and_visits_every_package_once() -> None:
    lines = generate.page("tour.md").splitlines()
    assert len(lines) <= 120
    visited = [name for line in lines if line.startswith("## ") for name in re.findall(r"`(\w+)`", line)]
    assert sorted(visited) == sorted(packages.packages())


def test_the_diagram_leaves_out_what_follows_from_other_imports() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert packages.direct(graph) == {"a": ["b"], "b": ["c"], "c": []}


def test_every_state_and_role_is_explained() -> None:
    assert set(generate.RANK_STATES) == set(Presence)
    assert set(generate.JOB_STATES) == set(JobPhase)
    assert set(generate.ROLES) == set(Role)


def test_every_kind_of_trouble_is_explained() -> None:
    page = generate.page("detection.md")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(KINDS)


def test_the_rules_on_the_page_are_rules(tmp_path: Path) -> None:
    for rule in trouble.rules():
        parse_rule(rule)
    (tmp_path / "mnist.toml").write_text(trouble.JOB_FILE)
    assert len(job_file_reader.read(tmp_path / "mnist.toml")[1].policy) == 3


def test_the_printed_server_configuration_is_one_that_nats_server_takes(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("\n".join([f'jetstream {{ store_dir: "{tmp_path / "js"}" }}', *generate.server_config()]))
    checked = subprocess.run([find_binary(), "-t", "-c", config], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_it_runs_as_a_program() -> None:
    root = Path(generate.__file__).parent.parent
    command = [sys.executable, "-m", "docs.generate", "--check"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
