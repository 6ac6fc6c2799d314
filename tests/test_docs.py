"""Every Python block of the README runs or says why not; its table is what the laws find."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import forks
import pytest

from kvcache_rag.models.pretrained import PACKAGED

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```python\n(.*?)```(\n\n```text\n(.*?)```)?", re.S)
BLOCKS = [match.groups() for match in BLOCK.finditer(README)]


@pytest.mark.parametrize(
    ("code", "output"),
    [(code, output) for reason, code, _, output in BLOCKS if reason is None],
)
def test_readme_block_runs_and_prints_what_it_says(
    code: str, output: str | None, tmp_path: Path
) -> None:
    for name, model in PACKAGED.items():
        if f'"{name}"' in code:
            try:
                importlib.metadata.version(model.package)
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(model.install)
    status, printed, errors = forks.run(code, tmp_path)
    assert status == 0, errors
    if output is not None:
        assert printed == output


def test_readme_has_blocks_that_run() -> None:
    assert sum(reason is None for reason, *_ in BLOCKS) >= 2


def test_support_table_is_what_the_laws_find(tmp_path: Path) -> None:
    tool = str(ROOT / "tools" / "support_table.py")
    run = f"runpy.run_path({tool!r}, run_name='__main__')"
    status, _, errors = forks.run(f"import runpy, sys; sys.argv = ['', '--check']; {run}", tmp_path)
    assert status == 0, errors
