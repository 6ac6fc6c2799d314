"""Keys and values of transformers and of llama.cpp are the same thing, for equal float weights.

A GGUF file of a Llama has the rows of its projections in another order than transformers, so that
rotated columns are neighbours there; other families have theirs as in transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEXTS, error
from llamacpp.asking import ids_of, opened, parts, rounding
from torch import Tensor

from kvcache_rag import Engine, Reuse
from kvcache_rag.kv.chunk import ChunkKV

if TYPE_CHECKING:
    from llamacpp.conftest import Decoder, Files

    from kvcache_rag.kv import ChunkKey


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def both(family: str, files: Files) -> tuple[Engine, Engine]:
    path = files(family)
    return opened(path), opened(path, backend="transformers")


def as_neighbours(keys: Tensor) -> Tensor:
    """Columns of two halves, `(..., width)`, as neighbours."""
    return keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def as_halves(keys: Tensor) -> Tensor:
    """The other way."""
    return keys.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def stored(engine: Engine, key: ChunkKey) -> ChunkKV:
    return engine.store.get(key, access.chunk_layout(engine)).chunk


def hand_over(source: Engine, target: Engine, turned: Any) -> None:
    """Put the chunks of one engine into the store of another one, under its own addresses."""
    source.add(TEXTS)
    layout = access.chunk_layout(target)
    for mine, theirs in zip(target.keys(TEXTS), source.keys(TEXTS), strict=True):
        assert mine != theirs
        assert not target.store.contains(theirs)
        chunk = stored(source, theirs)
        pair = torch.stack([turned(chunk.keys(0)), chunk.values(0)], 1)
        handed = ChunkKV(layout, chunk.tokens, chunk.start, ((pair.contiguous(),),))
        target.store.put(mine, handed, target.store.generation(target.namespace))


@pytest.mark.parametrize("is_ours", [True, False], ids=["into llama.cpp", "into transformers"])
def test_chunks_of_the_other_engine_give_the_same_logits(
    both: tuple[Engine, Engine], family: str, files: Files, own: Decoder, is_ours: bool
) -> None:
    """Law: brought by one engine, chunks that the other one computed are its own."""
    source, target = both[::-1] if is_ours else both
    turned = (as_neighbours if is_ours else as_halves) if family == "llama" else Tensor.clone
    expected = own(files(family)).stitched(*parts(ids_of(target)))
    hand_over(source, target, turned)
    answer = target.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1)
    assert answer.metrics.misses == 0
    found = target.logits(QUESTION, TEXTS, policy=Reuse())
    assert error(found, expected) < rounding(family)
    # The law can fail: with the columns of the other order, logits are elsewhere.
    target.delete(target.keys(TEXTS))
    hand_over(source, target, Tensor.clone if family == "llama" else as_neighbours)
    assert error(target.logits(QUESTION, TEXTS, policy=Reuse()), expected) > 0.1
    target.delete(target.keys(TEXTS))


def test_the_tensors_themselves_are_the_same(both: tuple[Engine, Engine], family: str) -> None:
    chunks = [[stored(engine, key) for key in engine.add(TEXTS)] for engine in both]
    for ours, theirs in zip(*chunks, strict=True):
        keys = as_neighbours(theirs.keys(0)) if family == "llama" else theirs.keys(0)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert error(ours.keys(0), keys) < 1e-5
        assert error(ours.values(0), theirs.values(0)) < 1e-5
