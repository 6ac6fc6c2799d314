"""The benchmark of offline prefill: both sides compute the same tokens in the same batches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import prefill
from benchmarks.shapes import PREFIX, build_model, build_tokenizer, words
from kvcache_rag import Engine, MemoryStore, PromptTemplate
from kvcache_rag.models.cache import CACHE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def test_both_sides_run_the_same_ids_behind_the_same_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model("tiny", torch.float32)
    template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
    engine = Engine(model, build_tokenizer(), store=MemoryStore(), template=template)
    monkeypatch.setattr("kvcache_rag.prefill.BATCH_TOKENS", 150)
    texts = [words(40, 100 + index) for index in range(3)]
    prefix, given = prefill.chunk_batches(engine, texts)
    assert len(prefix) == PREFIX
    assert [tuple(ids.shape) for ids in given] == [(2, 40), (1, 40)]
    sides = prefill.bare_sides(model, prefix, given)
    add = prefill.adding(engine, texts)
    passes: list[tuple[list[list[int]], int]] = []
    forward = model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE_NAME)
        held = 0 if cache is None else cache.get_seq_length()
        passes.append((kwargs["input_ids"].tolist(), held))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", noted)

    def seen(run: Callable[[], None]) -> list[tuple[list[list[int]], int]]:
        passes.clear()
        run()
        return list(passes)

    bare, ours, whole = seen(sides["bare"]), seen(add), seen(sides["bare, no cache"])
    assert bare == ours
    assert [held for _, held in ours] == [PREFIX, PREFIX]
    assert whole == [([prefix + row for row in ids], 0) for ids, _ in bare]
    assert seen(add) == [], "nothing is left to do before the chunks are dropped"
    prefill.forgetting(engine, texts)()
    assert seen(add) == ours


def test_a_run_writes_the_ratio_of_every_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, threads = tmp_path / "rows.json", torch.get_num_threads()
    given = ["--shape", "tiny", "--chunks", "2", "--tokens", "24", "--rounds", "2"]
    try:
        assert prefill.main([*given, "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(file.read_text())
    rows = {row["side"]: row for row in report["rows"]}
    assert list(rows) == ["bare", "bare, no cache", "memory", "disk", "disk, durable"]
    assert rows["bare"]["ratio"] == rows["bare"]["ratio_lowest"] == 1
    assert all(row["lowest"] <= row["median"] <= row["highest"] for row in rows.values())
    assert report["batches"] == [[2, 24]]
    assert "of bare" in capsys.readouterr().out
