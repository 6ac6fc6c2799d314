"""Commands that pages say to type exist, with the options they are given."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomllib
from packaging.requirements import Requirement
from test_docs import PAGES, ROOT

from kvcache_rag import cli

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHELL = re.compile(r"^( *)```(?:bash|console)\n(.*?)^\1```", re.M | re.S)
FENCED = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
INLINE = re.compile(r"`((?:kvcache-rag |make |pip install |python -m |python tools/)[^`]*)`")
BETWEEN = re.compile(r"^[();<>|&\n]+$")
OURS = (
    *("benchmarks", "kvcache_rag", "kvcache_rag_cpu", "kvcache_rag_documents"),
    *("kvcache_rag_lab", "kvcache_rag_server", "tests", "tools", "training"),
)
FOREIGN = (
    *("bash", "cd", "curl", "docker", "echo", "exec", "export"),
    *("git", "grep", "mkdir", "open-webui", "openssl", "umask"),
)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
PROJECTS = {
    file.parent.relative_to(ROOT).as_posix(): tomllib.loads(file.read_text("utf-8"))["project"]
    for part in (".", "lab", "integrations/*")
    for file in ROOT.glob(f"{part}/pyproject.toml")
}
EXTRAS = {
    name: set(project.get("optional-dependencies", ()))
    for folder, project in PROJECTS.items()
    for name in (project["name"], f"./{folder}" if folder != "." else ".")
}
PINS = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
ROUTES = json.loads((ROOT / "tests" / "golden" / "openapi.json").read_text("utf-8"))["paths"]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in a shell block; what it prints is left out."""
    if re.search(r"^\$ ", text, re.M):
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    text = re.sub(r"(?m)(^|\s+)# .*$", "", text).replace("\\\n", " ")
    lexer = shlex.shlex(
        text.replace("<this repository>", "URL"), True, punctuation_chars="();<>|&\n"
    )
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not BETWEEN.match(word):
            words.append(word)
        elif words and "<" not in word and ">" not in word:
            yield words
            words = []


def program(words: Sequence[str]) -> tuple[str, list[str]]:
    """What a command runs, without the folder of its environment, and what that is given."""
    while "=" in words[0]:  # a variable
        words = words[1:]
    return words[0].removeprefix("./").rpartition("bin/")[2], list(words[1:])


def options(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """All options of a subcommand, and of what it calls subcommands, as far as `words` name one."""
    known = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            named = [word for word in words[:1] if not word.startswith("-")]
            assert set(named) <= set(action.choices), named
            below = [action.choices[word] for word in named] or action.choices.values()
            known |= {name for one in below for name in options(one, words[1:])}
    return known


def check(words: Sequence[str], *, whole: bool) -> None:
    """Refuse a command that does not exist; unless it is whole, only what it names is looked at."""
    name, rest = program(words)
    if name == "kvcache-rag":
        check_ours(rest, whole=whole)
    elif name in CHECKS:
        CHECKS[name](rest)
    elif whole:
        assert name in FOREIGN, f"who knows {name}? {shlex.join(words)}"


def check_ours(words: Sequence[str], *, whole: bool) -> None:
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("COMMAND", "--help"):
        return
    parser = argparse.ArgumentParser(prog=f"kvcache-rag {words[0]}")
    cli._find(words[0]).add_arguments(parser)
    if whole:
        complaints = io.StringIO()
        try:
            with contextlib.redirect_stderr(complaints):
                parser.parse_args(words[1:])
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}: {complaints.getvalue()}")
    given = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
    assert given <= options(parser, words[1:]), shlex.join(words)


def check_make(words: Sequence[str]) -> None:
    targets = {word for word in words if "=" not in word and not word.startswith("-")}
    assert targets <= TARGETS | {".venv/.installed-dev"}


def check_pip(words: Sequence[str]) -> None:
    for word in words[1:]:
        check_requirement(word)


def check_pytest(words: Sequence[str]) -> None:
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words


def check_curl(words: Sequence[str]) -> None:
    if url := re.search(r"(?:localhost|127\.0\.0\.1):800\d(/[\w/]*)", shlex.join(words)):
        assert url[1] in ROUTES


def check_requirement(word: str) -> None:
    name, _, extras = word.rstrip("]").partition("[")
    if name.startswith((".", "kvcache-rag")) or name in EXTRAS:
        asked = set(extras.split(",")) if extras else set()
        assert asked <= EXTRAS[name], word
    elif "==" in word:
        (pin,) = [pin for pin in PINS if pin.startswith(f"{Requirement(word).name}==")]
        assert pin.partition(" ")[0] == word, "another version is in constraints.txt"


def check_python(words: Sequence[str]) -> None:
    if words[0] == "-m":
        module = words[1]
        if module.partition(".")[0] not in OURS:
            return
        found = find_spec(module)
        assert found is not None, module
        folders = found.submodule_search_locations
        file = Path(next(iter(folders)), "__main__.py") if folders else Path(str(found.origin))
    else:
        file = ROOT / words[0]
    text = file.read_text(encoding="utf-8")
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
    assert not unknown, f"{file.relative_to(ROOT)} has no {unknown}"


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "pytest": check_pytest,
    "curl": check_curl,
}


# Pages that say what is gone name it.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ("from-0.1.md", "from-0.2.md")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for _, block in SHELL.findall(text):
        for words in commands(block):
            check(words, whole=True)
    for span in INLINE.findall(FENCED.sub("", text)):
        for words in commands(span.replace("...", "").replace("…", "")):
            check(words, whole=False)
