"""A job whose samples take time to load but no processor, and whose steps take time too: it knows its own curve.

Loading a sample waits, and so does a step: one loader gives 1 / SAMPLE_SECONDS samples/s, and training alone takes
CEILING. The job writes down what it has consumed: for each batch a line with the time (CLOCK_MONOTONIC, common to all
processes of a machine), the number of loaders and the indices. If it is asked to stop, it saves its position, and
continues there when it is started again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import torchloom
from torchloom.data import ElasticLoader

BATCH = 16


class SlowSamples(torch.utils.data.Dataset[int]):
    """A sample is its own index."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--sample-seconds", type=float, required=True)
    parser.add_argument("--ceiling", type=float, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = SlowSamples(args.samples, args.sample_seconds)
    order = torch.Generator().manual_seed(1)
    loader = ElasticLoader(samples, batch_size=BATCH, shuffle=True, num_workers=args.loaders, generator=order)
    place = args.folder / "position.pt"
    if place.exists():
        loader.load_state_dict(torch.load(place, weights_only=True))
    with torchloom.attach() as loom, (args.folder / "batches").open("a", buffering=1) as log:
        loom.watch(loader)
        for indices in loader:
            log.write(f"{time.monotonic():.4f} {loader.num_workers} {' '.join(map(str, indices.tolist()))}\n")
            time.sleep(len(indices) / args.ceiling)
            loom.step(samples=len(indices))
            if loom.stopping:
                save(loader.state_dict(), place)
                (args.folder / "stopped").write_text(f"{time.monotonic():.4f}")
                return
        finished = time.monotonic()
    (args.folder / "finished").write_text(f"{finished:.4f}")


def save(state: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".writing")
    torch.save(state, beside)
    beside.replace(path)


if __name__ == "__main__":
    main()
