"""One stitched answer of the packaged reader, compared with the right one.

In float32 the logits of the question over stitched chunks are those of one plain forward pass of
transformers under the block mask; as the model was saved, with whatever kernels there are, its
answer is the known one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvcache_rag.engine import Engine
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.policies import Reuse
from kvcache_rag.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.stores import ChunkStore

MODEL: Final = "tiny"
TOLERANCE: Final = 1e-3
"""Largest difference of logits, in standard deviations of the plain ones."""

TEXTS: Final = (
    "Britrem Sosgil has visited Diske. The badge number of Britrem Sosgil is 91262. The founder of "
    "Trinanhan is Gadok Kregrin. Trinanhan is based in Klisix.",
    "The price of the Kromos is 115 euros. The Kromos is made by Stutrer. The weight of the Kromos "
    "is 405 grams. The Kromos was designed by Britrem Sosgil.",
    "One product of Jomdruk is the Jolol. The director of Jomdruk is Britrem Sosgil. Veklal has "
    "the postal code 56650. Veklal has a population of 18694.",
)
QUESTION, ANSWER = "What is the seat of Trinanhan?", "Klisix"


@dataclass(frozen=True)
class StitchedAnswer:
    """What came out.

    Attributes:
        question: As it was asked, about three documents.
        expected: The known answer.
        answer: From stitched chunks.
        reused_tokens: That were not computed for it.
        ttft: Seconds to its first token.
        difference: Largest one of the logits, in standard deviations.
    """

    question: str
    expected: str
    answer: str
    reused_tokens: int
    ttft: float
    difference: float

    @property
    def problem(self) -> str:
        """What is wrong, in one sentence; "" if nothing is."""
        if not self.difference <= TOLERANCE:  # NaN, too
            return (
                f"stitched logits differ from the plain forward pass by {self.difference:.1e} "
                f"standard deviations, at most {TOLERANCE:.0e} are due"
            )
        if self.answer != self.expected:
            return f"the stitched answer is {self.answer!r}, {self.expected!r} is due"
        return "" if self.reused_tokens else "no token of the chunks was reused"


def stitched_answer(store: ChunkStore | None = None) -> StitchedAnswer:
    """Ask the reader one question from stored chunks.

    Args:
        store: Keeps them; None for memory.
    """
    difference = _difference(QUESTION, TEXTS)
    engine = Engine.from_pretrained(MODEL, store=store or MemoryStore(), policy=Reuse())
    engine.add(TEXTS)
    found = engine.generate(QUESTION, TEXTS, max_new_tokens=24)
    return StitchedAnswer(
        question=QUESTION,
        expected=ANSWER,
        answer=" ".join(found.text.split()),
        reused_tokens=found.metrics.reused_tokens,
        ttft=found.metrics.ttft,
        difference=difference,
    )


def _difference(question: str, texts: Sequence[str]) -> float:
    """Of stitched logits from those of one forward pass, in float32."""
    engine = Engine.from_pretrained(MODEL, store=MemoryStore(), dtype="float32")
    engine.add(texts)
    stitched = engine.logits(question, texts, policy=Reuse())
    ids = engine.tokenize(question, texts)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query)
    device = engine.model.device
    with torch.inference_mode():
        plain = engine.model(
            input_ids=sequence.ids[None].to(device),
            position_ids=sequence.positions[None].to(device),
            attention_mask=sequence.allowed[None, None].to(device),  # (1, 1, n, n)
        ).logits[0, -sequence.query_tokens :]
    plain = plain.float().cpu()
    return float((stitched - plain).abs().max() / plain.std())
