"""How many files a change touches, counted on what was changed that way before."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvcache_rag"
PUBLIC = {"__init__.py", "__init__.pyi"}


def files_that_name(name: str, folder: Path = SOURCE) -> set[str]:
    """Files whose code names it; messages and docstrings may give an example."""
    return {
        path.relative_to(folder).as_posix()
        for pattern in ("*.py", "*.pyi")
        for path in folder.rglob(pattern)
        if name in set(_names(ast.parse(path.read_text(encoding="utf-8"))))
    }


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


@pytest.mark.parametrize(
    ("policy", "file"), [("LegoLink", "legolink"), ("CacheClip", "cacheclip"), ("Ape", "ape")]
)
def test_a_new_policy_is_its_file_the_list_of_policies_and_a_public_name(
    policy: str, file: str
) -> None:
    named = files_that_name(policy)
    assert {f"policies/{file}.py", "policies/__init__.py"} <= named
    assert named <= {f"policies/{file}.py", "policies/__init__.py", *PUBLIC}


def test_a_file_that_names_a_policy_is_found(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("from kvcache_rag.policies import LegoLink\n")
    (tmp_path / "text.py").write_text('HELP = "LegoLink"  # LegoLink\n')
    assert files_that_name("LegoLink", tmp_path) == {"engine.py"}
