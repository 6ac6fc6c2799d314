"""Quantised weights: the laws hold but for what llama.cpp rounds differently in other batches.

Products of quantised weights round their inputs to 8 bits, so that the last bit of an activation
may move a whole step.  How far apart that puts llama.cpp's own logits is measured here beside each
law: of the same prompt 37 positions further, by 0.23 of a standard deviation (in smaller batches,
by nothing).  Stitched, where keys were turned, is 0.20 off; computed again, nothing.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from laws import error
from llamacpp.asking import ids_of, parts

from kvcache_rag import Engine, FullRecompute, LegoLink, Reuse

if TYPE_CHECKING:
    from pathlib import Path

    from llamacpp.conftest import Decoder

TEXTS = [
    "The lighthouse of Skerry Point was built in 1864 from grey granite. It is 41 metres tall, and "
    "its lamp can be seen from a distance of nineteen miles.",
    "The keeper of the lighthouse is called Ada Brook. She came to the island with two goats and a "
    "piano, and writes down the weather every morning at six.",
    "Ferries to the island leave from the harbour of Old Kirk on Tuesdays and Fridays. A ticket "
    "costs four pounds; dogs travel free of charge.",
]
QUESTION = "Who keeps the lighthouse, and how tall is it?"
# How much farther than llama.cpp's own batches from each other.
FARTHER = 2.0


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    return Engine.from_pretrained(smollm2, backend="llama.cpp", device="cpu")


@pytest.fixture(scope="module")
def floor(engine: Engine, smollm2: Path, own: Decoder) -> float:
    """How far llama.cpp's own logits of one prompt are apart."""
    alone = own(smollm2, dtype="float16")
    ids = ids_of(engine, TEXTS, QUESTION)
    last = len(ids.query)
    first = alone.full(ids.all, last)
    small = own(smollm2, dtype="float16", micro_batch=32).full(ids.all, last)
    return max(error(alone.full(ids.all, last, first=37), first), error(small, first))


def test_it_is_llama_cpps_own_decoding_of_the_layout(
    engine: Engine, smollm2: Path, own: Decoder, floor: float
) -> None:
    """Law: stitched = its own decoding of the layout; 24 greedy tokens are the same."""
    ids = parts(ids_of(engine, TEXTS, QUESTION))
    alone = own(smollm2, dtype="float16")
    expected = alone.stitched(*ids)
    found = engine.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(found, expected) < FARTHER * floor
    full = alone.full(ids_of(engine, TEXTS, QUESTION).all, len(ids[2]))
    assert error(found, full) > FARTHER * floor


def test_greedy_answers(engine: Engine, smollm2: Path, own: Decoder, floor: float) -> None:
    """Law: 24 greedy tokens are the same up to where llama.cpp itself wavers."""
    answer = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=24)
    ids = parts(ids_of(engine, TEXTS, QUESTION))
    said, logits = own(smollm2, dtype="float16").answer(*ids, 24)
    pairs = enumerate(zip(answer.token_ids, said, strict=False))
    differing = next((place for place, (ours, its) in pairs if ours != its), None)
    if differing is not None:
        ours, its = logits[differing, [answer.token_ids[differing], said[differing]]]
        assert differing >= 8
        assert float(its - ours) < FARTHER * floor * float(logits.std())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_greedy_answers_of_float_weights(float_smollm2: Path, own: Decoder, dtype: str) -> None:
    """Law: with the same weights in float32, nothing wavers."""
    engine = Engine.from_pretrained(float_smollm2, backend="llama.cpp", device="cpu", dtype=dtype)
    answer = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=24)
    ids = parts(ids_of(engine, TEXTS, QUESTION))
    said, logits = own(float_smollm2, dtype=dtype).answer(*ids, 24)
    assert [*answer.token_ids] == said[: len(answer.token_ids)]
    assert len(answer.token_ids) == 24 or answer.finish_reason == "stop"
    found, expected = engine.logits(QUESTION, TEXTS, policy=Reuse()), logits[:1]
    assert error(found[-1:], expected) < {"float32": 1e-4, "float16": 2e-2}[dtype]


def test_full_prefills_are_its_own(engine: Engine, smollm2: Path, own: Decoder) -> None:
    """Law: bit for bit, since batches are the same."""
    ids = ids_of(engine, TEXTS, QUESTION)
    expected = own(smollm2, dtype="float16").full(ids.all, len(ids.query))
    assert error(engine.logits(QUESTION, TEXTS, policy=FullRecompute()), expected) == 0


def test_policies(engine: Engine, smollm2: Path, own: Decoder, floor: float) -> None:
    ids = ids_of(engine, TEXTS, QUESTION)
    alone = own(smollm2, dtype="float16")
    expected = alone.full(ids.all, len(ids.query))
    found = engine.logits(QUESTION, TEXTS, policy=LegoLink(1000))
    assert error(found, expected) < FARTHER * floor
    place, again = len(ids.prefix) + len(ids.chunks[0]), set()
    for chunk in ids.chunks[1:]:
        again |= {*range(place, place + 16)}
        place += len(chunk)
    expected = alone.stitched(*parts(ids), again=again)
    found = engine.logits(QUESTION, TEXTS, policy=LegoLink(16))
    assert error(found, expected) < FARTHER * floor


def test_layers_of_torch_in_between_change_nothing(smollm2: Path) -> None:
    """In a process of its own: on a processor with AMX it ended there."""
    code = f"""
import torch
from kvcache_rag import Engine
engine = Engine.from_pretrained({str(smollm2)!r}, backend="llama.cpp", device="cpu")
layer, rows = torch.nn.Linear(256, 256).bfloat16(), torch.randn(256, 256).bfloat16()
answers = []
for _ in range(3):
    answers.append(engine.generate({QUESTION!r}, {TEXTS!r}, policy="full", max_new_tokens=8).text)
    with torch.no_grad():
        layer(rows)
print(len(set(answers)))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "1\n"
