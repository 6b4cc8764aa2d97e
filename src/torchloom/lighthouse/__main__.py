"""`python -m torchloom.lighthouse`: what `loom lighthouse` does, without the rest of `loom`."""

from __future__ import annotations

import argparse
import sys

from torchloom.errors import TorchLoomError
from torchloom.lighthouse.main import run, run_stock
from torchloom.lighthouse.options import add_options, read_options
from torchloom.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchloom.lighthouse", description=__doc__, allow_abbrev=False)
    add_options(parser)
    parser.add_argument("--state", metavar="PATH", help="the state folder; default: TORCHLOOM_STATE")
    parser.add_argument("--stock", action="store_true", help="run torchft's own lighthouse instead")
    args = parser.parse_args()
    try:
        settings = Settings.from_env().with_state(args.state)
        return run_stock(read_options(args)) if args.stock else run(settings, read_options(args))
    except TorchLoomError as error:
        print(f"lighthouse: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  → {error.hint}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
