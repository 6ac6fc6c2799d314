"""Quality against time to the first token: one panel per group, one point per policy and codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcache_rag.evaluation.report import Group, Row
    from kvcache_rag.evaluation.statistics import Interval

SUFFIXES: Final = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart; black is for full prefill.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
_MARKERS: Final = "osD^vPX"
_GREY: Final = "#AAAAAA"
_ACROSS: Final = 3


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
    figure_class()


def plain_panel(panel: Any) -> None:
    """The look of every plot of the project: a faint grid, no frame but two axes."""
    panel.grid(color="#E5E5E5", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def save_plot(figure: Any, file: Path, salt: str = "kvcache-rag") -> None:
    """Write a figure; the same figure gives the same bytes.

    Args:
        figure: Of matplotlib.
        file: Its suffix decides the format.
        salt: What names inside an SVG are made from.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": salt}):
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else None
        figure.savefig(file, dpi=150, metadata=metadata)


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
    across = min(_ACROSS, len(timed))
    down = -(-len(timed) // across)
    figure = figure_class()(figsize=(4.4 * across, 3.4 * down + 0.8), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    names = list(dict.fromkeys(_name(row) for group in timed for row in group.rows))
    looks = _looks(names, baseline)
    for panel, group in zip(panels, timed, strict=False):
        _draw_group(panel, group, looks)
    for panel in panels[len(timed) :]:
        panel.set_axis_off()
    figure.legend(
        handles=[_handle(name, look) for name, look in looks.items()],
        loc="outside lower center",
        ncols=min(4, len(names)),
        frameon=False,
        fontsize=9,
    )
    save_plot(figure, file)


def figure_class() -> Any:
    """Matplotlib's figure, which needs no display.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "eval") from error
    return Figure


def _name(row: Row) -> str:
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
    panel.set_title(f"{group.title}{note}", fontsize=10)
    panel.set_xlabel("time to first token, ms", fontsize=9)
    panel.set_ylabel(f"{group.metric.replace('_', ' ')}, %", fontsize=9)
    panel.set_xlim(left=0)
    plain_panel(panel)


def _bars(interval: Interval, unit: float) -> list[list[float]]:
    """Lengths of the bars to the left and right, or below and above."""
    value = interval.value
    return [[max(0.0, unit * (value - interval.low))], [max(0.0, unit * (interval.high - value))]]
