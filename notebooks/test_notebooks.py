"""Both notebooks run, show what they say, and are kept with the outputs that they give."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from notebooks.execute import FOLDER, METADATA, NAMES, execute, read

if TYPE_CHECKING:
    from nbformat import NotebookNode

# A notebook is run by the first test that wants it.
pytestmark = pytest.mark.timeout(1800)

ANSWERS = {
    "What material is the Eiffel Tower made of?": "wrought iron",
    "In which town of Germany was Johannes Gutenberg born?": "Mainz",
    "After which country did Marie Curie name polonium?": "Poland",
    "What is the largest moon of Saturn?": "Titan",
}
REUSED = {"llamaindex": "reused_tokens", "langchain": "cache_read"}
PREFILLED = {"llamaindex": "prefilled_tokens", "langchain": "cache_creation"}
LARGEST = 150_000
TIMES = re.compile(r"\d+(\.\d+)?( ms| x)")
PROGRESS = re.compile(r"[\w .-]+: 100%\|[^|]*\| ([\d.]+k?)/\1 \[.*\]\s*")
# Where no notebook ran before; what comes of it is kept.
CONVERTED = re.compile(r"\S+\.gguf: its [\d,]+ weights are dequantised to .*")
FOREIGN = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt|usr|var|Users)/|[A-Z]:\\|\w+://")


@dataclass(frozen=True)
class Run:
    """A notebook as it is kept, and as it has just come out."""

    name: str
    kept: NotebookNode
    new: NotebookNode


@pytest.fixture(scope="module", params=NAMES)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param, read(request.param), execute(request.param))


@pytest.fixture(params=NAMES)
def kept(request: pytest.FixtureRequest) -> NotebookNode:
    return read(request.param)


def texts(notebook: NotebookNode, stream: str = "stdout") -> dict[str, str]:
    """What each code cell printed and, with stdout, what its last expression was."""
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            printed = [one.text for one in cell.outputs if one.get("name") == stream]
            results = [one.data["text/plain"] for one in cell.outputs if "data" in one]
            found[cell.id] = "".join(printed + (results if stream == "stdout" else []))
    return found


def pictures(notebook: NotebookNode) -> list[bytes]:
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    found = [one.data["image/png"] for one in outputs if "image/png" in one.get("data", {})]
    return [b64decode(one) for one in found]


def steady(text: str) -> str:
    """A text without times, and without the spaces that depend on how long they are."""
    return re.sub(r"[ \t]+", " ", TIMES.sub("#", text)).strip()


def counts(text: str) -> dict[str, list[int]]:
    """Rows of a table of costs that count something."""
    rows = re.findall(r"^(\w+)((?: +\d+)+)$", text, re.M)
    return {name: [int(value) for value in values.split()] for name, values in rows}


def test_outputs_are_the_kept_ones(run: Run) -> None:
    new = {name: steady(text) for name, text in texts(run.new).items()}
    assert new == {name: steady(text) for name, text in texts(run.kept).items()}


def test_stock_and_stitched_answers_are_right(run: Run) -> None:
    rows = texts(run.new)["side-by-side"].strip().splitlines()
    questions, stock, stitched = rows[::3], rows[1::3], rows[2::3]
    assert questions == list(ANSWERS)
    for side, found in (("stock", stock), ("stitched", stitched)):
        for row, answer in zip(found, ANSWERS.values(), strict=True):
            assert row.split()[0] == side
            assert answer in row


def test_reading_more_again_mends_an_answer(run: Run) -> None:
    reused, ordered, linked = texts(run.new)["dial"].strip().splitlines()
    assert reused.split()[:2] == ["reuse", "0"]
    assert ordered.startswith("bestfew")
    assert linked.startswith("legolink")
    assert ["RuBisCO" in one for one in (reused, ordered, linked)] == [False, True, False]


def test_a_question_prefills_what_is_new_once(run: Run) -> None:
    cost = counts(texts(run.new)["metrics"])
    missing, none = cost["misses"]
    assert 0 < missing < 4
    assert none == 0
    (first, again), (computed, nothing) = cost[REUSED[run.name]], cost[PREFILLED[run.name]]
    assert computed > 0
    # What the prompt before this one left is counted by LangChain's name, too.
    assert again >= first + computed
    assert nothing == 0


@pytest.mark.parametrize("cell", ["third-line-query", "streaming", "chat"])
def test_what_the_store_prefilled_is_not_computed_again(run: Run, cell: str) -> None:
    cost = counts(texts(run.new)[cell])
    assert all(value > 0 for value in cost[REUSED[run.name]])
    assert not any(cost[PREFILLED[run.name]] + cost["misses"])


def test_plot_shows_that_stitching_is_sooner(run: Run) -> None:
    (picture,) = pictures(run.new)
    assert picture.startswith(b"\x89PNG")
    sooner = re.search(r"([\d.]+) x sooner", texts(run.new)["plot"])
    assert sooner is not None
    assert float(sooner[1]) > 1


def test_nothing_but_finished_progress_bars_is_on_stderr(run: Run) -> None:
    expected = re.compile(f"{PROGRESS.pattern}|{CONVERTED.pattern}|\\s*")
    for notebook in (run.kept, run.new):
        lines = "\n".join(texts(notebook, "stderr").values()).split("\n")
        assert [line for line in lines if not expected.fullmatch(line)] == []


def test_kept_notebook_was_run_from_top_to_bottom(kept: NotebookNode) -> None:
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {one.output_type for cell in cells for one in cell.outputs}
    assert {"stream", "display_data"} <= kinds <= {"stream", "display_data", "execute_result"}
    assert len(pictures(kept)) == 1


def test_kept_notebook_names_no_machine(kept: NotebookNode) -> None:
    assert kept.metadata == METADATA
    assert not any(cell.metadata for cell in kept.cells)
    for stream in ("stdout", "stderr"):
        assert not FOREIGN.search("\n".join(texts(kept, stream).values()))
    assert not FOREIGN.search("\n".join(cell.source for cell in kept.cells))


@pytest.mark.parametrize("name", NAMES)
def test_kept_file_is_small(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST


def test_links_lead_to_pages_and_their_headings(kept: NotebookNode) -> None:
    sources = "\n".join(cell.source for cell in kept.cells)
    links = set(re.findall(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", sources))
    assert links
    for path, anchor in links:
        page = (FOLDER / path).read_text(encoding="utf-8")
        headings = {
            re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
            for title in re.findall(r"^#+ (.+)$", page, re.M)
        }
        assert not anchor or anchor in headings, f"{path}#{anchor}"
