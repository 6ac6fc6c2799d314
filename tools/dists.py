"""Build every sdist and wheel, install them, and run the tests that the sdists carry.

    python tools/dists.py build dist               # what PyPI would refuse fails here
    python tools/dists.py install dist PLACE       # an environment with all of them
    python tools/dists.py test dist [NAME ...]     # all tests of these sdists, or of every one
    python tools/dists.py alone dist [NAME ...]    # each in empty environments, looked at

An environment, in which tests run, too, has our packages from the wheels of that folder, and
everybody else's as they are installed here.  Empty ones have what the wheel asks for and nothing
else, in the lowest versions that it allows and in the newest; torch alone is the one of here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from email.message import Message

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

PUBLIC: Final = {
    "kvcache-rag": [
        *("kvcache_rag.auxiliary", "kvcache_rag.codecs", "kvcache_rag.errors"),
        *("kvcache_rag.generation", "kvcache_rag.integration", "kvcache_rag.kv"),
        *("kvcache_rag.models", "kvcache_rag.policies", "kvcache_rag.prompt"),
        *("kvcache_rag.stores", "kvcache_rag.verdict"),
        "kvcache_rag",
    ],
    "kvcache-rag-cpu": [],
    "kvcache-rag-documents": ["kvcache_rag_documents"],
    "kvcache-rag-llamacpp": [],
    "kvcache-rag-lab": ["kvcache_rag_lab.reader", "kvcache_rag_lab.finetune"],
    "kvcache-rag-server": ["kvcache_rag_server.auth", "kvcache_rag_server.remote"],
    "kvcache-rag-smollm2": [],
    "langchain-kvcache-rag": ["langchain_kvcache_rag"],
    "llama-index-kvcache-rag": ["llama_index.kvcache_rag"],
    "vllm-kvcache-rag": ["vllm_kvcache_rag"],
}
"""Packages whose names are public, by dist; the last of them is typed."""

COMPILES: Final = {"kvcache-rag-llamacpp"}
"""Dists that need what pip compiles for minutes: environments of tests have them without it, and
`alone` compiles it once."""

LOOK: Final = """
import importlib, importlib.metadata, json, pkgutil, sys
from pathlib import Path

dist, packages = json.loads(sys.argv[1])
for name in packages:
    package = importlib.import_module(name)
    assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    if name == "vllm_kvcache_rag":  # its public name needs vLLM, everything else of it does not
        modules = {one.name for one in pkgutil.iter_modules(package.__path__)} - {"connector"}
        assert modules and all(importlib.import_module(f"{name}.{one}") for one in modules)
    else:
        assert package.__all__ and all(hasattr(package, one) for one in package.__all__)
if packages:
    root = next(iter(Path(package.__file__).parents))
    assert any((one / "py.typed").is_file() for one in (root, root.parent))
for point in importlib.metadata.distribution(dist).entry_points:
    point.load()
ours = [one.name for one in importlib.metadata.distributions() if "kvcache-rag" in one.name]
print(json.dumps(sorted(ours)))
"""
"""Run where only wheels are: what a dist has, and whether it is that of the environment."""


def main() -> int:
    """Build, install, test or look; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    for action in ("build", "install", "test", "alone"):
        actions.add_parser(action).add_argument("folder", type=Path, help="of sdists and wheels")
    actions.choices["install"].add_argument("place", type=Path, help="of the environment")
    for action in ("test", "alone"):
        actions.choices[action].add_argument("names", nargs="*", metavar="NAME", help="of a dist")
    arguments = parser.parse_args()
    if arguments.action == "build":
        build(arguments.folder)
    elif arguments.action == "install":
        environment(arguments.place, arguments.folder, *(PROJECTS.keys() - COMPILES))
    else:
        unknown = set(arguments.names) - PROJECTS.keys()
        if unknown:
            parser.error(f"there is no dist {min(unknown)}; there are {', '.join(PROJECTS)}")
        check = test if arguments.action == "test" else alone
        return check(arguments.folder.resolve(), arguments.names or list(PROJECTS))
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
    whole = [one for one in dists if one not in COMPILES] or ["kvcache-rag[gguf]"]
    subprocess.run([*pip, *install, *whole], check=True)
    if rest := COMPILES.intersection(dists):
        subprocess.run([*pip, *install, "--no-deps", *rest], check=True)
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
        env=_outside(),
        capture_output=True,
        text=True,
    )


def test(folder: Path, names: list[str]) -> int:
    """Run all tests of these sdists; returns the exit code."""
    place = Path(tempfile.mkdtemp(prefix="sdists-"))
    try:
        others = environment(place / "venv", folder, *(PROJECTS.keys() - COMPILES))
        failed = 0
        for name in names:
            # Beside what lacks a dependency, `doctor` would find a problem.
            alone = name in COMPILES
            python = environment(place / name, folder, name) if alone else others
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


def wheel(folder: Path, name: str) -> zipfile.ZipFile:
    """The wheel of a dist."""
    (path,) = folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return zipfile.ZipFile(path)


def metadata(folder: Path, name: str) -> Message[str, str]:
    """What the wheel of a dist says of itself."""
    with wheel(folder, name) as file:
        (path,) = (one for one in file.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(path).decode())


def alone(folder: Path, names: list[str]) -> int:
    """Install each of these wheels alone, and look at it; returns the exit code."""
    failed = 0
    for name in names:
        for resolution in ("highest",) if name in COMPILES else ("lowest-direct", "highest"):
            with tempfile.TemporaryDirectory(prefix="alone-") as place:
                wrong = _alone(folder, name, resolution, Path(place))
            failed += bool(wrong)
            print(f"{name}, {resolution.partition('-')[0]}: {wrong or 'as it should be'}")
    return 1 if failed else 0


def _alone(folder: Path, name: str, resolution: str, place: Path) -> str:
    """What is wrong with a dist in an environment of its own; "" for nothing."""
    python = str(place / "bin" / "python")
    # What it asks for is asked for here, or its lowest versions would not be taken.
    asked = metadata(folder, name).get_all("Requires-Dist", [])
    torch = f"torch=={version('torch')}"
    direct = [torch, name, *(one for one in asked if "extra ==" not in one)]
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(place)],
        # It knows where small wheels are.
        [*pip, "install", "-qq", "--no-compile", torch],
        [*uv, "--resolution", resolution, "--find-links", str(folder), *direct],
        [python, "-I", "-W", "ignore", "-c", LOOK, json.dumps([name, PUBLIC[name]])],
        [str(place / "bin" / "kvcache-rag"), "models", "check", "tiny"],
    ):
        done = subprocess.run(command, cwd=place, env=_outside(), capture_output=True, text=True)
        if done.returncode != 0:
            return f"{' '.join(command[:6])} failed:\n{done.stdout}{done.stderr}"
    return ""


def _outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
