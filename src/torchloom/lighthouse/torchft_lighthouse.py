"""`python -m torchloom.lighthouse.torchft_lighthouse`: torchft's own lighthouse as a process that obeys signals.

`loom run --torchft --lighthouse stock` starts it, for comparison and to rule out a fault in torchLoom's lighthouse.
It detects a dead replica only by the heartbeat timeout, and loses its state when it is killed.
"""

from __future__ import annotations

import argparse
import signal
import sys


def main() -> int:
    prog = "python -m torchloom.lighthouse.torchft_lighthouse"
    parser = argparse.ArgumentParser(prog, description="torchft's own lighthouse", allow_abbrev=False)
    parser.add_argument("--bind", required=True, metavar="HOST:PORT")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N")
    parser.add_argument("--join-timeout-ms", type=int, default=60_000, metavar="MS")
    parser.add_argument("--heartbeat-timeout-ms", type=int, default=5_000, metavar="MS")
    args = parser.parse_args()
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # for its threads too, so that the wait below alone hears them
    try:
        from torchft.coordination import LighthouseServer  # type: ignore[import-untyped]
    except ImportError as error:
        print(f"lighthouse: it needs torchft: {error}\n  → pip install 'torchloom[torchft]'", file=sys.stderr)
        return 1
    try:
        server = LighthouseServer(**vars(args))  # its parameters have the names of the options
    except RuntimeError as error:
        print(f"lighthouse: {args.bind}: {error}", file=sys.stderr)
        return 1
    print(f"torchft's own lighthouse at {server.address()}", flush=True)
    signal.sigwait(ends)
    server.shutdown()
    print("stopped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
