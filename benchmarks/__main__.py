"""`python -m benchmarks`: run them all, one after the other, and say which targets were met."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.plane import ROOT, die_tidily
from benchmarks.report import TARGETS, Figures, table, verdicts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="smoke runs: do they work at all? Targets are not judged")
    args = parser.parse_args()
    names = args.names or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"there is no benchmark {', '.join(unknown)}")
    die_tidily()
    found = {name: run(name, ["--quick"] if args.quick else []) for name in names}
    rows = [(f"{name}.{key}", *rest) for name in names for key, *rest in verdicts(name, found[name] or {})]
    table("summary", [("figure", "found", "target", ""), *rows])
    broken = [name for name in names if found[name] is None]
    print(f"\nfailed to run: {', '.join(broken)}" if broken else "")
    print(json.dumps(found))
    return 1 if broken or (not args.quick and any(row[-1] == "MISSED" for row in rows)) else 0


def run(name: str, words: list[str]) -> Figures | None:
    """One benchmark in a process of its own, its output passed on; None if it failed."""
    print(f"\n━━ {name} " + "━" * (76 - len(name)), flush=True)
    last = ""
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line if line.strip() else last
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # Ctrl-C reached it too, and it is tidying up already
                process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        return None
    figures: Figures = json.loads(last)
    return figures


if __name__ == "__main__":
    sys.exit(main())
