"""What a public project has beside its code says what is so: workflows, citation, changelog."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache_rag import __version__
from tests.golden_surfaces import PACKAGES

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


def test_every_python_that_is_named_is_tested() -> None:
    matrix = loaded(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text("pyproject.toml"))
    assert matrix["python"] == named


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
