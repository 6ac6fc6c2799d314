"""Whether plain numerics agree on a model: what has to hold before quality means anything.

A model whose cache is accepted but whose own code ignores it (an attention mask or positions of its
own making) answers without having read the chunks.  Three comparisons of logits find it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvcache_rag.codecs import Native
from kvcache_rag.engine import Engine
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.mask import block_mask
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.policies import FullRecompute, Reuse
from kvcache_rag.stores import MemoryStore
from kvcache_rag.verdict import NumericsCheck

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.mask import PositionScheme

# Root mean square difference over the standard deviation of the logits.  What rounding makes of it
# on the families that are tested is 30 times less; a cache that is not read makes it about 1.
TOLERANCES: Final = {torch.float64: 1e-4, torch.float32: 3e-3, torch.float16: 0.05}
COARSE: Final = 0.2
# More chunks show nothing more and cost the square of their length.
MOST_CHUNKS: Final = 3


def check_numerics(
    engine: Engine, question: str, chunks: Sequence[str]
) -> tuple[NumericsCheck, ...]:
    """Compare logits of one question over its first chunks.

    `FullRecompute()` with the model's plain forward pass, one chunk that was cached with the same,
    and several cached chunks, reordered and composite, with one forward pass under the block mask
    (`mask.block_mask`).  Chunks are stored without loss for this.

    Args:
        engine: With the model; its store is used only if its codec is `Native`.
        question: Any.
        chunks: At least one.

    Raises:
        UnsupportedModelError: If the model keeps no keys and values.
    """
    exact = engine if engine.store.codec.name == Native.name else _lossless(engine)
    model = TransformersModel(engine.model, packed_attention=False)
    tolerance = TOLERANCES.get(model.dtype, COARSE)
    some = list(chunks[:MOST_CHUNKS])

    def check(name: str, found: Tensor, reference: Tensor) -> NumericsCheck:
        return NumericsCheck(name, _error(found, reference), tolerance)

    full = exact.logits(question, some, policy=FullRecompute())
    one = exact.logits(question, some[:1], policy=Reuse())
    checks = [
        check("full prefill and the model's own forward pass", full, _plain(exact, question, some)),
        check("one cached chunk and a plain prefill", one, _plain(exact, question, some[:1])),
    ]
    if not model.measured.immovable:
        several = some if len(some) > 1 else some * 2
        schemes: tuple[PositionScheme, ...] = ("reordered", "composite")
        for scheme in schemes:
            with suppress(ContextTooLongError):  # a single chunk need not fit twice
                found = exact.logits(question, several, policy=Reuse(positions=scheme))
                wanted = _masked(exact, model, question, several, scheme)
                checks.append(check(f"cached chunks ({scheme}) and the block mask", found, wanted))
    return tuple(checks)


def _lossless(engine: Engine) -> Engine:
    return Engine(
        engine.model,
        engine.tokenizer,
        store=MemoryStore(),
        template=engine.template,
        context_window=engine.context_window,
        cost_aware=False,
    )


def _plain(engine: Engine, question: str, chunks: Sequence[str]) -> Tensor:
    """Logits of the query by transformers alone, with its own mask and positions."""
    ids = engine.tokenize(question, chunks)
    model: Any = engine.model
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids.all], device=device), use_cache=False).logits
    return logits[0, -len(ids.query) :].float().cpu()


def _masked(
    engine: Engine,
    model: TransformersModel,
    question: str,
    chunks: Sequence[str],
    scheme: PositionScheme,
) -> Tensor:
    ids = engine.tokenize(question, chunks)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query, scheme)
    mask = model.mask_argument(sequence.allowed, sequence.indices)
    keep = sequence.query_tokens
    logits = model.forward(sequence.ids[None], None, sequence.positions, mask=mask, keep=keep)
    return logits[0].float().cpu()


def _error(found: Tensor, reference: Tensor) -> float:
    """Root mean square difference in standard deviations of the reference; NaN stays NaN."""
    return float((found - reference).pow(2).mean().sqrt() / reference.std().clamp_min(1e-12))
