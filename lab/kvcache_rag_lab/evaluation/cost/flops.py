"""Floating point operations of a prefill, counted as in TurboRAG (arXiv 2410.07590, appendix G).

Every token that is computed passes through all matrices and attends to all tokens of the prompt.
Counted so, what a query costs over cached chunks is its share of the prompt's tokens: 128 of 8192 +
128 is 1.54 %, whatever the model.  The appendix prints the attention of a token in a layer as
2 H d n (H heads of width d, n tokens attended to).  Its table 5 needs 4 H d n (136.36 TFLOPs of
Qwen2-7B for 8192 + 128 tokens, where 2 H d n gives 122.47): a multiplication and an addition for
the scores, and as many for the weighted values.  That is what torch counts, and what is counted
here.  Masked halves of the attention, windows, norms, rotations, and the logits of the last token
(the same on both sides) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.cache import layer_kinds

if TYPE_CHECKING:
    from typing_extensions import Self

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


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


@dataclass(frozen=True)
class DecoderShape:
    """What operations of a decoder's layers follow from.

    Attributes:
        weights: Of all matrices that a token passes through; of experts, those that it is sent to.
        attention: Multiplications per token and token that it attends to, in all layers.
        keys: Numbers of a token's keys, in all layers.
    """

    weights: int
    attention: int
    keys: int

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Read a transformers config; no memory is taken for the model's weights.

        Raises:
            UnsupportedModelError: If the config does not say all of it.
        """
        text = config.get_text_config()
        try:
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(text)
            layers, heads = text.num_hidden_layers, text.num_attention_heads
            slots = getattr(text, "num_key_value_heads", None) or heads
            width = getattr(text, "head_dim", None) or text.hidden_size // heads
        except (AttributeError, ImportError, KeyError, ValueError) as error:
            raise UnsupportedModelError(
                f"operations of a {getattr(config, 'model_type', 'model')} cannot be counted by "
                "its config"
            ) from error
        if any(kind.has_state for kind in layer_kinds(config)):
            raise UnsupportedModelError(
                f"{text.model_type}: some layers are recurrent, whose operations are not counted"
            )
        keys = getattr(text, "qk_head_dim", None) or width
        values = getattr(text, "v_head_dim", None) or width
        return cls(_weights(model, text), layers * heads * (keys + values), layers * slots * keys)

    def forward(self, tokens: int, context: int) -> int:
        """Operations for some tokens, each of which attends to `context`."""
        return 2 * tokens * (self.weights + self.attention * context)

    def prompt(self, context: int, query: int, prefix: int = 0, batch: int = 1) -> Flops:
        """Operations of a batch of prompts of the same lengths.

        Args:
            context: Tokens of the chunks.
            query: Tokens of the query.
            prefix: Tokens of the shared instruction.
            batch: Prompts.
        """
        whole = prefix + context + query
        return Flops(
            full=batch * self.forward(whole, whole),
            cached=batch * self.forward(query, whole),
            rotation=batch * 3 * self.keys * context,
        )


def _weights(model: Any, config: Any) -> int:
    experts = next((count for name in _EXPERTS if (count := getattr(config, name, None))), 1)
    used = getattr(config, "num_experts_per_tok", None) or experts
    output = model.get_output_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    aside = {id(module.weight) for module in (*tables, output) if module is not None}
    found = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in aside:
            count = parameter.numel()
            found += count * used // experts if ".experts." in name else count
    return found
