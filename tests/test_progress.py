"""Bars and tables: rich on a terminal, and plain text, as ever, anywhere else."""

from __future__ import annotations

import io
import re
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvcache_rag import progress
from kvcache_rag.progress import (
    dimmed,
    is_rich,
    markdown,
    plain,
    progress_bar,
    table,
    without_controls,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = [["name", "size"], ["first", "1"], ["the second", "20"]]
RIGHT = frozenset({1})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Both streams of the process, in a terminal of 60 columns."""
    stream = Terminal()
    for name, value in (("COLUMNS", "60"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    # Not those of `sys`, which pytest sets anew before each test.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stdout=stream, stderr=stream))
    yield stream
    assert progress._SHOWN._display is None, "a display was left open"


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize(
    ("name", "value", "rich"),
    [
        ("NO_COLOR", "1", False),
        ("NO_COLOR", "", True),
        ("TERM", "dumb", False),
        ("TERM", "xterm", True),
    ],
)
def test_who_wants_no_colours_gets_plain_text(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str, rich: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert is_rich(terminal) is rich
    assert ("\x1b" in dimmed("less", terminal)) is rich
    assert any("\x1b" in line for line in table(ROWS)) is rich
    assert (markdown("# Head\n") == "# Head\n") is not rich


def test_answers_keep_their_lines_and_letters_and_lose_control_characters() -> None:
    kept = "a\tb\nनमस्ते क्‍ष 👩‍👧\n"
    assert without_controls(kept) == kept
    assert without_controls("\x1b]0;evil\x07 a\rb \x9b2J\x7f") == (
        r"\x1b]0;evil\x07 a\rb \x9b2J\x7f"
    )


def test_what_is_piped_is_plain() -> None:
    assert dimmed("less", sys.stdout) == "less"
    assert table(ROWS, RIGHT) == ["name        size", "first          1", "the second    20"]
    assert table(ROWS[1:], heads=False) == ["first       1", "the second  20"]


CELLS = ["reordered by something", "1234567", "97.5 (94.1-98.9)"]
REPORT = "\n".join(f"| {' | '.join(row)} |" for row in (CELLS, ["-"] * 3, CELLS))
DRAWN: dict[str, Callable[[], str]] = {
    "table": lambda: "\n".join(table([["policy", "n", "of full"], CELLS], RIGHT)),
    "report": lambda: markdown(f"# Head\n\n{REPORT}"),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_a_table_is_drawn_if_it_fits_and_nothing_of_it_is_ever_cut(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shown = []
    for columns in range(20, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown.append(bare(DRAWN[kind]()))
        assert all(cell in shown[-1] for cell in CELLS), "nothing is cut or folded"
        if shown[-1] != shown[0]:
            assert max(len(line.rstrip()) for line in shown[-1].splitlines()) <= columns
    drawn = [one != shown[0] for one in shown]
    assert sorted(drawn) == drawn, "from some width on"
    assert set(drawn) == {False, True}


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.usefixtures("terminal")
def test_cells_move_no_terminal(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_rich", lambda _: rich)
    (line,) = map(bare, table([["\x1b[2J\u202eevil\n"]], heads=False))
    assert line == plain("\x1b[2J\u202eevil\n") == r"\x1b[2J\u202eevil\n"


def test_a_bar_counts_to_its_end(terminal: Terminal) -> None:
    with progress_bar(3, "prefill", "token", show=True) as bar:
        for done in range(3):
            bar.set_postfix_str(f"{done + 1}/3 chunks", refresh=False)
            bar.update()
        assert bar.n == 3
    shown = bare(terminal.getvalue())
    assert "prefill" in shown
    assert "100%" in shown
    assert "3/3 tokens, 3/3 chunks" in shown


def test_bars_at_the_same_time_share_one_display(terminal: Terminal) -> None:
    with progress_bar(2, "outer", "answer", show=True) as outer:
        threads = [
            threading.Thread(target=lambda: progress_bar(1, "inner", "chunk", show=True).close())
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with progress_bar(1, "last", "chunk", show=True) as inner:
            inner.update()
        outer.update(2)
    shown = bare(terminal.getvalue())
    assert shown.rindex("outer") > 0
    assert "2/2 answers" in shown
    assert "last" in shown


def test_a_bar_is_over_when_its_work_fails(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), progress_bar(2, "work", "file", show=True):
        raise ZeroDivisionError
    assert terminal.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(("total", "show"), [(0, True), (3, False)])
def test_a_bar_is_silent_without_work_or_unless_asked(
    terminal: Terminal, total: int, show: bool
) -> None:
    with progress_bar(total, "quiet", "file", show=show) as bar:
        bar.update()
    assert terminal.getvalue() == ""


def test_a_bar_that_is_piped_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2, "verify", "file", show=True) as bar:
        bar.update(2)
    assert bar.n == 2
    assert capsys.readouterr().err == "", "what is soon over is not told"


@pytest.mark.parametrize("dumb", [True, False])
def test_where_lines_cannot_move_there_is_one_now_and_then(
    dumb: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb" if dumb else "xterm")
    monkeypatch.setattr(terminal, "isatty", lambda: dumb)
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress_bar(5, "outer", "file", show=True) as outer:
        with progress_bar(None, "inner", "chunk", show=True) as inner:
            inner.update()
        for step in range(5):
            now = 20.0 * step
            outer.set_postfix(left=4 - step)
            outer.update()
    assert terminal.getvalue() == ("outer: 3/5 files, left=2\nouter: 5/5 files, left=0\n")


def test_a_notebook_has_its_own_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = type("OutStream", (Terminal,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(kernel, "isatty", lambda: False)
    monkeypatch.setattr(progress.sys, "stderr", kernel)
    with progress_bar(1, "prefill", "chunk", show=True) as bar:
        bar.update()
    assert type(bar).__module__.startswith("tqdm.")
