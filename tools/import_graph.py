"""Which module of ours imports which.

An import inside a function counts as one at the top, and so does `import_module` of a constant;
one under `TYPE_CHECKING` does not, unless it is asked for. `from package import Name` is followed
through the package's `__init__` to the module that defines the name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE: Final = "kvcache_rag"
SOURCE: Final = Path(__file__).resolve().parent.parent / "src" / PACKAGE


@dataclass(frozen=True)
class Import:
    """One import of ours: who, whom, and how.

    Attributes:
        importer: The module that imports.
        imported: The module that defines what is imported.
        line: Of the importer's file.
        kind: `top`, `function` or `types`.
    """

    importer: str
    imported: str
    line: int
    kind: str


def module_name(path: Path, source: Path = SOURCE) -> str:
    """The dotted name of a file; a package's is that of its folder."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module of the package, and its file."""
    return {module_name(path, source): path for path in sorted(source.rglob("*.py"))}


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


class Imports:
    """The imports between the modules of a package, read from its files."""

    def __init__(self, source: Path = SOURCE) -> None:
        self.package = source.name
        self.files = modules(source)
        self._trees = {name: parsed(path) for name, path in self.files.items()}
        self._from = {name: dict(self._names(name)) for name in self.files}

    def all(self, *, types: bool = False) -> list[Import]:
        """Every import, in order of files and lines; those for types only if `types`."""
        found = [
            Import(name, target, line, kind)
            for name, tree in self._trees.items()
            for line, kind, target in self._of(name, tree, "top")
            if target not in (name, self.package) and (types or kind != "types")
        ]
        return sorted(set(found), key=lambda one: (one.importer, one.line, one.imported))

    def _names(self, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """What a module imports from ours: its name there, the module and the name in it."""
        for node in ast.walk(self._trees[name]):
            if isinstance(node, ast.ImportFrom):
                base = self._base(name, node)
                for alias in node.names:
                    yield alias.asname or alias.name, (base, alias.name)

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        """The module after `from`, in full."""
        if not node.level:
            return node.module or ""
        is_package = self.files[name].name == "__init__.py"
        parts = name.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _home(self, module: str, name: str) -> str | None:
        """The module that defines what `from module import name` gives; None if not ours."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            if f"{module}.{name}" in self.files:
                return f"{module}.{name}"
            if module not in self.files:
                return None
            is_package = self.files[module].name == "__init__.py"
            if not is_package or name not in self._from[module]:
                return module
            module, name = self._from[module][name]
        return module

    def _of(self, name: str, node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
        for child in ast.iter_child_nodes(node):
            for target in self._targets(name, child):
                if target is not None:
                    yield child.lineno, kind, target  # type: ignore[attr-defined]
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._of(name, child, "function" if kind == "top" else kind)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for part in child.body:
                    yield from self._of(name, ast.Module([part], []), "types")
                yield from self._of(name, ast.Module(child.orelse, []), kind)
            else:
                yield from self._of(name, child, kind)

    def _targets(self, name: str, node: ast.AST) -> Iterator[str | None]:
        if isinstance(node, ast.ImportFrom):
            base = self._base(name, node)
            yield from (self._home(base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in self.files)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value in self.files
        ):
            yield str(node.args[0].value)


def top(module: str) -> str:
    """The first component below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"
