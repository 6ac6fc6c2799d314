"""A chunk inside its wrapper: which characters of its own text each token covers.

`PromptTemplate` says what is written around a chunk; what follows from that for tokens is here, and
no other file counts the characters of a wrapper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.alignment import decoded, highest, token_offsets, within
from kvcache_rag.prompt.tokens import Finder, Offsets, TextEncoder, never

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.prompt.template import PromptTemplate


def chunk_finder(encoder: TextEncoder, template: PromptTemplate) -> Finder:
    """What tells whether a chunk's text holds a literal of a control token, its wrapper around."""
    if template.special_tokens == "allow":
        return never
    return encoder.finder((template.chunk_start, template.chunk_end))


def written_chunk(encoder: TextEncoder, template: PromptTemplate, text: str) -> str:
    """A chunk as it stands in the prompt, `Composed` if its text holds such a literal."""
    if chunk_finder(encoder, template)(text):
        return encoder.compose(lambda cover: template.wrap(cover(text)))
    return template.wrap(text)


def chunk_offsets(
    tokenizer: Any, template: PromptTemplate, text: str, ids: Sequence[int]
) -> Offsets:
    """Per token of a wrapped chunk its characters in `text`; empty for those of the wrapper.

    Args:
        tokenizer: Made `ids` from the wrapped text.
        template: Says how chunks are wrapped.
        text: The chunk's own text.
        ids: Of the wrapped chunk.
    """
    written = written_chunk(TextEncoder.for_tokenizer(tokenizer), template, text)
    spans = token_offsets(tokenizer, written, ids)
    return within(spans, len(template.chunk_start), len(text))


def chunk_scores(
    tokenizer: Any, template: PromptTemplate, text: str, ids: Sequence[int], scores: Tensor
) -> Tensor:
    """Scores of the tokens of a wrapped chunk from those of its characters.

    A token matters as much as its most important character.  A token without a character of `text`
    (the wrapper, an empty piece) matters as much as the one behind it, or before it at the end:
    groups of neighbouring tokens are chosen together, so a wrapper with a low score of its own
    would keep the first words of a chunk from ever being chosen.

    Args:
        tokenizer: Made `ids` from the wrapped text.
        template: Says how chunks are wrapped.
        text: The chunk's own text.
        ids: Of the wrapped chunk.
        scores: `(characters of text,)` in any float dtype.

    Returns:
        `(tokens,)` float32 on the CPU.

    Raises:
        InvalidInputError: If there is not one score per character, or one is NaN.
    """
    if scores.shape != (len(text),):
        raise InvalidInputError(
            f"{tuple(scores.shape)} scores for a chunk of {len(text)} characters; a Scorer gives "
            "one per character"
        )
    if bool(torch.isnan(scores).any()):
        raise InvalidInputError(
            "a score of a character is not a number; a Scorer ranks all of them"
        )
    return highest(chunk_offsets(tokenizer, template, text, ids), scores)


def chunk_text(tokenizer: Any, template: PromptTemplate, ids: Sequence[int]) -> str:
    """The text of a chunk of which only the ids are known, its wrapper cut off where it is found.

    Tokens that a tokenizer does not write back exactly (lower case, lost spaces) give a text that
    is as close as its tokenizer allows.
    """
    text, _ = decoded(tokenizer, ids)
    before, after = template.chunk_start, template.chunk_end
    # Some tokenizers lose spaces at either end.
    if text.startswith(before):
        text = text[len(before) :]
    elif text.lstrip().startswith(before.strip()):
        text = text.lstrip()[len(before.strip()) :]
    if text.endswith(after):
        text = text[: len(text) - len(after)]
    elif text.rstrip().endswith(after.strip()):
        text = text.rstrip()[: len(text.rstrip()) - len(after.strip())]
    return text
