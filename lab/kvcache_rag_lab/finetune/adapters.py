"""What an adapter trains: which linear layers, or which tokens' vectors around each chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag_lab.finetune.config import LoraModules

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Projections of a layer's `self_attn`, as most families of transformers name them."""

# Of tokens that a vocabulary holds for later use, such as `<|reserved_special_token_7|>`.
_RESERVED: Final = ("reserved", "unused")


def lora_modules(model: torch.nn.Module, kind: LoraModules) -> str | list[str]:
    """PEFT's `target_modules`.

    Raises:
        InvalidInputError: If the model does not name its projections as `ATTENTION` does.
    """
    if kind == "all-linear":
        return kind
    layers = [
        module for name, module in model.named_modules() if name.rpartition(".")[2] == "self_attn"
    ]
    if not layers or not all(
        isinstance(getattr(layer, name, None), torch.nn.Linear)
        for layer in layers
        for name in ATTENTION
    ):
        raise InvalidInputError(
            f"{type(model).__name__} does not have self_attn with {', '.join(ATTENTION)} in its "
            'layers; set lora_modules to "all-linear"'
        )
    return [*ATTENTION]


def packet_tokens(tokenizer: Any, template: PromptTemplate, count: int) -> dict[str, int]:
    """Literals and ids of `2 * count` control tokens that neither chats nor this template use.

    A token that is reserved for later use comes first.

    Raises:
        InvalidInputError: If the vocabulary does not have so many.
    """
    used = {*tokenizer.all_special_ids}
    written = "".join(
        (
            *(template.chat_template or str(tokenizer.chat_template or ""), template.system),
            *(template.chunk_start, template.chunk_end, template.question, template.refine),
        )
    )
    found = [
        (str(token), number)
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special
        and number not in used
        and str(token) not in written
        # Beside a token that strips blanks, those of the document would be lost.
        and not (token.lstrip or token.rstrip)
        and tokenizer(str(token), add_special_tokens=False)["input_ids"] == [number]
    ]
    if len(found) < 2 * count:
        raise InvalidInputError(
            f"a packet of {count} needs {2 * count} control tokens that no chat uses, and this "
            f"vocabulary has {len(found)}; choose a smaller packet, or lora in place of it"
        )
    found.sort(key=lambda one: not any(word in one[0] for word in _RESERVED))
    return dict(found[: 2 * count])


def with_packet(template: PromptTemplate, tokens: Sequence[str]) -> PromptTemplate:
    """A template that has the first half of the tokens before each chunk, the others behind it."""
    half = len(tokens) // 2
    return replace(
        template,
        chunk_start="".join(tokens[:half]) + template.chunk_start,
        chunk_end=template.chunk_end + "".join(tokens[half:]),
    )
