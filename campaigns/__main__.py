"""Run every campaign: `python -m campaigns [--seed N] [--minutes M] [NAME …]`."""

from __future__ import annotations

import argparse
import random
import sys
import time

from campaigns import control, hangs, protocol, recovery, spine

CAMPAIGNS = {
    "spine": spine.run, "protocol": protocol.run, "control": control.run, "recovery": recovery.run, "hangs": hangs.run,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CAMPAIGNS], help="default: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--minutes", type=float, default=4.0, help="for each campaign")
    args = parser.parse_args()
    failed = 0
    for name in args.names or list(CAMPAIGNS):
        print(f"campaign {name}, seed {args.seed}, {args.minutes:g} minutes", flush=True)
        began = time.monotonic()
        problems = CAMPAIGNS[name](args.seed, args.minutes * 60)
        for problem in problems:
            print(f"  WRONG: {problem}", flush=True)
        failed += bool(problems)
        print(f"campaign {name}: {'failed' if problems else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(args.names or CAMPAIGNS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
