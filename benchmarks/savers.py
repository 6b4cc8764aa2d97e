"""A state as training has it, and who can save it: torchLoom, torch.save, torch.distributed.checkpoint, a memcpy."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.pending_save import PendingSave

LAYERS = 16


class Training:
    """A transformer, and the state of AdamW for it: of each parameter a weight, exp_avg, exp_avg_sq, and the step."""

    def __init__(self, megabytes: float, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        parameters = megabytes * 1e6 / 12
        width = max(8, int((parameters * 0.75 / (layers * 12)) ** 0.5) // 8 * 8)  # a layer has 12 width² parameters
        blocks = [torch.nn.TransformerEncoderLayer(width, 4, 4 * width) for _ in range(layers)]
        self.model = torch.nn.Sequential(torch.nn.Embedding(max(1, int(parameters / 4 / width)), width), *blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for weight in self.model.parameters():  # no step: its gradients would hide in the peak what saving adds
            average = {"exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
            self.optimizer.state[weight] = {"step": torch.tensor(1.0), **average}

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def work(self, seconds: float) -> None:
        """What a training loop has done when it saves: computed, and written every value, as an optimizer does.

        A machine that has slept copies memory at half its speed for a while, whoever does it.
        """
        end = time.perf_counter() + seconds
        with torch.no_grad():
            while time.perf_counter() < end:
                self.model(torch.arange(64).reshape(8, 8))
                for tensor in tensors(self.state()):
                    tensor.mul_(1.0)

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in tensors(self.state()))


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(item)


class Saver(Protocol):
    """Each save goes to a new place. All of them ask the live objects for their state, inside the measured time."""

    def begin(self, path: Path) -> None:
        """What training waits for."""

    def done(self) -> bool:
        """Whether nothing goes on behind."""

    def finish(self) -> None:
        """Until it is durable."""


class TorchLoom:
    def __init__(self, training: Training, folder: Path) -> None:
        self.folder = folder
        self._state = {"model": training.model, "optimizer": training.optimizer}
        self._checkpoints = Checkpoints(folder)
        self._saving: PendingSave | None = None

    def begin(self, path: Path) -> None:
        assert path.parent == self.folder
        self._saving = self._checkpoints.save(int(path.name.removeprefix("step-")), self._state)

    def done(self) -> bool:
        return self._saving is None or self._saving.done

    def finish(self) -> None:
        if self._saving is None or not self._checkpoints.wait() or self._saving.error:
            raise RuntimeError(f"nothing was saved: {self._saving}")

    def close(self) -> None:
        self._checkpoints.close()


class TorchSave:
    def __init__(self, training: Training) -> None:
        self._training = training
        self._path = Path()

    def begin(self, path: Path) -> None:
        self._path = path
        torch.save(self._training.state(), path)

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        sync(self._path)
        sync(self._path.parent)


class Dcp:
    """async_save as a script would call it, with a stager of its own (its buffers stay) or the one it makes itself."""

    def __init__(self, training: Training, stager: str = "cached") -> None:
        self._training = training
        # Pinned and shared memory and copies that do not block are for GPUs and for other processes.
        options = StagingOptions(False, False, stager == "async", False)
        self._stager = DefaultStager(options) if stager in {"cached", "async"} else None
        self._writer = stager == "writer"
        self._upload: Any = None

    def begin(self, path: Path) -> None:
        """An asynchronous stager returns before the copy is made: training may go on, but not change anything yet."""
        where: Any = {"storage_writer": dcp.FileSystemWriter(path)} if self._writer else {"checkpoint_id": path}
        answer: Any = dcp.async_save(self._training.state(), async_stager=self._stager, no_dist=True, **where)
        if hasattr(answer, "staging_completion"):
            answer.staging_completion.result()
            answer = answer.upload_completion
        self._upload = answer

    def done(self) -> bool:
        return bool(self._upload.done())

    def finish(self) -> None:
        self._upload.result()


class Memcpy:
    """What no copy out can be faster than: the same bytes into buffers that are there already."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._buffers: list[torch.Tensor] = []

    def begin(self, _path: Path) -> None:
        found = list(tensors(self._training.state()))
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in found]
        with torch.no_grad():
            for buffer, tensor in zip(self._buffers, found, strict=True):
                buffer.copy_(tensor)

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        """There is nothing behind it."""


def sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
