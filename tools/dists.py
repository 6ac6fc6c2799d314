"""Build every sdist and wheel, install them, and run the tests that the sdists carry.

    python tools/dists.py build dist               # what PyPI would refuse fails here
    python tools/dists.py install dist PLACE       # an environment with all of them
    python tools/dists.py test dist [NAME ...]     # all tests of these sdists, or of every one

Such an environment, in which tests run, too, has our packages from the wheels of that folder, and
everybody else's as they are installed here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_OTHERS: Final = sorted(
    path.parent
    for part in ("integrations/*", "lab")
    for path in ROOT.glob(f"{part}/pyproject.toml")
)
PROJECTS: Final = {
    {ROOT: "kvcache-rag", ROOT / "lab": "kvcache-rag-lab"}.get(path, path.name): path
    for path in (ROOT, *_OTHERS)
}
"""The folder of every dist, the core first."""


def main() -> int:
    """Build, install or test; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("build", "install", "test"):
        actions.add_parser(action).add_argument("folder", type=Path, help="of sdists and wheels")
    actions.choices["install"].add_argument("place", type=Path, help="of the environment")
    actions.choices["test"].add_argument("names", nargs="*", metavar="NAME", help="of a dist")
    arguments = parser.parse_args()
    if arguments.action == "build":
        build(arguments.folder)
    elif arguments.action == "install":
        environment(arguments.place, arguments.folder, *PROJECTS)
    else:
        unknown = set(arguments.names) - PROJECTS.keys()
        if unknown:
            parser.error(f"there is no dist {min(unknown)}; there are {', '.join(PROJECTS)}")
        return test(arguments.folder, arguments.names or list(PROJECTS))
    return 0


def build(folder: Path) -> None:
    """Write an sdist and a wheel of every dist, each wheel out of its sdist, and check them."""
    for project in PROJECTS.values():
        _run("-m", "build", "--no-isolation", "--outdir", str(folder), str(project))
    for wheel in folder.glob("*-linux_*.whl"):
        # PyPI wants to know which systems its kernels run on; nothing in it is patched.
        words = ("--patcher", "none", "--wheel-dir", str(folder), str(wheel))
        _run("-m", "auditwheel", "repair", *words)
        wheel.unlink()
    _run("-m", "twine", "check", "--strict", *map(str, sorted(folder.iterdir())))


def _run(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def environment(place: Path, wheels: Path, *dists: str) -> Path:
    """Make an environment with these dists, which find each other among the wheels.

    Returns:
        Its Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin" / "python"
    shared = place / "shared" / "site-packages"  # by which tools know what is not ours
    shared.mkdir(parents=True)
    folders = [Path(one) for one in sys.path if any(Path(one).glob("*.dist-info"))]
    for entry in (entry for folder in folders for entry in folder.iterdir()):
        # Ours are left out, so that pip has to find them; the namespace llama_index is shared.
        if "kvcache_rag" not in entry.name and not (shared / entry.name).exists():
            (shared / entry.name).symlink_to(entry)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    install = ("install", "-qq", "--no-index", "--no-compile", "--find-links", str(wheels))
    subprocess.run([*pip, *install, *dists], check=True)
    return python


def unpacked(sdists: Path, name: str, place: Path) -> Path:
    """The folder of a dist's sdist, unpacked."""
    (sdist,) = sdists.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tarfile.open(sdist) as file:
        if sys.version_info >= (3, 12):
            file.extractall(place, filter="data")
        else:
            file.extractall(place)
    return place / sdist.name.removesuffix(".tar.gz")


def pytest(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run tests of an unpacked sdist."""
    return subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )


def test(folder: Path, names: list[str]) -> int:
    """Run all tests of these sdists; returns the exit code."""
    place = Path(tempfile.mkdtemp(prefix="sdists-"))
    try:
        python = environment(place / "venv", folder.resolve(), *PROJECTS)
        failed = 0
        for name in names:
            source = unpacked(folder, name, place)
            words = ("--ignore=tests/soak", "--ignore-glob=*/engine_tests")
            done = pytest(python, source, *words)
            failed += done.returncode != 0
            print(f"{name}: {done.stdout.splitlines()[-1] if done.stdout else done.stderr}")
            if done.returncode != 0:
                print(done.stdout)
        return 1 if failed else 0
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
