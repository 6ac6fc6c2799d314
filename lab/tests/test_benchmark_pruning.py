"""Chunks that the benchmark derives from one pass are those that an engine of each press stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws import QUESTION, TEXTS, make_engine

from benchmarks import pruning as bench
from kvcache_rag_lab.scoring.question import Question, Task


def tensors(engine: Any, text: str) -> list[torch.Tensor]:
    """What a store holds of a text, as it stands for keys and values."""
    (key,) = engine.keys([text])
    found = engine.store.get(key, bench.prefiller_of(engine).layout).chunk
    return [found.tokens, *(part for group in found.tensors for part in group)]


def test_what_is_derived_is_what_engines_store() -> None:
    base, texts = make_engine("qwen2"), TEXTS[:2]
    derived = {form: bench.engine_of(base, form, "Read.") for form in bench.forms()}
    bench.fill(derived, texts)
    for form in bench.forms():
        stored = bench.engine_of(base, form, "Read.")
        for text in texts:
            stored.add([text])  # alone, as it is derived
            mine, expected = tensors(derived[form], text), tensors(stored, text)
            assert all(map(torch.equal, mine, expected)), form.label


def test_a_row_is_asked_in_every_form_and_leaves_no_chunk() -> None:
    base = make_engine("qwen2")
    forms = [bench.Form(), bench.Form("knorm:0.5"), bench.Form("knorm:0.5", "int8")]
    engines = {form: bench.engine_of(base, form, "") for form in forms}

    def measure(answer: str, _: Question) -> tuple[float, ...]:
        return (float(bool(answer)),)

    task = Task("t", ("m",), "", 4, lambda *_: [], measure)
    question = Question("q", QUESTION, tuple(TEXTS), ("yes",))
    found = bench.Asking(task, engines, frozenset(forms[:2]), 3).row(question, 1)
    assert [*found] == [forms[1].label, forms[2].label, forms[0].label], "the order turns"
    whole, half, coarse = (found[form.label] for form in forms)
    assert (len(whole["scores"]), len(half["scores"]), coarse["scores"]) == (1, 1, None)
    assert coarse["bytes"] < half["bytes"] < whole["bytes"]
    assert len({one["tokens"] for one in found.values()}) == 1, "a prompt has all of its tokens"
    for engine in engines.values():
        assert not any(engine.store.contains(key) for key in engine.keys(TEXTS))
    rows = [{"task": "t", "id": "q", "load": 1.0, "found": found}]
    figures = bench.figures(rows, task.metrics)
    assert figures["rows"] == 1
    assert figures["forms"][forms[0].label]["first"] == 1


def test_surprise_is_that_of_the_answer_behind_the_question() -> None:
    engine = make_engine("qwen2")
    question = Question("q", QUESTION, tuple(TEXTS), ("yes",))
    nats, first = bench.expected(engine, question)
    said = engine.logits(QUESTION, TEXTS)[-1]
    ids = engine.brought_ids("yes")
    assert first == int(said.argmax())
    spent = -float(said.log_softmax(-1)[ids[0]])
    for count in range(1, len(ids)):
        behind = engine.logits(QUESTION, TEXTS, answer_ids=ids[:count])[-1]
        spent -= float(behind.log_softmax(-1)[ids[count]])
    assert nats == pytest.approx(spent / len(ids), abs=1e-3)
