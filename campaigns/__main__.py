"""Run every campaign: `python -m campaigns [--seed N] [--minutes M] [NAME …]`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from campaigns import control, examples, hangs, lighthouse, protocol, recovery, spine, torchft

CAMPAIGNS: dict[str, tuple[Callable[[int, float], list[str]], float]] = {
    "examples": (examples.run, 1.0),
    "spine": (spine.run, 1.0),
    "protocol": (protocol.run, 1.0),
    "control": (control.run, 1.5),
    "recovery": (recovery.run, 1.0),
    "hangs": (hangs.run, 2.0),
    "lighthouse": (lighthouse.run, 3.0),
    "torchft": (torchft.run, 10.0),
}
"""Each with the minutes it takes if nothing else is said. All of them and the long tests end within 40 minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CAMPAIGNS], help="default: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--minutes", type=float, help="for each campaign")
    args = parser.parse_args()
    failed = 0
    for name in args.names or list(CAMPAIGNS):
        campaign, minutes = CAMPAIGNS[name]
        minutes = minutes if args.minutes is None else args.minutes
        print(f"campaign {name}, seed {args.seed}, {minutes:g} minutes", flush=True)
        began = time.monotonic()
        problems = campaign(args.seed, minutes * 60)
        for problem in problems:
            print(f"  WRONG: {problem}", flush=True)
        failed += bool(problems)
        print(f"campaign {name}: {'failed' if problems else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(args.names or CAMPAIGNS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
