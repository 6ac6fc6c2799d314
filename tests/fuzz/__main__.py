"""Fuzz one target: `python -m tests.fuzz TARGET --seconds 60`, or `--executions 1000000`."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.fuzzing import ENGINES, BrokenLaw, best_engine, fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Fuzz; 1 if an input broke the target's law."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--executions", type=int, default=0, help="inputs, at most")
    parser.add_argument("--seconds", type=int, default=0, help="time, at most")
    parser.add_argument("--engine", choices=ENGINES, default=best_engine())
    parser.add_argument("--seed", type=int, default=0, help="another one, other inputs")
    given = parser.parse_args()
    if given.executions < 1 and given.seconds < 1:
        parser.error("give --executions or --seconds")
    limits = {"executions": given.executions, "seconds": given.seconds}
    try:
        run = fuzz(given.target, given.engine, seed=given.seed, **limits)
    except BrokenLaw as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{run}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
