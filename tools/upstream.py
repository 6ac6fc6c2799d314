"""Run langchain-chroma's own tests, from its sdist, against `KVCacheChroma` instead of its class.

    python tools/upstream.py           # compares outcomes with tests/upstream/langchain-chroma.txt
    python tools/upstream.py --write   # writes that list anew

The sdist is that of the installed version.  It is downloaded and read outside the repository.
llama-index-vector-stores-chroma has no tests in its sdist; ours are in the integration's `tests`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest

DIST: Final = "langchain-chroma"
ROOT: Final = Path(__file__).resolve().parent.parent
LIST: Final = ROOT / "tests" / "upstream" / f"{DIST}.txt"
HEAD: Final = f"# Outcomes of the tests of {DIST} {{}} with KVCacheChroma, by tools/upstream.py.\n"
OUTCOMES: Final = "KVCACHE_RAG_UPSTREAM_OUTCOMES"
ENGINE: Final = pytest.StashKey[Any]()


def main() -> int:
    """Run the tests and compare or write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the list anew")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(unpacked(Path(scratch)), Path(scratch) / "outcomes.txt")
    text = HEAD.format(version(DIST)) + "".join(f"{line}\n" for line in found)
    if arguments.write:
        LIST.write_text(text, encoding="utf-8")
        return 0
    known, now = LIST.read_text(encoding="utf-8").splitlines(), text.splitlines()
    changed = [f"- {one}" for one in known if one not in now]
    changed += [f"+ {one}" for one in now if one not in known]
    print("\n".join(changed) or f"{DIST} {version(DIST)}: {len(found)} outcomes as expected")
    return 1 if changed else 0


def unpacked(folder: Path) -> Path:
    """The sdist of the installed version, as a folder."""
    name = f"{DIST}=={version(DIST)}"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", DIST]
    subprocess.run([*pip, "-d", str(folder), name], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(sdist: Path, outcomes: Path) -> list[str]:
    """What became of each test, sorted."""
    # Its own class must be the installed one, not the copy beside its tests.
    for package in sdist.glob("langchain_*"):
        package.rename(package.with_name(f"not_{package.name}"))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.upstream"]
    command += [
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
    ]
    options = ["-c", os.devnull, "--rootdir", str(sdist), "-o", "asyncio_mode=auto"]
    subprocess.run(
        [*command, *options, "tests"],
        cwd=sdist,
        env={**os.environ, "PYTHONPATH": paths, OUTCOMES: str(outcomes)},
        check=False,  # a test that fails may be expected to
    )
    return sorted(outcomes.read_text(encoding="utf-8").splitlines())


# ---------------------------------------------------------------------- in the process of pytest
def pytest_configure(config: pytest.Config) -> None:
    """Put ours in the place of the stock class, before the tests import it."""
    import langchain_chroma
    from langchain_chroma import vectorstores

    from kvcache_rag import Engine
    from langchain_kvcache_rag import KVCacheChroma

    engine = Engine.from_pretrained("tiny")

    class Chroma(KVCacheChroma):
        """With an engine, as an application gives it one."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            if "llm" not in options:
                options["engine"] = engine
            super().__init__(*arguments, **options)

    config.stash[ENGINE] = engine
    for module in (langchain_chroma, vectorstores):
        setattr(module, "Chroma", Chroma)  # noqa: B010  # mypy refuses to assign to a class


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of a test."""
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"  # type: ignore[assignment]
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.write(f"{report.nodeid}  {outcome}\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note whether the tests met our class at all."""
    prefilled = session.config.stash[ENGINE].store.stats().puts > 0
    with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
        file.write(f"documents were prefilled: {'yes' if prefilled else 'no'}\n")


if __name__ == "__main__":
    raise SystemExit(main())
