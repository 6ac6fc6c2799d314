"""Every file says one version, which `tools/bump.py` changes in all of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kvcache_rag import __version__
from tools import bump, dists

ROOT = Path(__file__).parent.parent


def test_every_file_says_the_same_version() -> None:
    assert list(bump.problems(__version__)) == []


def test_every_dist_is_bumped() -> None:
    """What `tools/bump.py` does not know would keep its version."""
    projects = {f"{path.relative_to(ROOT)}/pyproject.toml" for path in dists.PROJECTS.values()}
    assert {one.removeprefix("./") for one in projects} <= {name for name, _ in bump.PLACES}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The files that name a version, in a folder of their own."""
    for name in (*(name for name, _ in bump.PLACES), "CHANGELOG.md"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path


def test_a_bump_reaches_every_place(copied: Path) -> None:
    bump.bump("7.8.9rc1", "2031-02-03", copied)
    assert list(bump.problems("7.8.9rc1", copied)) == []
    for name, _ in bump.PLACES:
        assert __version__ not in re.findall(
            r"(?:version|kvcache-rag[-\w]*)\W+(?:\[[\w,]+\])?[~=\" ]*(\d+\.\d+\.\d+)",
            (copied / name).read_text(encoding="utf-8"),
        ), name
    changelog = (copied / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased\n\n## 7.8.9rc1 - 2031-02-03\n" in changelog
    assert 'date-released: "2031-02-03"' in (copied / "CITATION.cff").read_text(encoding="utf-8")
    bump.bump("7.8.9rc1", "2031-02-03", copied)
    assert (copied / "CHANGELOG.md").read_text(encoding="utf-8") == changelog
