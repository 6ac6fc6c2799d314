"""Compare the ratios of a benchmark with the committed ones; fail if one got worse.

    python -m benchmarks.check                       # runs a short part first, five to ten minutes
    python -m benchmarks.check build/bench.json      # what `make bench` wrote

Ratios within one run depend little on the machine's speed, so they can be compared between runs.
Those of decoding (stock's tokens per second over ours) depend on the processor, so on another one
than the committed report's they are shown and not judged; those of first tokens and of memory are
judged everywhere.  A ratio that is more than 15 % larger than the committed one is a regression.
It is called one only where the whole 95 % interval of the change says so: that of the paired
rounds, widened by what the committed rounds leave open.  Where the interval reaches beyond 15 %,
the line says "not sure".
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import ttft
from benchmarks.common import RESULTS, processor_of
from benchmarks.ttft import OF_DECODING, ratios
from kvcache_rag_lab.scoring.statistics import quotient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.ttft import Ratio
    from kvcache_rag_lab.scoring.statistics import Interval

COMMITTED: Final = RESULTS / "ttft.json"
SHORT: Final = Path("build/bench-check.json")
DECODE_ROUNDS: Final = 16  # a round of decoding is some 10 % apart from the next
TOLERANCE: Final = 0.15
ALIKE: Final = ("shape", "dtype", "device", "chunk", "prefix")
FINE, NOT_SURE, WORSE = "fine", "not sure", "worse"
ELSEWHERE: Final = "not judged: another processor"


@dataclass(frozen=True)
class Change:
    """A ratio of two reports.

    Attributes:
        committed: What it was.
        fresh: What it is now.
        judged: Whether the two can be held against each other.
    """

    committed: Ratio
    fresh: Ratio
    judged: bool = True

    @property
    def interval(self) -> Interval:
        """The fresh ratio over the committed one."""
        return quotient(self.fresh.interval, self.committed.interval)

    @property
    def verdict(self) -> str:
        """Worse only where no part of the interval is within `TOLERANCE`."""
        if not self.judged:
            return ELSEWHERE
        limit, found = 1 + TOLERANCE, self.interval
        if self.fresh.has_interval and found.low > limit:
            return WORSE
        return NOT_SURE if found.high > limit else FINE


@dataclass(frozen=True)
class Comparison:
    """Ratios of two reports.

    Attributes:
        common: What both have, by name.
        only_committed: Names that were not measured now.
        only_fresh: Names that have no committed ratio.
        machines: Where each was measured.
    """

    common: Mapping[str, Change]
    only_committed: tuple[str, ...]
    only_fresh: tuple[str, ...]
    machines: tuple[str, str]

    @property
    def regressions(self) -> dict[str, Change]:
        """Those that are more than `TOLERANCE` larger now, beyond what chance may do."""
        return self._of(WORSE)

    @property
    def unsure(self) -> dict[str, Change]:
        """Those whose interval is too wide to tell."""
        return self._of(NOT_SURE)

    @property
    def elsewhere(self) -> dict[str, Change]:
        """Those that depend on the processor, where it is another one."""
        return self._of(ELSEWHERE)

    def _of(self, verdict: str) -> dict[str, Change]:
        return {name: one for name, one in self.common.items() if one.verdict == verdict}

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
        said = [report.get("about", {}).get(name) for report in (committed, fresh)]
        if None in said:
            raise ValueError(f"a report does not say its {name}; measure again with make bench")
        if said[0] != said[1]:
            raise ValueError(
                f"the reports differ in {name} ({said[0]} and {said[1]}); compare "
                "runs of the same command"
            )
    old, new = ratios(committed), ratios(fresh)
    machines = (committed["about"]["machine"], fresh["about"]["machine"])
    same = len(set(map(processor_of, machines))) == 1
    common = {
        name: Change(ratio, new[name], judged=same or not name.startswith(OF_DECODING))
        for name, ratio in old.items()
        if name in new
    }
    if not common:
        raise ValueError("the reports have no ratio in common; measure one of the same contexts")
    return Comparison(
        common,
        tuple(name for name in old if name not in new),
        tuple(name for name in new if name not in old),
        machines,
    )


def table(rows: Mapping[str, Change]) -> str:
    """Name, committed ratio, fresh ratio, change, its interval, verdict."""
    header = f"{'ratio':<54}{'committed':>10}{'now':>8}{'change':>9}{'95 % interval':>20}"
    lines = [f"{header}{'rounds':>8}  verdict"]
    for name, row in rows.items():
        found = row.interval
        bounds = (found.value, found.low, found.high)
        change, low, high = (f"{100 * (one - 1):+.1f}%" for one in bounds)
        interval = f"{low} to {high}" if row.fresh.has_interval else "too few rounds"
        rounds = "" if row.fresh.counted else row.fresh.rounds
        lines.append(
            f"{name:<54}{row.committed.value:>10.4f}{row.fresh.value:>8.4f}{change:>9}"
            f"{interval:>20}{rounds:>8}  {row.verdict}"
        )
    return "\n".join(lines)


def conclusion(found: Comparison) -> str:
    """What is worse and what could not be told, a sentence each."""
    worse, unsure = len(found.regressions), len(found.unsure)
    of = len(found.common) - len(found.elsewhere)
    limit = f"{100 * TOLERANCE:.0f} %"
    lines = [found.remark] if found.remark else []
    if len(set(found.machines)) > 1:
        before, now = found.machines
        lines.append(
            f"the committed ratios are of another machine ({before}) than this one ({now})"
            + (f"; {len(found.elsewhere)} of decoding are not judged" if found.elsewhere else "")
        )
    if unsure:
        lines.append(
            f"warning: {unsure} of {of} ratios may be more than {limit} worse; measure again on a "
            "quiet machine, or with more rounds"
        )
    lines.append(f"{worse} of {of} ratios are more than {limit} worse than the committed ones")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print; 1 if something got worse or cannot be compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fresh", type=Path, nargs="?", help="a report; a short part is run if none")
    parser.add_argument("--committed", type=Path, default=COMMITTED)
    parsed = parser.parse_args(arguments)
    fresh = parsed.fresh
    if fresh is None:
        fresh = SHORT
        rounds = ["--naive-rounds", "0", "--decode-rounds", str(DECODE_ROUNDS)]
        ttft.main(["--preset", "short", *rounds, "--no-memory", "--json", str(fresh)])
    try:
        found = compare(
            *(json.loads(path.read_text("utf-8")) for path in (parsed.committed, fresh))
        )
    except (OSError, ValueError) as error:
        print(f"bench-check: {error}", file=sys.stderr)
        return 1
    print(table(found.common))
    print(conclusion(found))
    return 1 if found.regressions else 0


if __name__ == "__main__":
    sys.exit(main())
