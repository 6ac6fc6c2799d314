"""What the laws share: texts, engines of every family, and the plain paths as references."""

from __future__ import annotations

import random
from typing import Any

import access
import pytest
import torch
from alibi import told_positions
from torch import Tensor
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, MemoryStore, PromptTemplate, ReusePolicy, UnsupportedModelError
from kvcache_rag.kv.chunk import kept_places
from kvcache_rag.kv.mask import MaskedSequence, block_mask, pruned_mask
from kvcache_rag.models.cache import CACHE_NAME

TOLERANCE = 1e-3
TEMPLATE = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
QUESTION = "Who?"


class Recorder:
    """A logits processor that keeps what it sees: one `(rows, vocabulary)` per step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores.clone())
        return scores


def _texts() -> list[str]:
    letters = random.Random(7)
    return ["".join(letters.choices("abcdefgh ", k=size)) + "z" for size in (30, 57, 63)]


TEXTS = _texts()


def error(found: Tensor, reference: Tensor) -> float:
    """Largest difference in standard deviations of the reference."""
    return float((found - reference).abs().max() / reference.std())


def make_engine(name: str, **options: Any) -> Engine:
    return Engine(build(name), byte_tokenizer(), template=TEMPLATE, store=MemoryStore(), **options)


def plain_logits(engine: Engine, texts: list[str]) -> Tensor:
    """Logits of the query from one ordinary forward pass of the very same ids."""
    ids = engine.tokenize(QUESTION, texts)
    with torch.no_grad():
        logits: Tensor = engine.model(torch.tensor([ids.all])).logits[0]
    return logits[-len(ids.query) :].float()


def masked_logits(engine: Engine, texts: list[str], scheme: Any) -> Tensor:
    """Logits of the query from one forward pass under the block mask."""
    ids = engine.tokenize(QUESTION, texts)
    return sequence_logits(engine, block_mask(ids.prefix, ids.chunks, ids.query, scheme))


def sequence_logits(engine: Engine, sequence: MaskedSequence, cache: Any = None) -> Tensor:
    """Logits of the query from one forward pass over a sequence with its own mask.

    An empty cache is filled by it.
    """
    adapter = access.adapter(engine)
    if by_place(engine):
        with told_positions(engine.model, sequence.positions, sequence.allowed), torch.no_grad():
            ids = sequence.ids[None]
            ones = torch.ones_like(ids)
            found: Tensor = engine.model(
                ids, attention_mask=ones, **{CACHE_NAME: cache}, use_cache=cache is not None
            ).logits
        return found[0, -sequence.query_tokens :].float()
    mask = adapter.mask_argument(sequence.allowed, sequence.indices)
    if sequence.held is not None:
        seen = adapter.mask_argument(sequence.allowed, sequence.held)
        mask = _rows_of(mask, seen, len(sequence.ids) - sequence.query_tokens)
    logits = adapter.forward(sequence.ids[None], cache, sequence.positions, mask=mask)
    return logits[0, -sequence.query_tokens :].float()


def by_place(engine: Engine) -> bool:
    """Whether nothing can stand at another position than its place (ALiBi)."""
    return access.adapter(engine).measured.by_place


def refused(engine: Engine, policy: ReusePolicy) -> bool:
    """Whether positions other than places are wanted where none can be; then it says so."""
    if policy.positions == "reordered" or not by_place(engine):
        return False
    with pytest.raises(UnsupportedModelError, match=r"counts a token's place .*use Reuse\(\)"):
        engine.logits(QUESTION, TEXTS, policy=policy)
    with pytest.raises(UnsupportedModelError, match=r"counts a token's place .*use Reuse\(\)"):
        engine.generate_batch([(QUESTION, TEXTS)], policy=policy, max_new_tokens=1)
    return True


def _rows_of(first: Any, second: Any, count: int) -> Any:
    """The first `count` rows of one mask, the others of another; or of one per kind of layer."""
    if isinstance(first, dict):
        return {name: _rows_of(first[name], second[name], count) for name in first}
    return torch.cat([first[..., :count, :], second[..., count:, :]], dim=-2)


def kept_of(engine: Engine, texts: list[str]) -> list[list[int]]:
    """Of each text the places of the tokens whose keys and values the engine's store holds."""
    prefiller = access.prefiller(engine)
    chunks = [engine.store.get(key, prefiller.layout).chunk for key in engine.add(texts)]
    return [kept_places(chunk.tokens).tolist() for chunk in chunks]


def pruned_logits(engine: Engine, texts: list[str], scheme: Any) -> Tensor:
    """Logits of the query from one forward pass in which it does not see the pruned tokens."""
    ids, kept = engine.tokenize(QUESTION, texts), kept_of(engine, texts)
    sequence = pruned_mask(ids.prefix, ids.chunks, ids.query, kept, scheme)
    return sequence_logits(engine, sequence)
