"""numpy's generator is seeded for each sample also where only the dataset imports it, and imported by nobody else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
from torch.utils.data import Dataset
from torchloom.data import ElasticLoader

class Noise(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        was_imported = "numpy.random" in sys.modules
        if index < 2:
            return [0.0, was_imported]
        import numpy
        return [numpy.random.rand(), was_imported]

CASES = [("sample", 1), ("sample", 2), ("worker", 1)]

def epoch(loaders, seeding):
    torch.manual_seed(5)
    loader = ElasticLoader(Noise(), batch_size=2, num_workers=loaders, seeding=seeding)
    return [sample for drawn, was in loader for sample in zip(drawn.tolist(), was.tolist())]

before = "numpy.random" in sys.modules
found = {f"{seeding} {loaders}": epoch(loaders, seeding) for seeding, loaders in CASES}
after = "numpy.random" in sys.modules
found["sample 0"] = epoch(0, "sample")
import numpy
drawn = numpy.random.rand()
print(json.dumps({"found": found, "imported": [before, after], "drawn": drawn}))
"""


def run() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    document: dict[str, object] = json.loads(done.stdout)
    return document


@pytest.mark.long
def test_a_sample_draws_the_same_wherever_numpy_is_imported() -> None:
    first, second = run(), run()
    assert first["imported"] == [False, False]
    found = first["found"]
    assert isinstance(found, dict)
    assert [was for _, was in found["sample 1"]] == [0, 0, 0] + [1] * 9  # the first that draws imports it
    numbers = {name: [drawn for drawn, _ in samples] for name, samples in found.items()}
    assert numbers["sample 0"] == numbers["sample 1"] == numbers["sample 2"]
    assert len({*numbers["sample 0"][2:]}) == 10
    assert second["found"] == found, "also as torch seeds its workers"
    assert first["drawn"] != second["drawn"], "the training process draws numbers of its own"
