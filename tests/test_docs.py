"""What pages say to run runs or says why not; links lead somewhere; tables are what was found."""

from __future__ import annotations

import importlib.metadata
import re
import statistics
from pathlib import Path
from typing import Any

import forks
import pytest
from pictures import LEAST, smallest_letters
from zoo import FAMILIES, HYBRIDS, REFUSED, build

from benchmarks.common import read, result_file
from kvcache_rag.models.adapters import PACKAGED_ADAPTERS, is_installed
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.models.model_names import PACKAGED
from kvcache_rag_documents.extraction import kinds_table
from tools import support_table

ROOT = Path(__file__).parent.parent
# docs/serving.md has a test of its own, in which snippets follow each other.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*/*/README.md")),
]
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```(\n\n```text\n(.*?)```)?", re.S)
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), number, code, output)
    for page in PAGES
    if page.name not in ("serving.md", "CHANGELOG.md")
    for number, (reason, code, _, output) in enumerate(BLOCK.findall(page.read_text("utf-8")))
    if not reason
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "output"),
    [pytest.param(code, output, id=f"{page}:{number}") for page, number, code, output in BLOCKS],
)
def test_a_block_runs_and_prints_what_it_says(code: str, output: str, tmp_path: Path) -> None:
    for name, model in PACKAGED.items():
        if f'"{name}"' in code:
            try:
                importlib.metadata.version(model.package)
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(model.install)
            if not is_installed(model.adapter):
                pytest.skip(f"pip install {PACKAGED_ADAPTERS[model.adapter]}")
    status, printed, errors = forks.run(code, tmp_path)
    assert status == 0, errors
    if output:
        assert printed == output


def test_readme_and_the_first_page_say_the_same() -> None:
    commands = []
    for page in ("README.md", "docs/index.md"):
        install = text_of(page).partition("## Install\n")[2].partition("\n## ")[0]
        commands.append(re.findall(r"```bash\n.*?```", install, re.S))
    assert commands[0] == commands[1] != []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_column_of_a_table_has_a_name(page: Path) -> None:
    # A reader of screens says the column's name before each cell.
    heads = re.findall(r"^(\|.*\|)\n\|[-:| ]+\|$", page.read_text(encoding="utf-8"), re.M)
    assert [head for head in heads if not all(cell.strip() for cell in head[1:-1].split("|"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and the site write them."""
    found = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S))
    plain = [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in found]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def said(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_figures_are_those_that_were_measured(page: str) -> None:
    text, report = text_of(page), read(result_file("answers"))

    def found(part: str, **wanted: Any) -> list[dict[str, Any]]:
        wanted = {"model": "qwen05", **wanted}
        return [row for row in report[part] if wanted.items() <= row.items()]

    scores = {row["policy"]: row for row in found("scores", half=2)}
    assert f"answers to {scores['full']['rows']} public questions" in " ".join(text.split())
    ours = {"full": "full prefill", "bestfew": "`BestFew()`, the default", "reuse": "`Reuse()`"}
    for policy, name in ours.items():
        cells = [name]
        for length in ("1k", "4k"):
            (row,) = found("first tokens", policy=policy, length=length)
            # The mean, as `BestFew` takes one chunk here and three there.
            sooner = f", **{row['mean, sooner']['value']:.1f} times sooner**"
            first = said(row["mean ms"]["value"] / 1000)
            cells.append(first + (sooner if policy != "full" else ""))
        shares = (scores[policy]["right"], scores[policy]["from a wrong document"])
        cells += [f"{100 * share['value']:.1f} %" for share in shares]
        assert f"| {' | '.join(cells)} |" in text
    apart = scores["bestfew"]["against full"]
    value, low, high = (f"{100 * apart[name]:+.1f}" for name in ("value", "low", "high"))
    assert f"{value} points against full prefill ({low} to {high})" in text
    for row in found("by documents needed", half=2, policy="bestfew"):
        ends = (f"{100 * row['against full'][end]:+.1f}" for end in ("value", "low", "high"))
        assert "{} ({} to {})".format(*ends) in text


def test_the_readme_says_what_smollm2_gains_and_what_chunks_take() -> None:
    text = " ".join(text_of("README.md").split())
    case = read(result_file("when_not"))["cases"][-1]
    full, cached = (statistics.median(case[side]) for side in ("full", "cached"))
    assert all(figure in text for figure in (said(full), said(cached)))
    assert f"{full / cached:.0f} " in text
    confirmed = read(result_file("smollm2_confirmation"))["scores"]
    block, control = (
        next(one["f1"][0] for one in confirmed if (one["model"], one["policy"]) == way)
        for way in (("block", "reuse"), ("control", "full prefill"))
    )
    assert f"it has F1 {100 * block:.0f} on" in text
    assert f"for full prefill has {100 * control:.0f}" in text
    # Layers, key heads and their width, of the published configs.
    shapes = {"Qwen2.5-0.5B": (24, 2, 64), "Qwen2.5-7B": (28, 4, 128), "Llama-3.1-8B": (32, 8, 128)}
    for model, (layers, heads, width) in shapes.items():
        size = f"{1000 * 2 * layers * heads * width * 2 / 1e6:.0f} MB"
        assert f"{size} on disk for {model}" in text or f"{size} for {model}" in text


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs").glob("*.svg")))
def test_a_picture_can_be_read_on_a_telephone(name: str) -> None:
    assert smallest_letters(ROOT / "docs" / name) >= LEAST


TABLE = text_of("docs/models.md").partition(support_table.BEGIN)[2]


def test_the_support_table_has_a_row_for_each_that_the_laws_hold_for_and_pages_count_them() -> None:
    rows = re.findall(r"(?m)^\| (.+?) \| (.+?) \|", TABLE.partition(support_table.END)[0])
    listed = {**FAMILIES, **REFUSED, **HYBRIDS}
    told = [(name, text) for name, text in rows if "family" not in name]
    assert told == [(name, row[2]) for name, row in listed.items()]
    stitched, refused = len(FAMILIES) + len(HYBRIDS), len(REFUSED)
    assert TABLE.startswith(f"\n{stitched} configurations are stitched, {refused} refused:\n")
    assert f"{stitched} configurations" in text_of("README.md")
    assert f"{refused} refused by name" in text_of("README.md")
    assert f"over {stitched}\nconfigurations" in text_of("docs/how-it-works.md")


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_the_support_table_says_what_is_measured(name: str) -> None:
    """That stitching is exact is law 3, in test_equivalence.py and test_hybrids.py."""
    layout, told = TransformersModel(build(name)).measured, {**FAMILIES, **HYBRIDS}[name][2]
    turns = support_table.measured(layout)
    if name in HYBRIDS:
        forms = sorted({support_table.FORMS[state.form] for state in layout.states})
        turns = f"{', '.join(forms)} | {turns if layout.groups else 'no attention'}"
    assert f"| {name} | {told} | {turns} | exact |\n" in TABLE


def test_kinds_of_files_are_told_as_their_readers_say() -> None:
    table = "".join(f"{line}\n" for line in kinds_table())
    assert table in text_of("docs/cli.md"), table
