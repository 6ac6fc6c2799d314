"""What is compiled, and why it does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_rag_cpu import compiled


def test_every_kernel_is_looked_at() -> None:
    sources = Path(compiled.__file__).parent.rglob("*.c")
    assert {Path(name).stem.removeprefix("lib") for name in compiled.KERNELS.values()} == {
        source.stem for source in sources
    }


@pytest.mark.parametrize(
    ("is_there", "says"), [(False, "not compiled: "), (True, "not for this CPU")]
)
def test_a_kernel_that_does_not_run_says_why(
    is_there: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_HERE", tmp_path)
    if is_there:
        (tmp_path / "libfew_rows.so").touch()
    assert compiled.why_missing("linear layers").startswith(says)
