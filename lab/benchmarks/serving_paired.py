"""Arms of `benchmarks.serving` beside each other, request by request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.report_tables import markdown
from benchmarks.serving_results import AHEAD, NO_CACHE, OWN, SHARED, against, rates, runs_of
from kvcache_rag_lab.scoring.statistics import LEAST_DIFFERING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.serving_results import Against


def paired(report: Mapping[str, Any]) -> str:
    """The section about all pairs of arms."""
    block = report["setup"]["block"]
    text = (
        "Latencies of the same requests in two arms, paired; 95 % intervals by bootstrap. Requests "
        f"that wait in the same queue fare alike, so blocks of {block} consecutive ones are drawn "
        f"together (no interval from fewer than {LEAST_DIFFERING}); beside it the interval of "
        "requests drawn one by one, which is too narrow. One run of each arm: the intervals say "
        "nothing of what another run on another day would give."
    )
    return f"## Arms, paired\n\n{text}\n\n{table(report)}\n\n"


def table(report: Mapping[str, Any]) -> str:
    """A row per stream, rate and pair of arms that were run."""
    rows = []
    for stream, factor in rates(report):
        runs = runs_of(report, stream, factor)
        for better, than in ((AHEAD, OWN), (AHEAD, SHARED), (SHARED, OWN), (AHEAD, NO_CACHE)):
            if {better, than} <= runs.keys():
                cells = _cells(against(runs, better, than))
                rows.append([stream, f"{factor:g}x", f"{better} against {than}", *cells])
    header = ["stream", "rate", "arms", "seconds saved", "one by one", "latency, of the other's"]
    return markdown([*header, "excludes 0"], rows)


def _cells(found: Against) -> list[str]:
    saved, alone, ratio = found.saved, found.alone, found.ratio
    one_by_one = f"[{alone.low:+.3f}, {alone.high:+.3f}]"
    if not found.has_interval:
        return [f"{saved.difference:+.3f}", one_by_one, f"{ratio.value:.3f}", "too few requests"]
    return [
        f"{saved.difference:+.3f} [{saved.low:+.3f}, {saved.high:+.3f}]",
        one_by_one,
        f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        "yes" if saved.ranked else "no",
    ]
