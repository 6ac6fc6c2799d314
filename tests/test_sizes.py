"""The gate scripts find what they are for, and the repository passes them."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sizes = load("check_sizes")
paths = load("check_paths")


def test_repository_has_no_overgrown_file_or_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert sizes.main(sizes.FOLDERS) == 0


@pytest.mark.parametrize(("lines", "findings"), [(300, 0), (301, 1)])
def test_long_file_is_found(tmp_path: Path, lines: int, findings: int) -> None:
    file = tmp_path / "long.py"
    file.write_text("x = 1\n" * lines)
    assert len(list(sizes.problems(file))) == findings


def test_test_files_may_be_longer(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_long.py"
    file.write_text("x = 1\n" * 500)
    assert list(sizes.problems(file)) == []


@pytest.mark.parametrize(("lines", "findings"), [(80, 0), (81, 1)])
def test_long_function_is_found(tmp_path: Path, lines: int, findings: int) -> None:
    file = tmp_path / "long.py"
    file.write_text("class A:\n    async def grown():\n" + "        x = 1\n" * (lines - 1))
    found = list(sizes.problems(file))
    assert len(found) == findings
    assert all("grown" in problem for problem in found)


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("see /" + "work/main", 1),
        ("open('/" + "tmp/x')", 1),
        ("https://example.org/home/page and ./work/here", 0),
        ("nothing", 0),
    ],
)
def test_machine_paths_are_found(tmp_path: Path, text: str, findings: int) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"first line\n{text}\n")
    assert len(list(paths.problems(file))) == findings


def test_binary_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"\xff\xfe/" + b"work/")
    assert list(paths.problems(file)) == []


def test_only_the_repository_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored.md\n")
    for name in ("ignored.md", "seen.md"):
        (tmp_path / name).write_text("/" + "work/x\n")
    monkeypatch.chdir(tmp_path)
    assert paths.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "seen.md:1: names a path of one machine: /" + "work/x"
