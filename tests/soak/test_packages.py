"""Every dist installs alone from its wheel, and its sdist passes the tests that it carries.

Here, as it takes minutes to build ten of them and to make an environment for each.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvcache_rag import __version__
from tools import dists

pytest.importorskip("build", reason="what builds sdists and wheels is not installed")

# Tests of each sdist that take no more than a second or two.
QUICK = {
    "kvcache-rag": ["tests/test_chunk.py"],
    "kvcache-rag-cpu": ["tests/test_rounded_weights.py"],
    "kvcache-rag-documents": ["tests/test_real_files.py"],
    "kvcache-rag-lab": ["tests/test_scoring_statistics.py"],
    "kvcache-rag-llamacpp": ["tests/test_backend.py"],
    "kvcache-rag-server": ["tests/test_differing.py"],
    "kvcache-rag-smollm2": ["tests"],
    "langchain-kvcache-rag": ["tests/test_embeddings.py"],
    "llama-index-kvcache-rag": ["tests/test_embeddings.py"],
    "vllm-kvcache-rag": ["tests/test_settings.py"],
}
# Dists of ours that come along with one, beside the core.
ASKED = {
    "kvcache-rag-lab": {"kvcache-rag-cpu", "kvcache-rag-documents", "kvcache-rag-server"},
    "kvcache-rag-server": {"kvcache-rag-cpu", "kvcache-rag-documents"},
    "langchain-kvcache-rag": {"kvcache-rag-cpu"},
    "llama-index-kvcache-rag": {"kvcache-rag-cpu", "kvcache-rag-documents"},
}
LINK = re.compile(r"\]\(([^)\s]+)|\b(?:src|srcset|href)=\"([^\"]+)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every sdist and wheel; `twine check --strict` was content with them."""
    folder = tmp_path_factory.mktemp("dist")
    dists.build(folder)
    return folder


@pytest.fixture(scope="module")
def everything(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheels of all dists."""
    names = dists.PUBLIC.keys() - dists.COMPILES
    return dists.environment(tmp_path_factory.mktemp("all") / "venv", built, *names)


def test_every_dist_has_an_sdist_and_a_wheel(built: Path) -> None:
    assert dists.PROJECTS.keys() == dists.PUBLIC.keys()
    names = {path.name.partition("-")[0].replace("_", "-") for path in built.iterdir()}
    assert names == dists.PUBLIC.keys()
    assert len(list(built.glob("*.tar.gz"))) == len(list(built.glob("*.whl"))) == len(dists.PUBLIC)
    assert not list(built.glob("*-linux_*.whl")), "PyPI would refuse it"


@pytest.mark.parametrize("name", dists.PUBLIC)
def test_a_dist_installs_alone(name: str, built: Path, tmp_path: Path) -> None:
    python = dists.environment(tmp_path / "venv", built, name)

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    looked = json.dumps([name, dists.PUBLIC[name]])
    there = json.loads(run(python, "-I", "-W", "ignore", "-c", dists.LOOK, looked))
    asked = ASKED.get(name, set())
    assert there == sorted({"kvcache-rag", name} | asked)
    shown = run(python.with_name("kvcache-rag"), "--help")
    assert ("\n  ingest " in shown) == (name == "llama-index-kvcache-rag")


def test_a_dist_of_another_version_is_not_taken(built: Path, tmp_path: Path) -> None:
    """Pip would rather fail than put two versions together."""
    pins = dists.metadata(built, "langchain-kvcache-rag").get_all("Requires-Dist", [])
    assert f"kvcache-rag~={__version__}" in pins
    alone = tmp_path / "alone"
    alone.mkdir()
    (path,) = built.glob("langchain_kvcache_rag-*.whl")
    shutil.copy(path, alone)
    with pytest.raises(subprocess.CalledProcessError):
        dists.environment(tmp_path / "venv", alone, "langchain-kvcache-rag")


@pytest.mark.parametrize("name", dists.PUBLIC)
def test_metadata_is_what_pypi_shows(name: str, built: Path) -> None:
    found = dists.metadata(built, name)
    assert found["Version"] == __version__
    urls = dict(one.split(", ", 1) for one in found.get_all("Project-URL", []))
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert urls == dict(
        one.split(", ", 1)
        for one in dists.metadata(built, "kvcache-rag").get_all("Project-URL", [])
    )
    kinds = found.get_all("Classifier", [])
    pythons = {one.rpartition(" ")[2] for one in kinds if re.search(r":: 3\.\d+$", one)}
    assert pythons == {"3.10", "3.11", "3.12", "3.13"}
    assert found["License-Expression"] == ("CC-BY-SA-4.0" if "smollm2" in name else "MIT")
    assert found["License-File"]
    text = str(found.get_payload())
    assert "git clone" not in text, "there is no checkout for who reads it there"
    assert "'./" not in text
    by_extra = f"pip install 'kvcache-rag[{name.removeprefix('kvcache-rag-')}]'"
    assert f"pip install {name}" in text or f"pip install '{name}" in text or by_extra in text
    links = [one or other for one, other in LINK.findall(text)]
    assert [one for one in links if not one.startswith(("https://", "#"))] == []
    assert name == "kvcache-rag-smollm2" or any("/kvcache-rag/" in one for one in links)


def test_kernels_are_in_their_sdist_and_the_core_is_for_every_machine(built: Path) -> None:
    """What of them is in the wheel is told in `tests/test_distribution.py`."""
    assert list(built.glob("kvcache_rag-*-py3-none-any.whl"))
    with tarfile.open(next(built.glob("kvcache_rag_cpu-*.tar.gz"))) as sdist:
        packed = {Path(*Path(one).parts[1:]).as_posix() for one in sdist.getnames()}
    assert len([one for one in packed if one.endswith(".c")]) == 3
    assert "hatch_build.py" in packed
    assert "Makefile" not in packed, "what its targets install is not there"
    assert not any(one.endswith(".so") for one in packed)


@pytest.mark.parametrize("name", dists.PUBLIC)
def test_an_sdist_passes_its_tests(
    name: str, built: Path, everything: Path, tmp_path: Path
) -> None:
    source = dists.unpacked(built, name, tmp_path)
    python = everything
    if name in dists.COMPILES:
        python = dists.environment(tmp_path / "venv", built, name)
    done = dists.pytest(python, source, *QUICK[name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
