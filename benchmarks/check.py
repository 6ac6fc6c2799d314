"""Compare the ratios of a benchmark with the committed ones; fail if one got worse.

    python -m benchmarks.check                       # runs a short part first, about three minutes
    python -m benchmarks.check build/bench.json      # what `make bench` wrote

Ratios within one run depend little on the machine's speed, so they can be compared between runs; a
ratio that is more than 15 % larger than the committed one is a regression.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import ttft
from benchmarks.ttft_rows import ratios

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMITTED: Final = Path(__file__).parent / "results" / "ttft.json"
SHORT: Final = Path("build/bench-check.json")
TOLERANCE: Final = 0.15
ALIKE: Final = ("shape", "dtype", "device", "chunk", "prefix")


@dataclass(frozen=True)
class Comparison:
    """Ratios of two reports.

    Attributes:
        common: Per name the committed and the fresh ratio.
        only_committed: Names that were not measured now.
        only_fresh: Names that have no committed ratio.
    """

    common: Mapping[str, tuple[float, float]]
    only_committed: tuple[str, ...]
    only_fresh: tuple[str, ...]

    @property
    def regressions(self) -> dict[str, tuple[float, float]]:
        """Those that are more than `TOLERANCE` larger now."""
        return {
            name: (old, new)
            for name, (old, new) in self.common.items()
            if new > old * (1 + TOLERANCE)
        }

    @property
    def remark(self) -> str:
        """One sentence about rows that only one of the reports has, or ""."""
        if not self.only_committed and not self.only_fresh:
            return ""
        return (
            f"not compared: {len(self.only_committed)} committed ratios that were not measured now"
            f" and {len(self.only_fresh)} measured ones that are not committed"
        )


def compare(committed: Mapping[str, Any], fresh: Mapping[str, Any]) -> Comparison:
    """Lay the ratios of two reports side by side.

    Raises:
        ValueError: If they are of different models or devices, are of another benchmark, or have
            nothing in common.
    """
    for name in ALIKE:
        if name not in committed or name not in fresh:
            raise ValueError(f"a report does not say its {name}; measure again with make bench")
        if committed[name] != fresh[name]:
            raise ValueError(
                f"the reports differ in {name} ({committed[name]} and {fresh[name]}); compare "
                "runs of the same command"
            )
    old, new = ratios(committed), ratios(fresh)
    common = {name: (ratio, new[name]) for name, ratio in old.items() if name in new}
    if not common:
        raise ValueError("the reports have no ratio in common; measure one of the same contexts")
    return Comparison(
        common,
        tuple(name for name in old if name not in new),
        tuple(name for name in new if name not in old),
    )


def table(rows: Mapping[str, tuple[float, float]]) -> str:
    """Name, committed ratio, fresh ratio, change."""
    lines = [f"{'ratio':<58}{'committed':>10}{'now':>9}{'change':>9}"]
    for name, (old, new) in rows.items():
        lines.append(f"{name:<58}{old:>10.4f}{new:>9.4f}{100 * (new / old - 1):>+8.1f}%")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print; 1 if something got worse or cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("fresh", type=Path, nargs="?", help="a report; a short part is run if none")
    parser.add_argument("--committed", type=Path, default=COMMITTED)
    parsed = parser.parse_args(arguments)
    fresh = parsed.fresh
    if fresh is None:
        fresh = SHORT
        short = ["--preset", "short", "--naive-rounds", "0", "--no-memory", "--json", str(fresh)]
        ttft.main(short)
    try:
        found = compare(
            *(json.loads(path.read_text("utf-8")) for path in (parsed.committed, fresh))
        )
    except (OSError, ValueError) as error:
        print(f"bench-check: {error}", file=sys.stderr)
        return 1
    worse = found.regressions
    print(table(worse or found.common))
    if found.remark:
        print(found.remark)
    limit = f"more than {100 * TOLERANCE:.0f} %"
    print(f"{len(worse)} of {len(found.common)} ratios are {limit} worse than the committed ones")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
