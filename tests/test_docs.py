"""What pages say to run runs or says why not; links lead somewhere; tables are what was found."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest

from benchmarks import front, pruning_page, vllm_page
from kvcache_rag.models.adapters import PACKAGED_ADAPTERS, is_installed
from kvcache_rag.models.pretrained import PACKAGED
from kvcache_rag_lab.scoring.statistics import Interval

ROOT = Path(__file__).parent.parent
# docs/serving.md has a test of its own, in which snippets follow each other.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*/*/README.md")),
]
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```(\n\n```text\n(.*?)```)?", re.S)
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), number, code, output)
    for page in PAGES
    if page.name not in ("serving.md", "CHANGELOG.md")
    for number, (reason, code, _, output) in enumerate(BLOCK.findall(page.read_text("utf-8")))
    if not reason
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


@pytest.mark.parametrize(
    ("code", "output"),
    [pytest.param(code, output, id=f"{page}:{number}") for page, number, code, output in BLOCKS],
)
def test_a_block_runs_and_prints_what_it_says(code: str, output: str, tmp_path: Path) -> None:
    for name, model in PACKAGED.items():
        if f'"{name}"' in code:
            try:
                importlib.metadata.version(model.package)
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(model.install)
            if not is_installed(model.adapter):
                pytest.skip(f"pip install {PACKAGED_ADAPTERS[model.adapter]}")
    status, printed, errors = forks.run(code, tmp_path)
    assert status == 0, errors
    if output:
        assert printed == output


def test_the_readme_has_blocks_that_run() -> None:
    assert sum(page == "README.md" for page, *_ in BLOCKS) >= 2


def test_readme_and_the_first_page_say_the_same() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("(docs/", "(")
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")

    def part(text: str, heading: str) -> str:
        return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]

    commands = [
        re.findall(r"```bash\n.*?```", part(text, "Install"), re.S) for text in (readme, home)
    ]
    assert commands[0] == commands[1] != []
    works = "Will it work with mine?"
    assert part(readme, works).strip() == part(home, works).strip() != ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and the site write them."""
    found = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S))
    plain = [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in found]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def test_the_first_figures_are_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--check"])
    assert front.main() == 0, capsys.readouterr().err


def test_the_table_of_vllm_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--check"])
    assert vllm_page.main() == 0, capsys.readouterr().err


def test_the_first_figures_have_what_was_measured_and_no_more() -> None:
    case = {"context_tokens": 1000, "chunks": 4, "full": [2.0], "cached": [0.1], "add": [1.0]}
    times = {"facts": {"dtype": "bfloat16", "machine": "Z80, 1 cores"}, "cases": [case]}
    text = front.home(times, None, None)
    assert text.endswith("| 1,000 | 2.00 s | 100 ms | 20 x |\n")
    assert "(Z80)" in text

    ms, ratio = Interval(200.0, 190.0, 210.0, 16), Interval(5.0, 4.0, 6.0, 16)
    row = {"right": 0.5, "wrong": 0.125, "ms": [ms], "sooner": [ratio]}
    answers: dict[str, Any] = {"title": "Big", "rows": 1220, "half": "asked once"}
    answers |= {"lengths": ["1k"], "lost": None, "tuned": None, "chosen": None}
    text = front.home(times, {**answers, "policies": {"full": row, "bestlast": row}}, None)
    assert text.startswith("**Big**")
    assert "answers to 1,220 public questions (asked once;" in text
    assert "| full prefill | 200 ms | 50.0 % | 12.5 % |\n" in text
    assert "the default | 200 ms, **5.0 times sooner** | 50.0 % | 12.5 % |\n" in text
    assert "loses" not in text
    for high, told in ((-0.01, True), (0.0, False)):
        answers["lost"] = SimpleNamespace(difference=-0.04, low=-0.08, high=high)
        text = front.home(times, {**answers, "policies": {"full": row, "bestlast": row}}, None)
        assert ("loses 4.0 points of right answers to full prefill (1.0 to 8.0)" in text) == told
        assert ("misses its bar of at most 2" in text) == told
    answers["lost"] = SimpleNamespace(difference=-0.015, low=-0.02, high=-0.01)
    answers["chosen"] = {"rows": 1100, "lost": 0.5}
    text = front.home(times, {**answers, "policies": {"full": row, "bestlast": row}}, None)
    assert "full prefill (1.0 to 2.0):" in text, "within the bar"
    assert "On the other 1,100 questions, on which policies were chosen, it lost 0.5" in text

    share = SimpleNamespace(value=0.5)
    apart = SimpleNamespace(difference=-0.02, low=-0.05, high=0.01)
    tuned = {"title": "LoRA", "rows": 350, "right": share, "wrong": 0.125}
    answers["tuned"] = {**tuned, "control": share, "minus_control": apart}
    text = front.home(times, {**answers, "policies": {"full": row, "bestlast": row}}, None)
    assert "(LoRA), it has by `Reuse()`\n50.0 % right and 12.5 % from a wrong document" in text
    assert "on 350 of these questions" in text
    assert "(-2.0 points, -5.0 to +1.0)" in text

    ways = [("confirmation", model, "reordered") for model in ("block", "base")]
    ways += [(task, "control", "full prefill") for task in ("confirmation", "closed book")]
    scores = [
        {"task": task, "model": model, "policy": policy, "n": 4143, "f1": [n / 10, 0.0, 1.0]}
        for n, (task, model, policy) in enumerate(ways)
    ]
    text = front.home(times, None, {"bars": {"a": {}, "b": {}, "c": {}}, "scores": scores})
    assert "on 4,143 questions" in text
    cells = ["10.0 (0.0-100.0)", "0.0 (0.0-100.0)", "20.0 (0.0-100.0)", "30.0 (0.0-100.0)"]
    assert text.endswith(f"| {' | '.join(cells)} |\n"), "base, block, control, closed"
    missing = front.home(times, None, {"bars": {"a": {}}, "scores": scores[:2]})
    assert "4,143" not in missing


def test_support_table_is_what_the_laws_find(tmp_path: Path) -> None:
    tool = str(ROOT / "tools" / "support_table.py")
    run = f"runpy.run_path({tool!r}, run_name='__main__')"
    status, _, errors = forks.run(f"import runpy, sys; sys.argv = ['', '--check']; {run}", tmp_path)
    assert status == 0, errors


def test_the_figures_of_pruned_chunks_are_those_that_were_measured() -> None:
    results = json.loads(pruning_page.RESULTS.read_text(encoding="utf-8"))
    shown = pruning_page.PAGE.read_text(encoding="utf-8").partition(pruning_page.MARK)[2]
    assert shown == pruning_page.text(results)


def test_pages_count_the_configurations_that_were_found() -> None:
    models = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    found = re.search(r"^(\d+) configurations are stitched, (\d+) refused:$", models, re.M)
    assert found is not None
    stitched, refused = found.groups()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{stitched} configurations" in readme
    assert f"{refused} refused by name" in readme
    assert f"over {stitched}\nconfigurations" in (ROOT / "docs" / "how-it-works.md").read_text(
        "utf-8"
    )
