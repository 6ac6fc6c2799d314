"""How many files a change touches: each recipe of AGENTS.md, counted in the source.

A test names what whoever makes the change would have to look for, and the files it may be found in.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvcache_rag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(kvcache_rag.__file__).parent
ROOT = Path(__file__).parent.parent


def files_with(is_wanted: Callable[[ast.AST], bool], source: Path = SOURCE) -> set[str]:
    """The files of the package that have such a node in their syntax tree."""
    return {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if any(map(is_wanted, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }


def names_in(node: ast.AST) -> Iterator[str]:
    """Every way in which a node can name a field: as code, as a keyword, as a text."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.keyword | ast.arg) and node.arg:
        yield node.arg
    elif isinstance(node, ast.alias):
        yield node.name
    elif isinstance(node, ast.MatchClass):
        yield from node.kwd_attrs
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def files_naming(*names: str, source: Path = SOURCE) -> set[str]:
    """The files of the package that use one of these names; prose about them does not count."""
    wanted = set(names)
    return files_with(lambda node: not wanted.isdisjoint(names_in(node)), source)


WRAPPER = ("chunk_start", "chunk_end")


def test_how_a_chunk_is_wrapped_is_known_in_2_files() -> None:
    assert files_naming(*WRAPPER) == {"prompt/template.py", "prompt/offsets.py"}
    # Nor does anybody else cut the offsets of a wrapped text down to the chunk's own.
    assert files_with(lambda node: isinstance(node, ast.alias) and node.name == "within") == {
        "prompt/offsets.py"
    }


def test_where_chunks_stand_is_worked_out_once_beside_its_specification() -> None:
    """Who decides by the scheme: the formula and its specification, and checks of the name."""

    def is_decided_by_scheme(node: ast.AST) -> bool:
        return isinstance(node, ast.Compare) and not {"reordered", "composite"}.isdisjoint(
            name for part in ast.walk(node) for name in names_in(part)
        )

    checks = {"finetune/config.py", "policies/checks.py"}
    # Tokens that all stand at their own places need no formula.
    shortcut = {"generation/explain.py"}
    assert (
        files_with(is_decided_by_scheme)
        == {"stitching/stitch.py", "kv/mask.py"} | checks | shortcut
    )


def test_a_file_more_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "prompt").mkdir()
    (tmp_path / "prompt" / "template.py").write_text("class T:\n    chunk_start: str = ''\n")
    assert files_naming(*WRAPPER, source=tmp_path) == {"prompt/template.py"}
    for number, line in enumerate(
        (
            "len(template.chunk_start)",
            "getattr(template, 'chunk_end')",
            "Template(chunk_start='<')",
            "def f(chunk_end): pass",
            "match t:\n    case T(chunk_end=x): pass",
        )
    ):
        file = tmp_path / f"other{number}.py"
        file.write_text(line + "\n")
        assert files_naming(*WRAPPER, source=tmp_path) == {"prompt/template.py", file.name}
        file.write_text('"""The chunk_start of a template."""\n# template.chunk_end\n')
        assert files_naming(*WRAPPER, source=tmp_path) == {"prompt/template.py"}


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
        ("kv_codec", DECLARED - {"serve/settings.py"}),
        ("kv_ttl", DECLARED - {"serve/settings.py"}),
    ],
)
def test_an_option_of_the_engine_is_written_in_three_files(option: str, declared: set[str]) -> None:
    """The engine, the settings that it is opened from, and where its users declare it."""
    named = {name for name, path in files_above() if passes_on(path, option)}
    assert named - declared <= {"engine.py", "integration/engine.py"}
    assert declared <= named


PUBLIC = {"__init__.py"}


def files_that_name(name: str, folder: Path = SOURCE) -> set[str]:
    """Files whose code names it; messages and docstrings may give an example."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if name in set(_code_names(ast.parse(path.read_text(encoding="utf-8"))))
    }


def _code_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


@pytest.mark.parametrize(
    ("policy", "file"),
    [
        ("LegoLink", "legolink"),
        ("CacheClip", "cacheclip"),
        ("Ape", "ape"),
        ("ProphetKV", "prophetkv"),
    ],
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
