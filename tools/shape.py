"""Say how the code is laid out: a report, no gate.

    python tools/shape.py                          # the figures, and the names behind them
    python tools/shape.py --json FILE

Code lines are lines of the files as they are formatted, without blanks, comments and docstrings. An
importer is a module that imports another anywhere, also for types; `__init__` files, which only
hand names on, are neither. Nesting counts blocks inside blocks of one function, `elif` as its `if`.
Complexity is McCabe's, as ruff counts it; a private function may be named once, by its only caller.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.import_graph import (
    SOURCE,
    Imports,
    modules,
    parsed,
    top,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LONG: Final = 800
COMPLEX: Final = 10
DEEP: Final = 3
_NO_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_BLOCKS: Final = (
    ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Match
)
_FUNCTIONS: Final = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def code_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # Docstrings, and those below attributes.
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.difference_update(range(value.lineno, (value.end_lineno or 0) + 1))
    return len(lines)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """The most blocks inside each other below a node, functions inside it left out."""
    deepest = depth
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in (one for one in children if isinstance(one, ast.AST)):
            if isinstance(child, _FUNCTIONS | ast.ClassDef | ast.Lambda):
                continue
            is_elif = (
                name == "orelse"
                and isinstance(node, ast.If)
                and len(children) == 1
                and isinstance(child, ast.If)
            )
            deeper = isinstance(child, _BLOCKS) and not is_elif
            deepest = max(deepest, nesting(child, depth + deeper))
    return deepest


def deep_functions(files: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Functions with more blocks inside each other than `DEEP`, and how many."""
    for name, path in files.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, _FUNCTIONS) and (depth := nesting(node)) > DEEP:
                yield f"{name}:{node.lineno} {node.name}", depth


def complex_functions() -> Iterator[tuple[str, int]]:
    """Functions whose complexity is over `COMPLEX`, and how much it is."""
    asked = ["--isolated", "--no-cache", "--select=C901", "--exit-zero", "--output-format=json"]
    limit = f"--config=lint.mccabe.max-complexity={COMPLEX}"
    ruff = Path(sys.executable).with_name("ruff")
    said = subprocess.run([ruff, "check", *asked, limit, SOURCE], capture_output=True, check=True)
    for one in json.loads(said.stdout):
        name, found = re.findall(r"`(.+)` is too complex \((\d+)", one["message"])[0]
        path = Path(one["filename"]).relative_to(SOURCE)
        yield f"{path}:{one['location']['row']} {name}", int(found)


def fragments(files: Mapping[str, Path]) -> tuple[int, dict[str, int]]:
    """Private functions, how many there are; those that are named once, and their lines."""
    named: Counter[str] = Counter()
    found: dict[str, tuple[str, int]] = {}
    number = 0
    for module, path in files.items():
        text = path.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        named.update(token.string for token in tokens if token.type == tokenize.NAME)
        for node in ast.walk(parsed(path)):
            if isinstance(node, _FUNCTIONS) and node.name[0] == "_" and node.name[:2] != "__":
                number += 1
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found[node.name] = f"{module}:{node.lineno} {node.name}", lines
    return number, dict(where for name, where in found.items() if named[name] == 2)


def recurring(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that several modules have, and these modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, module in pairs:
        found[name].add(module)
    return {name: sorted(where) for name, where in sorted(found.items()) if len(where) > 1}


def classes(files: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Public classes of modules, each with its module."""
    for module, path in files.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, module


def once_imported(files: Mapping[str, Path]) -> dict[str, str]:
    """Modules with one importer, and that one."""
    importers: dict[str, set[str]] = defaultdict(set)
    for one in Imports().all(types=True):
        names = (one.importer, one.imported)
        if all(files[name].name != "__init__.py" for name in names):
            importers[one.imported].add(one.importer)
    return {name: one for name, (one, *more) in sorted(importers.items()) if not more}


def figures() -> dict[str, Any]:
    """Everything that is reported, as JSON."""
    files = modules()
    named = {name: path for name, path in files.items() if not path.name.startswith("__")}
    once = once_imported(files)
    lengths = {name: len(path.read_bytes().splitlines()) for name, path in files.items()}
    long = {name: length for name, length in lengths.items() if length > LONG}
    deep = dict(deep_functions(files))
    doubles = recurring(classes(files))
    bases = recurring((name.rpartition(".")[2], name) for name in named)
    tangled, (private, once_named) = dict(complex_functions()), fragments(files)
    by_top: dict[str, int] = defaultdict(int)
    for name, path in files.items():
        by_top[top(name)] += code_lines(path)
    return {
        "modules": len(files),
        "modules_without_init": len(named),
        "modules_at_top": sum(path.parent == SOURCE for path in named.values()),
        "folders_at_top": len(
            {path.parent for path in files.values() if path.parent.parent == SOURCE}
        ),
        "code_lines": sum(map(code_lines, files.values())),
        "lines": sum(lengths.values()),
        "modules_with_one_importer": len(once),
        "their_lines": sum(lengths[name] for name in once),
        "their_code_lines": sum(code_lines(files[name]) for name in once),
        f"files_over_{LONG}_lines": len(long),
        f"functions_nested_over_{DEEP}": len(deep),
        f"functions_of_complexity_over_{COMPLEX}": len(tangled),
        "private_functions": private,
        "private_functions_named_once": len(once_named),
        "public_class_names_more_than_once": len(doubles),
        "module_names_more_than_once": len(bases),
        "code_lines_by_top": dict(sorted(by_top.items())),
        "one_importer": once,
        "long_files": long,
        "deep_functions": deep,
        "complex_functions": tangled,
        "named_once": once_named,
        "class_names": doubles,
        "module_names": bases,
    }


def show(found: Mapping[str, Any], *, brief: bool = False) -> Iterator[str]:
    """The figures in lines, and the names behind them; of a brief report, the long files' alone."""
    for key, value in found.items():
        if not isinstance(value, dict):
            yield f"{key:36}{value:>8}"
    for key, value in found.items():
        if isinstance(value, dict) and value and (not brief or key == "long_files"):
            yield f"\n{key}:"
            for name, one in value.items():
                yield f"  {name:44} {', '.join(one) if isinstance(one, list) else one}"


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--brief", action="store_true", help="without the names behind figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    found = figures()
    print("\n".join(show(found, brief=arguments.brief)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
