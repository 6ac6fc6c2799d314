"""What an evaluation shows: quality with intervals, difference from full prefill, and cost.

`summarise` makes one group per task, model and number of documents; in it one row per policy and
codec, all over the same questions.  Differences from full prefill and from closed book (the same
question without documents) are always there.  A group is not scored, so that nothing in it is
called better or worse, if full prefill is right in fewer than 60 % and does not surely beat closed
book: a model that does not read its documents tells policies apart by chance only.  Groups become
JSON (`to_json`), a Markdown table each (`to_markdown`), and a plot of quality against time to the
first token, one panel per group, one below the other, and one point per policy and codec (`draw`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, is_dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag_lab.scoring.statistics import (
    Comparison,
    Interval,
    kept_ratio,
    mean_interval,
    median_interval,
    paired_bootstrap,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvcache_rag_lab.scoring.ask import Record, Records


FLOOR: Final = 0.6

SUFFIXES: Final = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which colour-blind readers can tell apart; black is for full prefill.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")

_MARKERS: Final = "osD^vPX"

_GREY: Final = "#AAAAAA"

_NOT_SCORED: Final = (
    "Not scored, so nothing is called better or worse: full prefill is below 60 % and not surely "
    "above closed book."
)

WIDTH, TEXT = 4.3, 9
"""Inches across a plot and points of its letters, which a telephone shows 10 pixels high."""

_LONGEST: Final = 24
"""Letters of names of which two stand side by side in a legend."""


@dataclass(frozen=True)
class PolicyRow:
    """One policy over chunks in one form.

    Attributes:
        policy: Its label.
        codec: Name of the codec, "" for memory.
        n: Questions.
        quality: Mean of the task's headline metric.
        scores: Means of all metrics, each over the questions of which it can be told.
        difference: Quality minus that of full prefill; None for full prefill and closed book, or
            where the former was not asked.
        above_closed: Quality minus that of closed book; None for closed book, or where it was not
            asked.
        kept: Quality as a share of that of full prefill.
        recomputed_share: Tokens computed again, as a share of the documents' (1: full prefill).
        reused_share: Smallest share of a question's chunk tokens that came from the store; what is
            missing was computed on the spot.
        ttft: Median seconds to the first token of single questions; None if none was timed.
        choose: Median seconds of these spent on choosing tokens.
        recompute: Median seconds of these spent on computing them again.
        changed: Share of answers that are not those of the same policy over the first codec; None
            for the first codec.
        divergence: Mean divergence of the first token in nats, and the largest; see `Record`.
    """

    policy: str
    codec: str
    n: int
    quality: Interval
    scores: dict[str, Interval]
    difference: Comparison | None
    above_closed: Comparison | None
    kept: Interval | None
    recomputed_share: float
    reused_share: float
    ttft: Interval | None
    choose: float | None
    recompute: float | None
    changed: Interval | None
    divergence: tuple[float, float] | None


@dataclass(frozen=True)
class Group:
    """One task on one model with one number of documents.

    Attributes:
        task: Its name.
        metric: Its headline metric.
        model: Label of the model.
        k: Documents per question, None for all.
        n: Questions that every row answered.
        scored: Whether full prefill reaches the floor or surely beats closed book; None if it was
            not asked.
        rows: In the order of the cells.
    """

    task: str
    metric: str
    model: str
    k: int | None
    n: int
    scored: bool | None
    rows: tuple[PolicyRow, ...]

    @property
    def title(self) -> str:
        """Task, model and number of documents."""
        return f"{self.task}, {self.model}" + (f", k = {self.k}" if self.k is not None else "")


_Way = tuple[str, str]  # label of the policy, codec


def summarise(records: Records, *, floor: float = FLOOR, seed: int = 0) -> list[Group]:
    """Groups of an evaluation, over the questions that all cells of a group answered.

    Args:
        records: From `evaluate`.
        floor: Quality of full prefill that needs no comparison with closed book to be scored.
        seed: Of the bootstrap.
    """
    gathered: dict[tuple[str, str, int | None], dict[_Way, dict[str, Record]]] = {}
    for record in records.rows:
        place = record.place
        ways = gathered.setdefault((place.task, place.model, place.k), {})
        ways.setdefault((place.policy, place.codec), {})[place.question] = record
    return [_group(key, ways, records, floor, seed) for key, ways in gathered.items()]


def _group(
    key: tuple[str, str, int | None],
    ways: dict[_Way, dict[str, Record]],
    records: Records,
    floor: float,
    seed: int,
) -> Group:
    task, model, k = key
    common = set.intersection(*(set(answers) for answers in ways.values()))
    first = next(iter(ways.values()))
    answered = {
        way: [answers[question] for question in first if question in common]
        for way, answers in ways.items()
    }
    metric = records.metrics[task]
    full, closed = (
        next((answers for (label, _), answers in answered.items() if label == wanted), None)
        for wanted in (records.baseline, records.closed)
    )
    rows = tuple(
        _row(way, answers, full, closed, answered, metric, seed)
        for way, answers in answered.items()
        if answers
    )
    read = next((row for row in rows if full and row.policy == records.baseline), None)
    scored = None if read is None else _is_scored(read, floor)
    return Group(task, metric, model, k, len(common), scored, rows)


def _is_scored(full: PolicyRow, floor: float) -> bool:
    above = full.above_closed
    return full.quality.value >= floor or (above is not None and above.ranked and above.low > 0)


def _row(
    way: _Way,
    found: Sequence[Record],
    full: Sequence[Record] | None,
    closed: Sequence[Record] | None,
    answered: dict[_Way, list[Record]],
    metric: str,
    seed: int,
) -> PolicyRow:
    policy, codec = way
    clusters = [record.cluster for record in found]
    mine = _scores(found, metric)
    difference = kept = above_closed = None
    if full is not None and found is not full and found is not closed:
        theirs = _scores(full, metric)
        difference = paired_bootstrap(mine, theirs, clusters, seed=seed)
        kept = kept_ratio(mine, theirs, clusters, seed=seed)
    if closed is not None and found is not closed:
        above_closed = paired_bootstrap(mine, _scores(closed, metric), clusters, seed=seed)
    means = {}
    for name in dict.fromkeys(name for record in found for name in record.scores):
        told = [record for record in found if name in record.scores]
        shared = [record.cluster for record in told]
        means[name] = mean_interval(_scores(told, name), shared, seed=seed)
    compared = next(other for other in answered if other[0] == policy)
    changed = [
        float(record.answer != other.answer)
        for record, other in zip(found, answered[compared], strict=True)
    ]
    times = [record.times for record in found if record.times is not None]
    divergences = [record.divergence for record in found if record.divergence is not None]
    documents = sum(record.chunk_tokens for record in found)
    return PolicyRow(
        policy=policy,
        codec=codec,
        n=len(found),
        quality=means[metric],
        scores=means,
        difference=difference,
        above_closed=above_closed,
        kept=kept,
        recomputed_share=sum(record.recomputed_tokens for record in found) / max(1, documents),
        reused_share=min(record.reused_tokens / max(1, record.chunk_tokens) for record in found),
        ttft=median_interval([timing["ttft"] for timing in times], seed=seed) if times else None,
        choose=_median(times, "choose"),
        recompute=_median(times, "recompute"),
        changed=None if compared == way else mean_interval(changed, clusters, seed=seed),
        divergence=(statistics.fmean(divergences), max(divergences)) if divergences else None,
    )


def _median(times: Sequence[Mapping[str, float]], part: str) -> float | None:
    # Records of before choosing was timed by itself have it in `recompute`.
    return statistics.median(one.get(part, 0.0) for one in times) if times else None


def _scores(found: Sequence[Record], metric: str) -> list[float]:
    return [record.scores[metric] for record in found]


def to_json(groups: Sequence[Group], records: Records) -> dict[str, Any]:
    """Plain values: policies as they can be pasted back, and the groups with every interval."""
    plain = _plain(list(groups))
    return {"policies": dict(records.policies), "baseline": records.baseline, "groups": plain}


def _plain(value: Any) -> Any:
    if isinstance(value, Comparison):
        return {**asdict(value), "ranked": value.ranked}
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_markdown(groups: Sequence[Group]) -> str:
    """A table per group, and below them what the columns mean."""
    parts = [_table(group) for group in groups]
    return "\n".join([*parts, _legend(groups)])


def _table(group: Group) -> str:
    columns = _columns(group)
    others = [name for name in group.rows[0].scores if name != group.metric] if group.rows else []
    lines = [f"### {group.title}: {group.metric}, n = {group.n}", ""]
    if group.scored is False:
        lines += [_NOT_SCORED, ""]
    lines.append("| " + " | ".join([*columns, *(f"{name} %" for name in others)]) + " |")
    lines.append("|" + "---|" * (len(columns) + len(others)))
    for row in group.rows:
        cells = _cells(group, row)
        means = [
            f"{100 * row.scores[name].value:.1f}" if name in row.scores else "" for name in others
        ]
        lines.append("| " + " | ".join([*(cells[name] for name in columns), *means]) + " |")
    return "\n".join([*lines, ""])


def _columns(group: Group) -> list[str]:
    """Only those in which some row has something to say."""
    rows = group.rows
    wanted = {
        "policy": True,
        "codec": any(row.codec for row in rows),
        "quality %": True,
        "minus full": any(row.difference for row in rows),
        "minus closed book": any(row.above_closed for row in rows),
        "of full %": any(row.kept for row in rows),
        "changed %": any(row.changed for row in rows),
        "KL mean / max": any(row.divergence for row in rows),
        "computed again": True,
        "TTFT ms": any(row.ttft for row in rows),
    }
    return [name for name, shown in wanted.items() if shown]


def _cells(group: Group, row: PolicyRow) -> dict[str, str]:
    divergence = row.divergence
    return {
        "policy": row.policy,
        "codec": row.codec or "none",
        "quality %": _percent(row.quality),
        "minus full": _difference(group, row.difference),
        "minus closed book": _difference(group, row.above_closed),
        "of full %": _percent(row.kept),
        "changed %": _percent(row.changed),
        "KL mean / max": "" if divergence is None else f"{divergence[0]:.2g} / {divergence[1]:.2g}",
        "computed again": f"{100 * row.recomputed_share:.1f} %",
        "TTFT ms": _milliseconds(row.ttft),
    }


def _percent(share: Interval | None) -> str:
    if share is None or not math.isfinite(share.value):
        return ""
    return f"{100 * share.value:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _difference(group: Group, found: Comparison | None) -> str:
    if found is None:
        return ""
    text = f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    if not found.ranked or not group.scored:
        return text
    return f"{text} {'better' if found.difference > 0 else 'worse'}"


def _milliseconds(time: Interval | None) -> str:
    if time is None:
        return ""
    return f"{1000 * time.value:.1f} ({1000 * time.low:.1f} to {1000 * time.high:.1f})"


def _legend(groups: Sequence[Group]) -> str:
    timed = max((row.ttft.n for group in groups for row in group.rows if row.ttft), default=0)
    lines = [
        "In brackets: 95 % intervals; those of differences and shares of full prefill are paired, "
        'over the same questions, resampled by context. "better" and "worse" stand only where '
        "the interval excludes 0 and the task is scored.",
        "Computed again: tokens, as a share of the documents' tokens.",
    ]
    if any(row.above_closed for group in groups for row in group.rows):
        lines.append("Closed book: the same questions without documents.")
    if timed:
        lines.append(f"TTFT: median of {timed} questions per task asked one at a time, in turns.")
    if any(row.changed for group in groups for row in group.rows):
        lines.append("Changed: answers unlike those over the first codec.")
    if any(row.divergence for group in groups for row in group.rows):
        lines.append(
            "KL: of the answer's first token, in nats, from the same policy over the first codec; "
            "for the first codec from full prefill."
        )
    return "\n".join(f"- {line}" for line in lines) + "\n"


# Colours of plots, and what they are on a dark page.
_AT_NIGHT: Final = {
    "#000000": "#e8e8e8",
    "#ffffff": "#1e2129",
    "#e5e5e5": "#3a3f4b",
    "#0072b2": "#3d9be0",
}
_DARK: Final = "".join(
    [
        "@media (prefers-color-scheme: dark){svg{fill:#e8e8e8}",
        *(
            f'[style*="{kind}: {day}"]{{{kind}:{night} !important}}'
            for day, night in _AT_NIGHT.items()
            for kind in ("fill", "stroke")
        ),
        "}",
    ]
)


def check_plot(file: Path) -> None:
    """Say before hours of work whether a plot could be written.

    Raises:
        InvalidInputError: If its name has no suffix of a picture or there is no such folder.
        MissingExtraError: If matplotlib is not installed.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(f"{file} must end in one of {', '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise InvalidInputError(f"there is no folder for {file}; make it first")
    _figure_class()


def plain_panel(panel: Any) -> None:
    """The look of every plot of the project: a faint grid, no frame but two axes."""
    panel.grid(color="#E5E5E5", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=TEXT)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def save_plot(figure: Any, file: Path, salt: str = "kvcache-rag") -> None:
    """Write a figure; the same figure gives the same bytes.

    An SVG has a dark look of its own, for readers whose browser asks for one.

    Args:
        figure: Of matplotlib.
        file: Its suffix decides the format.
        salt: What names inside an SVG are made from.
    """
    import matplotlib as mpl

    if file.suffix.lower() != ".svg":
        figure.savefig(file, dpi=150)
        return
    text = StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", dpi=150, metadata={"Date": None})
    file.write_text(text.getvalue().replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")


def draw(groups: Sequence[Group], file: Path, baseline: str | None = None) -> None:
    """Write the plot of all groups in which something was timed.

    Bars are 95 % intervals.  Groups that are not scored are grey.

    Args:
        groups: From `summarise`.
        file: Its suffix decides the format.
        baseline: Label of the full prefill, drawn in black.

    Raises:
        InvalidInputError: If nothing was timed, or the file cannot be a plot.
        MissingExtraError: If matplotlib is not installed.
    """
    check_plot(file)
    timed = [group for group in groups if any(row.ttft for row in group.rows)]
    if not timed:
        raise InvalidInputError("no question was timed, so there is nothing to plot; time some")
    names = list(dict.fromkeys(_name(row) for group in timed for row in group.rows))
    columns = 2 if max(map(len, names)) <= _LONGEST else 1
    figure = new_figure(2.9 * len(timed) + 0.2 * len(names) / columns + 0.2)
    # One scale of scores, since they are there to be compared.
    panels = figure.subplots(len(timed), squeeze=False, sharey=True).ravel()
    looks = _looks(names, baseline)
    for panel, group in zip(panels, timed, strict=True):
        _draw_group(panel, group, looks)
    figure.legend(
        handles=[_handle(name, look) for name, look in looks.items()],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=TEXT,
    )
    save_plot(figure, file)


def new_figure(height: float, width: float = WIDTH) -> Any:
    """An empty figure of matplotlib's, which needs no display; inches.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    figure = _figure_class()(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(hspace=0.05)  # a panel's title keeps off the one above
    return figure


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "eval") from error
    return Figure


def _name(row: PolicyRow) -> str:
    return f"{row.policy}, {row.codec}" if row.codec else row.policy


def _looks(names: Sequence[str], baseline: str | None) -> dict[str, tuple[str, str]]:
    """Colour and marker of each name."""
    others = [name for name in names if name.split(", ")[0] != baseline]
    looks = {
        name: (_COLOURS[index % len(_COLOURS)], _MARKERS[(1 + index) % len(_MARKERS)])
        for index, name in enumerate(others)
    }
    return {name: looks.get(name, ("black", _MARKERS[0])) for name in names}


def _handle(name: str, look: tuple[str, str]) -> Any:
    from matplotlib.lines import Line2D

    colour, marker = look
    return Line2D([], [], color=colour, marker=marker, linestyle="", label=name)


def _draw_group(panel: Any, group: Group, looks: dict[str, tuple[str, str]]) -> None:
    for row in group.rows:
        if row.ttft is None:
            continue
        colour, marker = looks[_name(row)]
        panel.errorbar(
            1000 * row.ttft.value,
            100 * row.quality.value,
            xerr=_bars(row.ttft, 1000),
            yerr=_bars(row.quality, 100),
            color=_GREY if group.scored is False else colour,
            marker=marker,
            markersize=6,
            elinewidth=1,
            capsize=2,
            linestyle="",
        )
    note = " (not scored)" if group.scored is False else ""
    panel.set_title(f"{group.title}{note}", fontsize=TEXT)
    panel.set_xlabel("time to first token, ms", fontsize=TEXT)
    panel.set_ylabel(f"{group.metric.replace('_', ' ')}, %", fontsize=TEXT)
    panel.set_xlim(left=0)
    plain_panel(panel)


def _bars(interval: Interval, unit: float) -> list[list[float]]:
    """Lengths of the bars to the left and right, or below and above."""
    value = interval.value
    return [[max(0.0, unit * (value - interval.low))], [max(0.0, unit * (interval.high - value))]]
