"""Every Python block of the README runs or says why not; its table is what the laws find."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if output is not None:
        assert done.stdout == output


def test_readme_has_blocks_that_run() -> None:
    assert sum(reason is None for reason, *_ in BLOCKS) >= 2


def test_support_table_is_what_the_laws_find() -> None:
    command = [sys.executable, str(ROOT / "tools" / "support_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
