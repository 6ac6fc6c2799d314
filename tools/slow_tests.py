"""Write `tests/slow.txt`, the tests that `make test` leaves to `make test-all`.

    .venv/bin/pytest tests integrations lab -n 2 --junitxml build/junit.xml
    python tools/slow_tests.py build/junit.xml

Functions are taken in the order of the seconds that they took, over all of their parameters that
`make test` runs, until there are `--seconds` of them; the others are slow.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).resolve().parent.parent
SECONDS: Final = 420.0
sys.path.insert(0, str(ROOT / "tests"))


def measured(junit: Path) -> Iterator[tuple[str, str, float]]:
    """File and function, parameters, and seconds of each test."""
    for case in ElementTree.parse(junit).iter("testcase"):
        function, _, parameters = case.attrib["name"].partition("[")
        # Not the file, which is that of the contract where a test is inherited.
        module, _, nested = case.attrib["classname"].rpartition(".")
        if not nested[:1].isupper():
            module, nested = case.attrib["classname"], ""
        where = f"{module.replace('.', '/')}.py" + (f"::{nested}" if nested else "")
        yield f"{where}::{function}", parameters.rstrip("]"), float(case.attrib["time"])


def slow(tests: Iterable[tuple[str, str, float]], seconds: float) -> list[str]:
    """Functions beyond so many seconds, those of a whole file by its name alone."""
    import_module("zoo")  # whose names are asked for
    is_of_others = import_module("quick").is_of_others
    took: dict[str, float] = defaultdict(float)
    for function, parameters, time in tests:
        took[function] += 0.0 if is_of_others(parameters) else time
    quick, spent = set[str](), 0.0
    for function, time in sorted(took.items(), key=lambda pair: pair[1]):
        spent += time
        if spent > seconds:
            break
        quick.add(function)
    files = {function.partition("::")[0] for function in quick}
    found = set[str]()
    for function in took.keys() - quick:
        file = function.partition("::")[0]
        found.add(function if file in files else file)
    return sorted(found)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("junit", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="on one core")
    arguments = parser.parse_args()
    names = slow(measured(arguments.junit), arguments.seconds)
    Path(import_module("quick").SLOW).write_text(
        "".join(f"{name}\n" for name in names), encoding="utf-8"
    )
    print(f"{len(names)} files and functions are slow")
    return 0


if __name__ == "__main__":
    sys.exit(main())
