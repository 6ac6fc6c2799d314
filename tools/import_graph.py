"""Which module of ours imports which, and which folders would import each other after a move.

An import inside a function counts as one at the top, and so does `import_module` of a constant;
one under `TYPE_CHECKING` does not, unless it is asked for. `from package import Name` is followed
through the package's `__init__` to the module that defines the name.
"""

from __future__ import annotations

import ast
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PACKAGE: Final = "kvcache_rag"
SOURCE: Final = Path(__file__).resolve().parent.parent / "src" / PACKAGE
OUTSIDE: Final = "(outside)"
"""Where a module goes that leaves the package."""


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


def read_plan(path: Path) -> dict[str, str]:
    """A mapping of old to new modules, from a file of `old,new`; titles are left out.

    Raises:
        ValueError: A module is given two places.
    """
    plan: dict[str, str] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.reader(line for line in file if line.strip() and line[0] != "#"):
            old, new = (_dotted(cell) for cell in row[:2])
            if old.endswith(".old"):
                continue
            if plan.setdefault(old, new) != new:
                raise ValueError(f"{path}: {old} goes to {plan[old]} and to {new}; name one.")
    return plan


def _dotted(cell: str) -> str:
    """A module's name in full, from a name or a path below the package or `src`."""
    name = cell.strip().removeprefix("src/").removesuffix(".py").replace("/", ".")
    name = name.removesuffix(".__init__")
    is_full = name.split(".")[0] in (PACKAGE, "training", "tests", "tools")
    return name if is_full else f"{PACKAGE}.{name}"


def moved(module: str, plan: Mapping[str, str]) -> str:
    """Where a module goes: by its own row, by that of a folder it lies in, or nowhere."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        head = ".".join(parts[:length])
        if head in plan:
            return ".".join([plan[head], *parts[length:]])
    return module


def top(module: str) -> str:
    """The first component below the package."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return OUTSIDE
    return parts[1] if len(parts) > 1 else "__init__"


Graph = dict[str, dict[str, list[Import]]]


def folder_graph(imports: Iterable[Import], plan: Mapping[str, str] | None = None) -> Graph:
    """Which first component imports which after the moves, and by which imports of today."""
    graph: Graph = {}
    for one in imports:
        importer, imported = (top(moved(name, plan or {})) for name in (one.importer, one.imported))
        # The package itself names everything; what leaves it may import it.
        if importer not in (imported, "__init__", OUTSIDE):
            graph.setdefault(importer, {}).setdefault(imported, []).append(one)
            graph.setdefault(imported, {})
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Sets of folders that all reach each other, each in the order with the fewest imports up."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {
        frozenset([name, *(other for other in reached[name] if name in reached[other])])
        for name in graph
        if name in reached[name]
    }
    return sorted((ordered(graph, sorted(group)) for group in groups), key=len)


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph[waiting.pop()]) - seen
        seen |= new
        waiting += new
    return seen


def ordered(graph: Graph, names: list[str]) -> list[str]:
    """High to low, so that few imports go up: each name is put where it costs least."""

    def weight(low: str, high: str) -> int:
        return len(graph.get(low, {}).get(high, ()))

    def cost(order: list[str]) -> int:
        return sum(weight(low, high) for at, low in enumerate(order) for high in order[:at])

    best = names
    is_better = True
    while is_better:
        is_better = False
        for name in names:
            rest = [other for other in best if other != name]
            tries = [[*rest[:at], name, *rest[at:]] for at in range(len(rest) + 1)]
            found = min(tries, key=cost)
            if cost(found) < cost(best):
                best, is_better = found, True
    return best


def shortest(graph: Graph, group: list[str]) -> list[str]:
    """One shortest way round in a group, its first name again at its end."""
    ways = [[name] for name in group]
    while ways:
        way = ways.pop(0)
        for following in graph[way[-1]]:
            if following == way[0]:
                return [*way, following]
            if following in group and following not in way:
                ways.append([*way, following])
    raise ValueError("These folders do not import each other in a circle; give a circle.")


def report(graph: Graph, plan: Mapping[str, str]) -> Iterator[str]:
    """Each circle in words: the folders, the imports that go up, and how heavy the others are."""
    found = circles(graph)
    if not found:
        yield f"no circle among {len(graph)} folders and modules at the top"
    for group in found:
        yield f"CIRCLE of {len(group)}: {' > '.join(group)} (this order has the fewest imports up)"
        yield f"  shortest: {' -> '.join(shortest(graph, group))}"
        for at, low in enumerate(group):
            for high in group[:at]:
                yield from _edge(graph, low, high, plan)
        downs = [
            f"{high} -> {low} {len(graph[high][low])}"
            for at, high in enumerate(group)
            for low in group[at + 1 :]
            if low in graph[high]
        ]
        yield f"  down: {', '.join(downs)}"
    for name, targets in sorted(graph.items()):
        for one in targets.get(OUTSIDE, ()):
            yield f"LEAVES: {name}: {one.importer}:{one.line} imports {one.imported}"


def _edge(graph: Graph, low: str, high: str, plan: Mapping[str, str]) -> Iterator[str]:
    found = graph[low].get(high, [])
    if found:
        yield f"  up: {low} -> {high}: {len(found)} imports"
    for one in found:
        names = [
            f"{name} (-> {moved(name, plan)})" if moved(name, plan) != name else name
            for name in (one.importer, one.imported)
        ]
        where = "" if one.kind == "top" else f", {one.kind}"
        yield f"    {names[0]}:{one.line}{where} imports {names[1]}"


def unplanned(plan: Mapping[str, str], files: Iterable[str]) -> list[str]:
    """Rows of a plan whose old module there is not."""
    known = set(files)
    heads = {name.rpartition(".")[0] for name in known}
    return sorted(old for old in plan if old not in known | heads)
