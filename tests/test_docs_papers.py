"""docs/papers.md: its pages, sections, commands and tasks; every row has ours, or why not."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcache_rag_lab.evaluation.tasks import task_names

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PAPERS = ("TurboRAG", "CacheClip", "LazyAttention", "Shared RAG-DCache")


def rows() -> list[list[str]]:
    """The cells of every row about a table or figure."""
    lines = PAGE.partition("## TurboRAG")[2].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return [row for row in cells if row[0] != "table or figure" and not row[0].startswith("---")]


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_paper_has_rows() -> None:
    headings = re.findall(r"^## (.+?) \(arXiv [\d.]+\)$", PAGE, re.MULTILINE)
    assert tuple(headings) == PAPERS
    assert len(rows()) > 40
    assert len(PAGE.split()) <= 4500


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_row_says_theirs_and_ours_or_why_not(row: list[str]) -> None:
    _, theirs, ours, how = row
    assert theirs
    assert how, "neither page nor command nor reason"
    if not ours:
        assert "needs" in how


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", PAGE))))
def test_a_link_leads_to_a_section(target: str) -> None:
    name, _, fragment = target.partition("#")
    page = ROOT / "docs" / name
    assert page.is_file()
    assert not fragment or fragment in anchors(page)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(?:python|kvcache)[^`]*`", PAGE))))
def test_a_command_is_there(command: str) -> None:
    words = command.strip("`").split()
    if words[0] == "python":
        assert words[1] == "-m"
        assert find_spec(words[2]) is not None
    else:
        assert words[:2] in (["kvcache-rag", "eval"], ["kvcache-rag", "finetune"])
        asked = [word for word in words[2:] if word not in {"MODEL", "--task"}]
        assert set(asked) <= set(task_names())


@pytest.mark.parametrize("path", re.findall(r"`((?:tests|tools)/[^`]+)`", PAGE))
def test_a_file_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


def test_a_heading_has_githubs_fragment(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# By context (as TurboRAG's table 3)\n\n### noise_20, two: 4x\n", "utf-8")
    assert anchors(page) == {"by-context-as-turborags-table-3", "noise_20-two-4x"}
