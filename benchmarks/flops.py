"""Floating point operations of a prefill, counted as in TurboRAG (arXiv 2410.07590, appendix G).

Every token that is computed passes through all matrices and attends to all tokens of the prompt.
Counted so, what a query costs over cached chunks is its share of the prompt's tokens: 128 of 8192 +
128 is 1.54 %, whatever the model.  The appendix prints the attention of a token in a layer as
2 H d n (H heads of width d, n tokens attended to).  Its table 5 needs 4 H d n (136.36 TFLOPs of
Qwen2-7B for 8192 + 128 tokens, where 2 H d n gives 122.47): a multiplication and an addition for
the scores, and as many for the weighted values.  That is what torch counts, and what is counted
here.  Masked halves of the attention, norms, rotations, and the logits of the last token (the same
on both sides) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Flops:
    """One prompt, with and without cached chunks.

    Attributes:
        full: Operations of a prefill of all tokens.
        cached: Operations of the query's tokens alone.
        rotation: What turning the cached keys to their places adds (3 per number), which the
            paper does not count; loading adds none.
    """

    full: int
    cached: int
    rotation: int

    @property
    def reduction(self) -> float:
        """Part of the full prefill that is saved, by the paper's count."""
        return 1 - self.cached / self.full

    @property
    def reduction_with_rotation(self) -> float:
        """The same with the rotation counted."""
        return 1 - (self.cached + self.rotation) / self.full


def forward_flops(shape: Mapping[str, Any], tokens: int, context: int) -> int:
    """Operations of the decoder's layers for some tokens.

    Args:
        shape: Of `SHAPES`.
        tokens: How many tokens are computed.
        context: How many each of them attends to.
    """
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    width = hidden // heads
    slots = shape["num_key_value_heads"] * width
    matrices = 2 * hidden * hidden + 2 * hidden * slots + 3 * hidden * shape["intermediate_size"]
    attention = 2 * heads * width * context  # twice that with the outer 2: 4 H d n, see above
    operations: int = 2 * shape["num_hidden_layers"] * tokens * (matrices + attention)
    return operations


def prompt_flops(
    shape: Mapping[str, Any], context: int, query: int, prefix: int = 0, batch: int = 1
) -> Flops:
    """Operations of a batch of prompts of the same lengths.

    Args:
        shape: Of `SHAPES`.
        context: Tokens of the chunks.
        query: Tokens of the query.
        prefix: Tokens of the shared instruction.
        batch: Prompts.
    """
    whole = prefix + context + query
    slots = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return Flops(
        full=batch * forward_flops(shape, whole, whole),
        cached=batch * forward_flops(shape, query, whole),
        rotation=batch * 3 * shape["num_hidden_layers"] * slots * context,
    )
