"""What the peers' benchmark found: rows, who ends sooner, and a table by context and threads."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from operator import eq, itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Right: TypeAlias = "Mapping[tuple[str, str, str], Mapping[str, Any]]"
"""Right answers by model, side and kind: an interval, and of how many rows."""


def prompt_key(record: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """What two records of equal prompts have in common."""
    return record["model"], record["context"], record["order"], record["question"]


LENGTHS: Final = (16, 64, 256)
"""Generated tokens for which end-to-end times are told."""
# Ours, and the peers whose weights take about as many bits.
PAIRS: Final = (
    ("ours-auto", "llama-BF16"),
    ("ours-int8", "llama-Q8_0"),
    ("ours-int4", "llama-file"),
    ("ours-llama", "llama-file"),
    ("ours-auto", "stock"),
    ("ours-auto", "kvboost"),
    ("ours-auto", "vllm"),
    ("ours-auto", "lmcache"),
)
# A case, what ours is asked there, and what a peer is.
CASES: Final = (
    ("new order, Reuse()", "reorder", ("reorder", "shift")),
    ("new order, BestFew()", "few-reorder", ("reorder", "shift")),
    ("same beginning, Reuse()", "prefix", ("prefix",)),
    ("same beginning, BestFew()", "few-prefix", ("prefix",)),
    ("nothing known", "full", ("cold",)),
    ("nothing known, chunks kept", "cold", ("cold",)),
)
_SAMPLE_DIGITS: Final = 4


@dataclass(frozen=True)
class Agreement:
    """How equal answers are to those of a full prefill of the same weights.

    Attributes:
        prompts: Compared.
        first_equal: Share whose first token is the same.
        all_equal: Share whose tokens are all the same.
        equal_tokens: From the first one on until the first other one, on average.
        tokens: Compared per prompt.
    """

    prompts: int
    first_equal: float
    all_equal: float
    equal_tokens: float
    tokens: int


@dataclass(frozen=True)
class Row:
    """One side in one case.

    Attributes:
        model: Of the run.
        side: Of `peers.SIDES`.
        kind: Of job.
        threads: Of the side.
        context: Tokens of the chunks.
        samples: How often it was asked.
        first_p50: Seconds to the first token.
        first_p95: The same; with few samples nearly the longest.
        first_mean: The same.
        step_p50: Seconds per further token, over all kinds of this side, threads and context.
        step_p95: The same.
        new: Tokens that were generated each time.
        total_p50: Seconds until the last of them.
        ends: End-to-end seconds per number of generated tokens, from `first` and `step_p50`.
        reused: Tokens of the prompt that were not computed for it, the median.
        peak_mib: The largest resident set while it was asked.
        anon_mib: Of that, what is no file's, after it.
        firsts: All samples.
        agreement: With a full prefill of the same weights, None if none was compared.
        read: Chunks that an answer was computed from, on average; None where the side does not say.
    """

    model: str
    side: str
    kind: str
    threads: int
    context: int
    samples: int
    first_p50: float
    first_p95: float
    first_mean: float
    step_p50: float
    step_p95: float
    new: int
    total_p50: float
    ends: Mapping[str, float]
    reused: float
    peak_mib: float
    anon_mib: float
    firsts: tuple[float, ...]
    agreement: Agreement | None
    read: float | None

    @property
    def first(self) -> float:
        """What is compared: the mean where a policy reads more documents for some questions."""
        return compared(self.kind, self.first_p50, self.first_mean)


@dataclass(frozen=True)
class Crossover:
    """Ours against a peer in one case.

    Attributes:
        model: Of the run.
        case: Of `CASES`.
        ours: Side.
        peer: Side.
        kind: The peer's kind of job.
        threads: Of both.
        context: Tokens of the chunks.
        first_ratio: The peer's seconds to the first token, over ours.
        step_ratio: The peer's seconds per further token, over ours.
        peer_from: From how many generated tokens on the peer is done sooner; None for never.
        ours_from: The same of ours.
    """

    model: str
    case: str
    ours: str
    peer: str
    kind: str
    threads: int
    context: int
    first_ratio: float
    step_ratio: float
    peer_from: int | None
    ours_from: int | None


def crossover(first: float, step: float, other_first: float, other_step: float) -> int | None:
    """From how many generated tokens on the other one ends sooner, for good; None for never.

    Args:
        first: Seconds to the first token.
        step: Seconds per further token.
        other_first: The other one's.
        other_step: The other one's.
    """
    if other_step > step or (other_step == step and other_first >= first):
        return None  # it may be ahead at first, but not from some number on
    if other_first < first:
        return 1
    if other_step == step:
        return None
    behind = other_first - first
    further = int(behind / (step - other_step)) + 1
    while further > 1 and other_first + (further - 1) * other_step < first + (further - 1) * step:
        further -= 1  # rounding may have gone one too far
    while other_first + further * other_step >= first + further * step:
        further += 1
    return 1 + further


def end_to_end(first: float, step: float, tokens: int) -> float:
    """Seconds until so many tokens are there."""
    return first + (tokens - 1) * step


def percentile95(values: Sequence[float]) -> float:
    """The 95th percentile, interpolated."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def weights_of(side: str) -> str:
    """Sides with the same weights, computed the same way, are exact for each other."""
    return "stock" if side == "kvboost" else side


def exact_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Whose answers a record's can be compared with: those to the same prompt."""
    return (weights_of(record["side"]), record["threads"], *prompt_key(record))


def exact_answers(
    records: Iterable[Mapping[str, Any]],
) -> dict[tuple[Any, ...], Sequence[int]]:
    """Tokens after a prefill in which nothing is approximate, by weights, threads and prompt."""
    found: dict[tuple[Any, ...], Sequence[int]] = {}
    for one in records:
        if "error" not in one and is_exact(one["side"], one["kind"]):
            found[exact_key(one)] = one["tokens"]
    return found


def agreement(
    answers: Iterable[tuple[Sequence[int], Sequence[int] | None]],
) -> Agreement | None:
    """Over pairs of an answer and the exact one, None where none is there."""
    pairs = [(tokens, exact) for tokens, exact in answers if exact is not None]
    if not pairs:
        return None
    same = [sum(1 for _ in takewhile(bool, map(eq, *pair))) for pair in pairs]
    lengths = [min(map(len, pair)) for pair in pairs]
    return Agreement(
        prompts=len(pairs),
        first_equal=sum(count > 0 for count in same) / len(pairs),
        all_equal=sum(map(eq, same, lengths)) / len(pairs),
        equal_tokens=statistics.mean(same),
        tokens=max(lengths),
    )


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per model, side, kind, threads and context; what failed is in none."""
    place = itemgetter("model", "threads", "context", "side")
    steps: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    good = [one for one in records if "error" not in one]
    for one in good:
        if len(one["tokens"]) > 1:
            steps[place(one)].append(one["step"])
    exact = exact_answers(good)
    found = []
    by = itemgetter("model", "threads", "context", "kind", "side")
    for (model, threads, context, kind, side), some in groupby(sorted(good, key=by), by):
        group = list(some)
        firsts = [one["ttft"] for one in group]
        own = steps[model, threads, context, side] or [0.0]
        middle, mean = statistics.median(firsts), statistics.fmean(firsts)
        first, step = compared(kind, middle, mean), statistics.median(own)
        # An exact answer is not compared with itself.
        pairs = [
            (one["tokens"], exact.get(exact_key(one))) for one in group if not is_exact(side, kind)
        ]
        counts = [one["read"] for one in group if "read" in one]
        found.append(
            Row(
                model=model,
                side=side,
                kind=kind,
                threads=threads,
                context=context,
                samples=len(group),
                first_p50=middle,
                first_p95=percentile95(firsts),
                first_mean=mean,
                step_p50=step,
                step_p95=percentile95(own),
                new=max(len(one["tokens"]) for one in group),
                total_p50=statistics.median(one["total"] for one in group),
                ends={str(tokens): end_to_end(first, step, tokens) for tokens in LENGTHS},
                reused=statistics.median(one["reused"] for one in group),
                peak_mib=max(one["peak_mib"] for one in group),
                anon_mib=max(one["anon_mib"] for one in group),
                firsts=tuple(round(value, _SAMPLE_DIGITS) for value in firsts),
                agreement=agreement(pairs),
                read=statistics.fmean(counts) if counts else None,
            )
        )
    return found


def compared(kind: str, median: float, mean: float) -> float:
    """Seconds of a kind of job that stand for it."""
    return mean if kind.startswith("few-") else median


def is_exact(side: str, kind: str) -> bool:
    """Whether nothing is approximate in a kind of a side's, though no beginning was computed."""
    if side.startswith("ours"):
        return kind == "full"
    return side != "kvboost" and kind in ("cold", "reorder")


def crossovers(rows: Iterable[Row]) -> list[Crossover]:
    """Every pair in every case that both were measured in."""
    known = {(row.model, row.threads, row.context, row.side, row.kind): row for row in rows}
    found = []
    for place in dict.fromkeys(key[:3] for key in known):
        for case, kind, kinds in CASES:
            for ours, peer in PAIRS:
                own = known.get((*place, ours, kind))
                for theirs in kinds:
                    other = known.get((*place, peer, theirs))
                    if own is not None and other is not None:
                        found.append(_compared(case, own, other))
    return found


def _compared(case: str, own: Row, other: Row) -> Crossover:
    lines = (own.first, own.step_p50), (other.first, other.step_p50)
    return Crossover(
        model=own.model,
        case=case,
        ours=own.side,
        peer=other.side,
        kind=other.kind,
        threads=own.threads,
        context=own.context,
        first_ratio=other.first / own.first,
        step_ratio=other.step_p50 / own.step_p50 if own.step_p50 else 0.0,
        peer_from=crossover(*lines[0], *lines[1]),
        ours_from=crossover(*lines[1], *lines[0]),
    )


def failures(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What a side said when it could not do a kind of job, by model, side and kind."""
    return {
        f"{one['model']} {one['side']} {one['kind']}": one["error"]
        for one in records
        if "error" in one
    }


@dataclass(frozen=True)
class Way:
    """One line of the table: how a side is used.

    Attributes:
        name: What it is called.
        new: Kind of job for known chunks in a new order; "" where it does no such thing.
        cold: The same where nothing is known.
        same: The same for the same chunks in the same order.
        right: Side and kind that have its answers.
    """

    name: str
    new: str
    cold: str
    same: str
    right: tuple[str, str]


def exact_side(side: str) -> tuple[str, str]:
    """Side and kind that answer as a side's weights do when everything is computed."""
    if side in ("ours-int8", "ours-int4", "ours-llama"):
        return side, "full"
    if side in ("llama-Q8_0", "llama-file"):
        return side, "cold"
    return "ours-auto", "full"  # unrounded it is one model, whoever computes it


def ways(side: str) -> tuple[Way, ...]:
    """How a side is used."""
    if side.startswith("ours"):
        return (
            Way("Reuse()", "reorder", "cold", "prefix", (side, "reorder")),
            Way("BestFew()", "few-reorder", "few-cold", "few-prefix", (side, "few-reorder")),
            Way("full prefill", "", "full", "", (side, "full")),
        )
    if side == "kvboost":
        return (Way("", "reorder", "cold", "prefix", (side, "reorder")),)
    own = Way("", "reorder", "cold", "prefix", exact_side(side))
    if side.startswith("llama"):
        return (own, Way("--cache-reuse", "shift", "", "", (side, "shift")))
    return (own,)


MEASURES: Final = ("new order s", "cold s", "same beginning s", "further token ms", "peak MiB")


def table_of(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A line per model, threads, context, side and way of using it."""
    known: dict[tuple[str, int, int, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        known[row.model, row.threads, row.context, row.side][row.kind] = row
    lines = []
    ours_first = sorted(known, key=lambda at: (*at[:3], not at[3].startswith("ours"), at[3]))
    for model, threads, context, side in ours_first:
        kinds = known[model, threads, context, side]
        for way in ways(side):
            new, cold, same = (kinds.get(kind) for kind in (way.new, way.cold, way.same))
            # Memory is that of answering where something is known, if there is such a kind.
            answering = [row for row in (new, same) if row] or ([cold] if cold else [])
            if not answering:
                continue
            cells = (
                *(row and row.first for row in (new, cold, same)),
                1000 * answering[0].step_p50,
                max(row.peak_mib for row in answering),
            )
            place = {"model": model, "threads": threads, "context": context}
            lines.append(
                {**place, "side": side, "way": way.name, **dict(zip(MEASURES, cells, strict=True))}
            )
    return lines


def better_peers(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where a peer is better than every side of ours used in one way: what a page begins with.

    Right answers are left out: their intervals say more than their order.
    """
    found = []
    place = itemgetter("model", "threads", "context")
    for at in dict.fromkeys(map(place, table)):
        here = [line for line in table if place(line) == at]
        peers = [line for line in here if not line["side"].startswith("ours")]
        for way in ("Reuse()", "BestFew()"):
            ours = [line for line in here if line["way"] == way]
            for measure in MEASURES:
                own = [line for line in ours if line[measure] is not None]
                if not own:
                    continue
                best = min(own, key=itemgetter(measure))
                found += [
                    {
                        "model": at[0],
                        "threads": at[1],
                        "context": at[2],
                        "measure": measure,
                        "peer": " ".join(filter(None, (line["side"], line["way"]))),
                        "peer's": line[measure],
                        "ours": f"{best['side']} {way}",
                        "our best": best[measure],
                    }
                    for line in peers
                    if line[measure] is not None and line[measure] < best[measure]
                ]
    return found


def report_of(
    facts: Mapping[str, Any],
    sides: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """All of it, as JSON has it; right answers come beside it by `with_right`."""
    rows = rows_of(records)
    parts = ("peers", "models", "flash")
    table = table_of(rows)
    return {
        "about": {
            "benchmark": "peers",
            **{name: value for name, value in facts.items() if name not in parts},
        },
        **{name: facts[name] for name in parts},
        "sides": sides,
        "failures": failures(records),
        "table": table,
        "better peers": better_peers(table),
        "crossovers": [asdict(one) for one in crossovers(rows)],
        "rows": [asdict(row) for row in rows],
    }


def with_right(report: Mapping[str, Any], right: Right) -> dict[str, Any]:
    """The same report with right answers beside its times."""
    ways_of = {
        (side, way.name): way.right
        for side in {line["side"] for line in report["table"]}
        for way in ways(side)
    }
    table = []
    for line in report["table"]:
        way = ways_of.get((line["side"], line["way"]))
        if way is None:  # by a policy that is not asked any more
            table.append(line)
            continue
        found = right.get((line["model"], *way), {})
        shares = found.get("right") and {name: 100 * one for name, one in found["right"].items()}
        table.append({**line, "right %": shares, "of rows": found.get("rows")})
    return {**report, "table": table}
