"""Run every campaign: `python -m campaigns [--seed N] [--minutes M | --short] [NAME …]`."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from campaigns import control, examples, hangs, lighthouse, loaders, protocol, recovery, spine, torchft


class Campaign(NamedTuple):
    run: Callable[[int, float], list[str]]
    """Takes a seed and seconds; returns what was wrong."""
    minutes: float
    short: float
    """Minutes with --short: what CI has time for."""


CAMPAIGNS: dict[str, Campaign] = {
    "examples": Campaign(examples.run, 1.5, 0.0),
    "spine": Campaign(spine.run, 3.0, 0.5),
    "protocol": Campaign(protocol.run, 3.0, 0.2),
    "control": Campaign(control.run, 3.5, 0.4),
    "recovery": Campaign(recovery.run, 5.0, 0.5),
    "hangs": Campaign(hangs.run, 5.0, 0.5),
    "lighthouse": Campaign(lighthouse.run, 6.0, 0.5),
    "loaders": Campaign(loaders.run, 3.0, 0.5),
    "torchft": Campaign(torchft.run, 15.0, 1.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CAMPAIGNS], help="default: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="time for each campaign")
    length.add_argument("--short", action="store_true", help="take a few minutes for all of them")
    args = parser.parse_args()
    # A shell makes programs in the background ignore Ctrl-C, and the processes that are interrupted here inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    for name in args.names or list(CAMPAIGNS):
        campaign = CAMPAIGNS[name]
        minutes = campaign.short if args.short else campaign.minutes if args.minutes is None else args.minutes
        print(f"campaign {name}, seed {args.seed}, {minutes:g} minutes", flush=True)
        began = time.monotonic()
        problems = campaign.run(args.seed, minutes * 60)
        for problem in problems:
            print(f"  WRONG: {problem}", flush=True)
        failed += bool(problems)
        print(f"campaign {name}: {'failed' if problems else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(args.names or CAMPAIGNS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
