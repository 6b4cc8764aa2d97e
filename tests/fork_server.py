"""The fork server of a test process: it imports torch once, and every rank of a test is forked from it in milliseconds.

Python has one fork server per process, and the last list of modules to preload wins. Hence one list, here.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pytest",
        "numpy.random",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.utils.serialization.config",
        "torchloom.checkpoints.api",
        "torchloom.checkpoints.sharded_load",
        "torchloom.threadlet.threadlet",
        "tests.checkpoints.script",
        "tests.checkpoints.training",
        "tests.checkpoints.victims",
        "tests.flow.ddp",
    ]
)
"""A module that cannot be imported is passed over: ranks would import it again, each for itself."""
