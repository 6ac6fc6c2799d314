"""What is tracked is what is linted and shipped: no folder has a name that a tool leaves out."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = "src/kvcache_rag"
KERNELS = "integrations/kvcache-rag-cpu/kvcache_rag_cpu"


def run(*words: str, said: str = "") -> list[str]:
    done = subprocess.run(
        words, cwd=ROOT, input=said, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (0, 1), done.stderr  # 1 of `git check-ignore`: nothing is ignored
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    return run("git", "ls-files")


def test_nothing_that_is_tracked_is_ignored(tracked: list[str]) -> None:
    ignored = run("git", "check-ignore", "--no-index", "--stdin", said="\n".join(tracked))
    assert ignored == []


def test_every_module_is_linted(tracked: list[str]) -> None:
    """Ruff leaves out folders of some names, such as `build` and `dist`."""
    modules = {name for name in tracked if name.startswith("src/") and name.endswith(".py")}
    looked_at = run(sys.executable, "-m", "ruff", "check", "--show-files", "src")
    assert modules <= {Path(name).relative_to(ROOT).as_posix() for name in looked_at}


@pytest.mark.parametrize("source", [SOURCE, KERNELS])
def test_the_wheel_holds_what_is_tracked(source: str, tracked: list[str], tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="what builds the wheel is not installed")
    project, _, _ = source.rpartition("/")
    where = "." if source == SOURCE else project
    build = (
        "import os, sys, hatchling.build as b; os.chdir(sys.argv[2]); "
        "print(b.build_wheel(sys.argv[1]))"
    )
    (wheel,) = run(sys.executable, "-c", build, str(tmp_path), where)
    with zipfile.ZipFile(tmp_path / wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    there = {name for name in tracked if (ROOT / name).is_file()}
    own = {name.removeprefix(f"{project}/") for name in there if name.startswith(f"{source}/")}
    new = set(run("git", "ls-files", "--others", "--exclude-standard", source))
    compiled = {name for name in names if name.endswith(".so")}  # where there is a compiler
    assert names - compiled == own | {name.removeprefix(f"{project}/") for name in new}
    kernels = {name for name in own if name.endswith(".c")}
    built = {str(Path(name).with_name(f"lib{Path(name).stem}.so")) for name in kernels}
    compiler = os.environ.get("CC") or shutil.which("gcc")
    # What does not compile is left out of the wheel, and its tests are skipped.
    assert compiled == (built if compiler and platform.machine() == "x86_64" else set())
    assert not any("training" in Path(name).parts for name in names)
