"""Small trials in a process of their own, so that what hangs or dies there is found and harms nobody.

    python -m torchloom.agent.node_check.trials compute             one product of matrices, timed
    python -m torchloom.agent.node_check.trials exchange HOST PORT RANK   the sum of some numbers with a peer, timed

Each prints one line of JSON. `run` starts one, and kills it when it takes too long. Heavy packages
are imported only there, so that the process that starts a trial needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import msgspec

from torchloom.agent.monitor.exit_evidence import describe_exit
from torchloom.protocol.phrase import phrase
from torchloom.shared.json_decoding import decoder

SIZE = 512
"""Rows of the matrices."""
TIMES = 20
MEGABYTES = 16
"""That two nodes exchange, several times."""
ROUNDS = 5
COMPUTE_SECONDS = 90.0
"""Longest that a computation may take, with the import of torch, on a machine that has other things to do."""
EXCHANGE_SECONDS = 60.0


def run(words: tuple[str, ...], seconds: float, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a trial found; `trouble` says why there is nothing. Blocks; call it in a thread."""
    command = [sys.executable, "-P", "-m", "torchloom.agent.node_check.trials", *words]
    own = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "MASTER_ADDR"}}
    process = subprocess.Popen(
        command, env=own | dict(env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver is left to it
            process.communicate(timeout=1.0)
        return {"trouble": phrase("trial_timed_out", seconds=seconds)}
    with contextlib.suppress(msgspec.MsgspecError, IndexError):
        return decoder(dict[str, Any])(out.strip().splitlines()[-1].encode())
    last = err.strip().splitlines()
    how = describe_exit(process.returncode)
    return {"trouble": phrase("trial_died", how=how, line=last[-1][:300] if last else "")}


def compute() -> dict[str, Any]:
    """On the GPU that is visible, else on one core: what is compared must not depend on how many there are."""
    try:
        torch = import_module("torch")
    except ImportError:
        return _with_numpy()
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    one = torch.ones(SIZE, SIZE, device="cuda" if cuda else "cpu")

    def multiply() -> bool:
        product = one @ one
        return bool((product == SIZE).all().item())  # which also waits for the device

    seconds, right = _timed(multiply)
    return {"on": torch.cuda.get_device_name() if cuda else "torch", "cuda": cuda, "seconds": seconds, "right": right}


def _with_numpy() -> dict[str, Any]:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        np = import_module("numpy")
    except ImportError:
        return {"on": ""}
    one = np.ones((SIZE, SIZE), dtype=np.float32)
    seconds, right = _timed(lambda: bool((one @ one == SIZE).all()))
    return {"on": "numpy", "cuda": False, "seconds": seconds, "right": right}


def _timed(multiply: Callable[[], bool]) -> tuple[float, bool]:
    """The shortest of some: what else the machine does makes it longer, never shorter."""
    right, best = multiply(), float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        right = multiply() and right
        best = min(best, time.perf_counter() - began)
    return best, right


def exchange(host: str, port: str, rank: str) -> dict[str, Any]:
    try:
        torch, dist = import_module("torch"), import_module("torch.distributed")
    except ImportError:
        return {"torch": False}
    from datetime import timedelta

    where = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    limit = timedelta(seconds=EXCHANGE_SECONDS / 2)
    dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=2, timeout=limit)
    numbers = torch.ones(MEGABYTES * 1024 * 1024 // 4)
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        numbers.fill_(1.0)
        began = time.perf_counter()
        dist.all_reduce(numbers)
        best = min(best, time.perf_counter() - began)
    right = bool((numbers == 2).all())
    dist.barrier()
    dist.destroy_process_group()
    return {"mb_per_second": MEGABYTES / best, "right": right}


def main(words: list[str]) -> None:
    result = {"compute": compute, "exchange": exchange}[words[0]](*words[1:])  # type: ignore[operator]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
