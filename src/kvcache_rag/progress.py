"""Output: progress bars and tables by rich on a terminal, plain text anywhere else.

Output is plain if it is piped, or with `NO_COLOR` or `TERM=dumb`; scripts read it, so its form
never changes.  A table wider than the terminal is plain, too: it is neither cut nor folded, the
terminal wraps its lines, and copies of it are whole.
"""

from __future__ import annotations

import os
import re
import sys
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, TextIO

from kvcache_rag.forks import new_rlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from typing_extensions import Self

_INDENT: Final = 2  # columns that may stand before a table
_PADDING: Final = 3  # columns between two cells of Markdown
_EDGES: Final = 4  # columns around them, as rich 13 draws them
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PAUSE: Final = 30.0  # seconds between two lines of progress


def plural(count: int, noun: str, *verb: str) -> str:
    """A count with its noun, and with the verb that one thing and several have."""
    said = f"{count} {noun}" if count == 1 else f"{count} {noun}s"
    return " ".join([said, verb[count != 1]]) if verb else said


def is_rich(stream: TextIO) -> bool:
    """Whether a stream can show colours and moving lines."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(stream: TextIO) -> Console:
    """Writes to a stream for which `is_rich` holds; what it is given is text, never markup."""
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        no_color=False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def dimmed(text: str, stream: TextIO) -> str:
    """A line dimmed, if the stream can show that."""
    return f"\x1b[2m{text}\x1b[0m" if is_rich(stream) else text


def tell(text: str) -> None:
    """What begins now and takes a while, before torch is imported for it.

    Who has it already, such as an app that runs a command, does not wait for that.
    """
    if "torch" not in sys.modules:
        sys.stderr.write(dimmed(f"{text} ...", sys.stderr) + "\n")
        sys.stderr.flush()


def plain(text: str) -> str:
    r"""Any text as one line that is harmless to a terminal.

    Unprintable characters, such as control characters and direction marks, become escapes like
    `\x1b`.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def without_controls(text: str) -> str:
    r"""A text of several lines whose control characters a terminal will not obey.

    They become escapes like `\x1b`, but for line breaks and tabs; joiners, which scripts and emoji
    need, stay.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


# ---------------------------------------------------------------------- tables
def table(
    rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), *, heads: bool = True
) -> list[str]:
    """Lines of a table of `plain` texts, for the standard output.

    Args:
        rows: Cells.
        right: Columns aligned to the right.
        heads: Whether the first row is a header.
    """
    rows = [[plain(cell) for cell in row] for row in rows]
    drawn = _rich_table(rows, right, heads) if is_rich(sys.stdout) else None
    return drawn or _plain_table(rows, right)


def _plain_table(rows: Sequence[Sequence[str]], right: frozenset[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rich_table(
    rows: Sequence[Sequence[str]], right: frozenset[int], heads: bool
) -> list[str] | None:
    """None if it does not fit."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD if heads else None,
        show_header=heads,
        header_style="bold",
        padding=(0, 1, 0, 0 if heads else 1),  # two columns between cells, as in plain ones
        pad_edge=False,
        show_edge=False,
    )
    for index, head in enumerate(rows[0]):
        made.add_column(Text(head if heads else ""), justify="right" if index in right else "left")
    for row in rows[heads:]:
        made.add_row(*map(Text, row))
    writer = console(sys.stdout)
    width = writer.width - _INDENT
    unbounded = writer.options.update(width=1_000_000)
    if Measurement.get(writer, unbounded, made).maximum > width:
        return None
    with writer.capture() as captured:
        writer.print(made, width=width)
    return [line.rstrip() for line in captured.get().splitlines()]


def markdown(text: str) -> str:
    """A report in Markdown, for the standard output."""
    if not is_rich(sys.stdout):
        return text
    from rich.markdown import Markdown

    writer = console(sys.stdout)
    if _table_width(text) > writer.width:
        return text  # as for tables: rich would cut its cells
    with writer.capture() as captured:
        writer.print(Markdown(text))
    return captured.get()


def _table_width(text: str) -> int:
    """Columns that the tables of a report in Markdown take at most; 0 without any."""
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    columns = zip_longest(*rows, fillvalue="")
    widths = [max(len(cell.strip()) for cell in column) + _PADDING for column in columns]
    return sum(widths) + _EDGES if widths else 0


# ---------------------------------------------------------------------- bars
def progress_bar(
    total: int | None, description: str, unit: str, *, show: bool, scaled: bool = False
) -> Any:
    """A bar with the methods of tqdm, also a context manager.

    It stays silent without `show` or without work.

    Args:
        total: How many units there are; None while nobody knows.
        description: What is done.
        unit: What is counted.
        show: Whether to show it.
        scaled: Whether to write thousands as "k".
    """
    if not show or total == 0:
        return Bar(total, description, unit.strip(), scaled=scaled)
    if type(sys.stderr).__module__.startswith("ipykernel."):
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=description, unit=unit, unit_scale=scaled)
    kind = RichBar if is_rich(sys.stderr) else LineBar
    return kind(total, description, unit.strip(), scaled=scaled)


class Bar:
    """Counts, and shows nothing; called as tqdm's bars are.

    Attributes:
        n: Units that are done.
    """

    def __init__(self, total: int | None, description: str, unit: str, *, scaled: bool) -> None:
        """Begin to count.

        Args:
            total: As for `progress_bar`.
            description: As for `progress_bar`.
            unit: As for `progress_bar`.
            scaled: As for `progress_bar`.
        """
        self.n = 0
        self._total, self._unit, self._scaled, self._note = total, unit, scaled, ""
        self._description = description

    def update(self, count: int = 1) -> None:
        """Units more are done."""
        self.n += count

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:  # tqdm's
        """Say something behind the counts, with the next update."""
        self._note = text

    def set_postfix(self, refresh: bool = True, **values: Any) -> None:
        """Say named values behind the counts, with the next update."""
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        self.set_postfix_str(named, refresh)

    def close(self) -> None:
        """Leave it standing as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _counted(self) -> str:
        parts = [_number(self.n, self._scaled)]
        if self._total is not None:
            parts = [f"{parts[0]}/{_number(self._total, self._scaled)}"]
        plural = "" if (self._total or self.n) == 1 else "s"
        unit = self._unit if self._unit.endswith("s") else f"{self._unit}{plural}"
        return " ".join([*parts, unit]) + (f", {self._note}" if self._note else "")


class RichBar(Bar):
    """One bar of rich, below those that are there already."""

    def __init__(self, total: int | None, description: str, unit: str, *, scaled: bool) -> None:
        """Show it; arguments as for `Bar`."""
        super().__init__(total, description, unit, scaled=scaled)
        self._task: Any = _SHOWN.add(description, total, self._counted())

    def update(self, count: int = 1) -> None:
        super().update(count)
        if self._task is not None:
            _SHOWN.move(self._task, self.n, self._counted())

    def close(self) -> None:
        if self._task is not None:
            _SHOWN.end(self._task)
            self._task = None


class LineBar(Bar):
    """A line now and then, where lines cannot move; nothing of what is soon over."""

    def __init__(self, total: int | None, description: str, unit: str, *, scaled: bool) -> None:
        """Wait; arguments as for `Bar`."""
        super().__init__(total, description, unit, scaled=scaled)
        self._said, self._written = time.monotonic(), -1

    def update(self, count: int = 1) -> None:
        super().update(count)
        if time.monotonic() - self._said >= _PAUSE:
            self._write()

    def close(self) -> None:
        if self._written not in (-1, self.n):
            self._write()

    def _write(self) -> None:
        self._said, self._written = time.monotonic(), self.n
        sys.stderr.write(f"{self._description}: {self._counted()}\n")


def _number(count: int, scaled: bool) -> str:
    return f"{count / 1000:.1f}k" if scaled and count >= 1000 else f"{count:,}"


class _Shown:
    """The bars of this process that are not over, in one display: a terminal takes no two."""

    def __init__(self) -> None:
        self._lock = new_rlock()
        self._display: Progress | None = None
        self._open: set[Any] = set()

    def add(self, description: str, total: int | None, counted: str) -> Any:
        """A new bar, and the display if it is the first."""
        with self._lock:
            if self._display is None:
                self._display = self._new()
                self._display.start()
            task = self._display.add_task(description, total=total, counted=counted)
            self._open.add(task)
            return task

    def move(self, task: Any, done: int, counted: str) -> None:
        with self._lock:
            if self._display is not None:
                self._display.update(task, completed=done, counted=counted)

    def end(self, task: Any) -> None:
        """A bar is over; with the last one, the display."""
        with self._lock:
            self._open.discard(task)
            if self._display is None:
                return
            self._display.stop_task(task)
            if not self._open:
                self._display.stop()
                self._display = None

    @staticmethod
    def _new() -> Progress:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counted]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        return Progress(
            *columns,
            console=console(sys.stderr),
            # What is piped never goes through here.
            redirect_stdout=sys.stdout.isatty(),
        )


_SHOWN = _Shown()
