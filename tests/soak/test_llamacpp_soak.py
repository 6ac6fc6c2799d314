"""llama.cpp asked thousands of questions in every way: right to the end, in the same memory."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import psutil
import pytest

pytest.importorskip("llama_cpp", reason="pip install 'kvcache-rag[llama-cpp]'")

from llamacpp import ggufs
from llamacpp.asking import opened, questions

from kvcache_rag import MemoryStore
from tests.reliability import record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.soak.conftest import Amount

pytestmark = pytest.mark.timeout(1800)
# Of two kinds of caches: one, and one with layers that have a window beside it.
FAMILIES = ["llama", "cohere2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_thousands_of_questions(family: str, tmp_path: Path, amount: Amount) -> None:
    path, count = ggufs.write(tmp_path / "model.gguf", family), amount(1500, 20_000)
    engine = opened(path, store=MemoryStore(2_000_000), context_window=1500)
    process, seen, wrong, compared = psutil.Process(), list[float](), 0, 0
    for number, (question, chunks, options) in enumerate(questions(count)):
        answer = engine.generate(question, chunks, **options)
        if number % 20 == 19 and "cancelled" not in options:
            alone = opened(path, context_window=1500)  # nothing was asked of it before
            compared += 1
            wrong += alone.generate(question, chunks, **options).token_ids != answer.token_ids
        if number % (count // 10) == count // 10 - 1:
            gc.collect()
            seen.append(process.memory_info().rss / 2**20)
    assert not wrong
    assert seen[-1] - seen[2] < 30, f"MiB as it went on: {seen}"
    more = round(max(0.0, seen[-1] - seen[2]))
    tried = f"questions to llama.cpp, a random {family}, all policies, some stopped"
    found = {"compared with a new engine": compared, "wrong": wrong, "MiB more at the end": more}
    record(f"llamacpp-{family}", "requests", tried, count, **found)
