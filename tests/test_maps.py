"""What maps of the code name, docs/design.md and AGENTS.md, is there."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from mutants import table
from quick import slow_names

from tools import house

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/design.md", "AGENTS.md")
SOURCES = (".c", ".cfg", ".ini", ".py", ".sh", ".toml", ".txt", ".yml")
WORD = re.compile(r"[A-Za-z_]\w*")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?|[\w-]+\.(?:c|ini|json|md|py|sh|so|toml|txt)")


@cache
def listed() -> tuple[str, ...]:
    """Every file and folder that is tracked."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [file for file in git.stdout.split() if (ROOT / file).exists()]
    folders = {str(folder) for file in files for folder in PurePosixPath(file).parents}
    return (*files, *sorted(folders))


@cache
def sources() -> dict[str, str]:
    """Every file of code but this one, by its path."""
    paths = [path for path in listed() if path.endswith((*SOURCES, "Makefile"))]
    return {
        path: (ROOT / path).read_text(encoding="utf-8", errors="replace")
        for path in paths
        if path != "tests/test_maps.py"
    }


@cache
def words() -> frozenset[str]:
    return frozenset(WORD.findall("\n".join((*sources().values(), *listed()))))


@cache
def homes(name: str) -> tuple[str, ...]:
    """Modules of this name, and those that define a class or a function of this name."""
    defined = re.compile(rf"^(?:class|def) {name}\b|^{name}\b[^\n]*=", re.MULTILINE)
    module = (f"/{name}.py", f"/{name}/__init__.py")
    return tuple(
        text
        for path, text in sources().items()
        if path.endswith(module) or (path.endswith(".py") and name in text and defined.search(text))
    )


def has(text: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", text) is not None


def problem(code: str) -> str:
    """What of a piece of code is not there; "" if all of it is."""
    place, _, member = code.rpartition(".")
    if PATH.fullmatch(code) and ("/" in code or code.endswith(SOURCES)) and "*" not in code:
        if any(one == code.rstrip("/") or one.endswith("/" + code.rstrip("/")) for one in listed()):
            return ""
        found = [text for path, text in sources().items() if path.endswith(f"{place}.py")]
        is_there = member and any(has(text, member) for text in found)
        return "" if is_there else f"there is no {code}"
    for name in WORD.findall(code):
        if name not in words():
            return f"nothing is called {name} ({code})"
    for owner, attribute in re.findall(r"\b([A-Za-z_]\w+)\.([a-z_]\w+)\b(?!\.)", code):
        files = homes(owner)
        inside = (f"{owner}/{attribute}", f"{owner}/{attribute}.py", f"{owner}.{attribute}")
        group = f'entry-points."{owner}.{attribute}"]'
        is_inside = any(one.endswith(inside) for one in listed())
        is_inside = is_inside or any(group in text for text in sources().values())
        if files and not is_inside and not any(has(text, attribute) for text in files):
            return f"{owner} has no {attribute} ({code})"
    return ""


def named(page: str) -> list[str]:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return sorted(set(re.findall(r"`([^`\n]+)`", text)))


@pytest.mark.parametrize("page", PAGES)
def test_names_of_a_map_are_there(page: str) -> None:
    found = named(page)
    assert len(found) > 50
    assert [one for one in map(problem, found) if one] == []


@pytest.mark.parametrize(
    "code",
    ["Engine._run", "policies/nothing.py", "surely_nowhere_at_all()", "kv/mask.no_mask"],
)
def test_a_name_that_is_not_there_is_found(code: str) -> None:
    assert problem(code)


def test_the_picture_of_the_house_follows_the_imports() -> None:
    assert house.PICTURE.read_text(encoding="utf-8") == house.drawn(), "run tools/house.py"


def test_every_mutant_stands_in_the_code_and_names_tests_that_are_there() -> None:
    """So that `make mutants`, which takes long, is not what tells it."""
    for mutant in table():
        assert mutant.text(ROOT / "src/kvcache_rag")
        for test in mutant.tests:
            assert is_there(test), test


def test_what_is_slow_is_there() -> None:
    assert [name for name in sorted(slow_names()) if not is_there(name)] == []


def is_there(test: str) -> bool:
    """Whether a test's file has its function, or its class and tests that this inherits."""
    file, _, name = test.partition("::")
    if not (ROOT / file).exists():
        return False
    text = (ROOT / file).read_text(encoding="utf-8")
    nested, _, function = name.partition("[")[0].rpartition("::")
    if f"def {function}(" in text or not function:
        return True
    return f"class {nested}(" in text and ("contracts" in text or "langchain_tests" in text)
