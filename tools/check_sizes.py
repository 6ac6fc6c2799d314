"""Fail when a file or a function has grown past what fits on a few screens.

Run from the repository root: `python tools/check_sizes.py [FOLDER ...]`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FILE_LINES: Final = 300
TEST_FILE_LINES: Final = 500
FUNCTION_LINES: Final = 80
FOLDERS: Final = ("src", "integrations", "benchmarks", "tools", "tests")


def problems(path: Path) -> Iterator[str]:
    """Say what is too long in one Python file, one line per finding."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    limit = TEST_FILE_LINES if "tests" in path.parts else FILE_LINES
    if lines > limit:
        yield f"{path}:1: {lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                place = f"{path}:{node.lineno}"
                yield f"{place}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main(folders: Sequence[str]) -> int:
    """Check every Python file under `folders`; returns the exit code."""
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [problem for path in files for problem in problems(path)]
    print("\n".join(found) if found else f"sizes: {len(files)} files, all within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or FOLDERS))
