"""Both notebooks run on llama.cpp with one word more, and answer from what it has computed."""

from __future__ import annotations

import re

import pytest

from notebooks.execute import NAMES, execute
from notebooks.test_notebooks import ANSWERS, REUSED, texts

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make test-llamacpp)")
pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_llama_cpp_with_one_word_more(name: str) -> None:
    said = "\n".join(texts(execute(name, backend="llama.cpp")).values())
    assert "llama.cpp" not in said  # no warning and no refusal
    stock = re.findall(r"stock +(.*)", said)
    stitched = re.findall(r"stitched +(.*)", said)
    assert len(stock) == len(stitched) == len(ANSWERS)
    for answers in (stock, stitched):
        right = [gold in one for one, gold in zip(answers, ANSWERS.values(), strict=True)]
        assert sum(right) >= len(ANSWERS) - 1
    reused = [int(one) for one in re.findall(rf"{REUSED[name]} +(?:\d+ +)*(\d+)", said)]
    assert reused
    assert min(reused) > 0
