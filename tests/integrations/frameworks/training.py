"""What the trainings with each framework share: samples that know their index, and a model that records them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from torchloom.data import ElasticLoader
from torchloom.data.epoch_iterator import EpochIterator

ROOT = Path(__file__).parents[3]
SIZE = 24
BATCH = 4


class Points(Dataset[Any]):
    """Points on a line: sample i is i, and its label."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(float(index)), "labels": torch.tensor(2.0 * index)}


class RecordingLoader(ElasticLoader):
    """Shows whose iterator a framework uses: its `iterators` are those that it gave out."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.iterators: list[EpochIterator] = []

    def __iter__(self) -> EpochIterator:
        self.iterators.append(super().__iter__())
        return self.iterators[-1]


class Line(torch.nn.Module):
    """One weight, and the indices of the samples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, index: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append([int(each) for each in index])
        return {"loss": torch.mean((self.weight * index - labels) ** 2) / SIZE**2}


def epochs(seen: list[list[int]]) -> list[list[int]]:
    """The indices of each epoch, in their order."""
    flat = [index for batch in seen for index in batch]
    return [flat[start : start + SIZE] for start in range(0, len(flat), SIZE)]


REPORT = """
def report(*values):
    import json, os, pathlib
    pathlib.Path(os.environ["REPORTS"], os.environ["RANK"]).write_text(json.dumps(values))
"""


def run_ranks(script: str, folder: Path) -> list[Any]:
    """Run a script as two ranks, and return what each gave to `report`."""
    file = folder / "script.py"
    file.write_text(REPORT + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(file)]
    environment = os.environ | {"REPORTS": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
