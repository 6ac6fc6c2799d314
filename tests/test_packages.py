"""Every file says one version, which `tools/bump.py` changes in all of them."""

from __future__ import annotations

from pathlib import Path

from kvcache_rag import __version__
from tools import bump, dists

ROOT = Path(__file__).parent.parent


def test_every_file_says_the_same_version() -> None:
    assert list(bump.problems(__version__)) == []


def test_every_dist_is_bumped() -> None:
    """What `tools/bump.py` does not know would keep its version."""
    projects = {f"{path.relative_to(ROOT)}/pyproject.toml" for path in dists.PROJECTS.values()}
    assert {one.removeprefix("./") for one in projects} <= {name for name, _ in bump.PLACES}
