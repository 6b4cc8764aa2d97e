"""PyTorch's own tests of its DataLoader, with an ElasticLoader in its place.

    pytest tests/data/test_torch_own_tests.py --torch-tests path/to/pytorch/test/test_dataloader.py

The file is not part of this project, nor of any wheel: it comes from the sources of the torch that is installed. It
runs three times, in processes of its own: with torch's DataLoader, and with an ElasticLoader for each kind of seeding.
A test that fails with torch's own DataLoader says nothing about ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

REPLACEMENT = """\
from typing import TypeVar
import torch.utils.data
from torchloom.data import ElasticLoader

class DataLoader(ElasticLoader[TypeVar("Sample")]):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, seeding={seeding!r}, **kwargs)

torch.utils.data.DataLoader = DataLoader
"""
"""Stands before the file, so that every process that imports the file has it."""

DATA_PIPE = "loads a DataPipe, which an ElasticLoader refuses"
INTERNAL = "uses the list of processes inside torch's iterator"
ROUND_ROBIN = "expects that worker i loads batches i, i + n, …; any loader process loads the next batch"

DIFFERENCES = {
    "test_multiprocessing_iterdatapipe": DATA_PIPE,
    "test_multiprocessing_iterdatapipe_with_dill": DATA_PIPE,
    "test_shuffler_iterdatapipe": DATA_PIPE,
    "test_iterable_style_dataset": f"{INTERNAL}, and expects torch's sentence on a wrong length of an IterableDataset",
    "test_proper_exit": INTERNAL,
    "test_get_worker_info": INTERNAL,
    "test_ind_worker_queue": ROUND_ROBIN,
    "test_in_order_index_ds": ROUND_ROBIN,
    "test_partial_workers": INTERNAL,
    "test_segfault": "expects torch's sentence; the batch is tried again in other processes, then LoaderDied is raised",
}
"""Tests that need not pass, with the reason. They may pass."""

DIFFERENCES_OF_SAMPLE_SEEDING = {
    "test_worker_init_fn": "expects that a seed set in worker_init_fn is used; each sample is seeded after it",
}


def run(source: Path, folder: Path, before: str) -> dict[str, str]:
    """The tests of a file and how each ended: passed, skipped, failed."""
    folder.mkdir()
    (folder / source.name).write_text(before + source.read_text())
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--timeout=120"]
    command += [f"--rootdir={folder}", f"--junitxml={report}", source.name]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert report.exists(), ended.stdout + ended.stderr
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        kinds = {child.tag for child in case}
        results[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    assert results, ended.stdout + ended.stderr
    return results


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest) -> Path:
    path: str | None = request.config.getoption("--torch-tests")
    if path is None:
        pytest.skip("needs --torch-tests PATH, the file test/test_dataloader.py of PyTorch's sources")
    pytest.importorskip("expecttest", reason="PyTorch's tests need expecttest")
    return Path(path).resolve()


@pytest.fixture(scope="module")
def with_torch(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(source, tmp_path_factory.mktemp("torch") / "tests", before="")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeding", ["worker", "sample"])
def test_they_pass_with_an_elastic_loader(
    source: Path, with_torch: dict[str, str], seeding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(source, tmp_path / "tests", REPLACEMENT.format(seeding=seeding))
    reasons = DIFFERENCES | (DIFFERENCES_OF_SAMPLE_SEEDING if seeding == "sample" else {})
    unexplained = []
    with capsys.disabled():
        print(f"\nseeding={seeding!r}")
        for name, result in sorted(results.items()):
            test = name.rpartition(".")[2]
            reason = ""
            if result == "failed" and with_torch.get(name) == "failed":
                reason = "fails with torch's DataLoader too"
            elif result == "failed":
                reason = reasons.get(test, "")
                unexplained += [] if reason else [name]
            print(f"  {result:8}{name}" + (f": {reason}" if reason else ""))
    assert unexplained == []
