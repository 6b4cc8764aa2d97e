"""What the pages on Slurm, Kubernetes and workloads tell to type and to apply, `loom` and a cluster understand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchloom.cli.parser import parse
from torchloom.job import job_file_reader
from torchloom.job.workload_file import read_workload
from torchloom.job.workload_plan import PlanOptions
from torchloom.job.workload_rows import COLUMNS
from torchloom.workloads.architecture_catalog import DEPTHS

ROOT = Path(__file__).parent.parent.parent
MANIFEST = ROOT / "examples" / "kubernetes.yaml"
BATCH = ROOT / "examples" / "slurm.sbatch"
PAGES = [ROOT / "docs" / "kubernetes.md", ROOT / "docs" / "slurm.md"]
WORKLOADS = ROOT / "docs" / "workloads.md"
ENDS = "();<>|&\n"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(script: str) -> Iterator[list[str]]:
    """Each call of `loom` in a piece of shell, in what it quotes for another shell too."""
    text = re.sub(r"(^|\s)#[^\n]*", r"\1", script.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=ENDS)
    lexer.whitespace = " \t"
    lexer.commenters = ""
    words: list[str] = []
    for token in (*lexer, "\n"):
        if set(token) <= set(ENDS):
            if "loom" in words:
                yield words[words.index("loom") + 1 :]
            words = []
        elif " loom " in f" {token}":
            yield from commands(token)
        else:
            words.append(token)


def containers() -> Iterator[dict[str, Any]]:
    for document in documents():
        if document["kind"] == "StatefulSet":
            yield from document["spec"]["template"]["spec"]["containers"]


def in_manifest() -> list[list[str]]:
    found = []
    for container in containers():
        for command in (container["command"], container["readinessProbe"]["exec"]["command"]):
            found += commands(shlex.join(command))
    return found


def test_calls_are_found_wherever_they_stand() -> None:
    script = "until loom status &>/dev/null; do x; done # loom no\nsrun bash -c '\n loom join - && exec loom agent' &"
    assert list(commands(script)) == [["status"], ["join", "-"], ["agent"]]
    assert list(commands(shlex.join(["sh", "-c", "loom join - < /x && exec loom agent"]))) == [["join", "-"], ["agent"]]


@pytest.mark.parametrize(
    ("found", "least"),
    [
        (in_manifest(), 5),
        (list(commands(BATCH.read_text())), 8),
        *(([words for block in fenced(page, "sh") for words in commands(block)], 3) for page in (*PAGES, WORKLOADS)),
    ],
    ids=["manifest", "batch", "kubernetes.md", "slurm.md", "workloads.md"],
)
def test_every_call_of_loom_is_one_that_it_takes(found: list[list[str]], least: int) -> None:
    assert len(found) >= least
    for words in found:
        assert parse(words).args.verb


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_job_file_is_one_that_can_be_submitted(page: Path, tmp_path: Path) -> None:
    blocks = fenced(page, "toml")
    assert blocks
    for block in blocks:
        (tmp_path / "job.toml").write_text(block)
        assert job_file_reader.read(tmp_path / "job.toml")


def test_the_workloads_on_the_page_and_of_the_example_are_ones_that_can_be_submitted(tmp_path: Path) -> None:
    (rows,), (tables,) = fenced(WORKLOADS, "text"), fenced(WORKLOADS, "toml")
    (tmp_path / "page.csv").write_text(rows)
    (tmp_path / "page.toml").write_text(tables)
    for path in (tmp_path / "page.csv", tmp_path / "page.toml", ROOT / "examples" / "workload.csv"):
        assert len(read_workload(path, PlanOptions(str(tmp_path))).jobs) == 3
    assert rows == (ROOT / "tests" / "fixtures" / "workload.csv").read_text()


def test_the_page_on_workloads_lists_every_architecture_and_column() -> None:
    page = WORKLOADS.read_text()
    assert all(f"`{name}`" in page for name in (*DEPTHS, *COLUMNS))


def test_the_batch_script_is_one_that_bash_takes() -> None:
    assert subprocess.run(["bash", "-n", BATCH], capture_output=True, text=True).stderr == ""


def test_the_parts_of_the_manifest_name_each_other() -> None:
    kinds = {(document["kind"], document["metadata"]["name"]) for document in documents()}
    sets = [document for document in documents() if document["kind"] == "StatefulSet"]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in sets]
    assert len(kinds) == len(documents())
    assert all(document["apiVersion"] for document in documents())
    for document in documents():
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels
    for one in sets:
        spec = one["spec"]
        pod = spec["template"]["spec"]
        assert ("Service", spec["serviceName"]) in kinds
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == set(volumes) | claims
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in kinds


def test_the_secret_and_the_names_on_the_page_are_those_of_the_manifest() -> None:
    page = PAGES[0].read_text()
    secrets = re.findall(r"secretName: ([\w-]+)", MANIFEST.read_text())
    assert secrets
    assert set(re.findall(r"create secret generic ([\w-]+) --from-file=token", page)) == set(secrets)
    assert "< /join/token" in MANIFEST.read_text()
    names = {document["metadata"]["name"] for document in documents() if document["kind"] == "StatefulSet"}
    assert set(re.findall(r"kubectl exec ([\w-]+)-0 ", page)) <= names
    assert set(re.findall(r"statefulset[/ ]([\w-]+)", page)) == names
