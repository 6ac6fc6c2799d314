"""What a change costs: in how many files a thing that comes often has to be written."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvcache_rag"
# What stands at the engine or above it, so what an option comes through; below, it is implemented.
ABOVE = (
    "engine.py", "auxiliary.py", "prefetch.py", "cli.py",
    "integration", "scoring", "evaluation", "finetune", "corpus", "serve", "commands",
)  # fmt: skip
# Where an option of `Engine` is declared for whoever uses a server or a framework.
DECLARED = {
    "serve/settings.py",
    "langchain_kvcache_rag/settings.py",
    "llama_index/kvcache_rag/llm.py",
}


def files_above() -> Iterator[tuple[str, Path]]:
    for name in ABOVE:
        place = SOURCE / name
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            yield path.relative_to(SOURCE).as_posix(), path
    for project in sorted((ROOT / "integrations").iterdir()):
        for path in sorted(project.rglob("*.py")):
            name = path.relative_to(project).as_posix()
            if not name.startswith("tests/"):
                yield name, path


def passes_on(path: Path, option: str) -> bool:
    """Whether a file has a parameter or a field of this name, or hands a value on by it.

    A constant is no value that is handed on: `cost_aware=False` decides, and need not know of
    whoever else decides.
    """

    def is_by_name(node: ast.AST) -> bool:
        match node:
            case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                return name == option
            case ast.keyword(arg=name, value=value):
                return name == option and not isinstance(value, ast.Constant)
        return False

    return any(map(is_by_name, ast.walk(ast.parse(path.read_text("utf-8")))))


@pytest.mark.parametrize(
    ("option", "declared"),
    [
        ("prefill_dtype", set()),
        ("packed_attention", set()),
        ("cost_aware", set()),
        ("context_window", DECLARED),
        ("kv_max_bytes", DECLARED - {"serve/settings.py"}),
    ],
)
def test_an_option_of_the_engine_is_written_in_three_files(option: str, declared: set[str]) -> None:
    """The engine, the settings that it is opened from, and where its users declare it."""
    named = {name for name, path in files_above() if passes_on(path, option)}
    assert named - declared <= {"engine.py", "integration/engine.py"}
    assert declared <= named
