"""Carry scores from the characters of a chunk to tokens and back, whatever tokenizers are used.

Two models have nothing in common but the text (CacheClip, arXiv 2510.10129, section 3: tokens of
the auxiliary and the main model are aligned by character offsets).  The tokenizer is duck-typed: a
call that gives `input_ids`, and `decode`.
"""

from __future__ import annotations

import difflib
import unicodedata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.prompt.tokens import Composed, Offsets, TextEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence


# A character has at most 4 bytes, so a longer run of tokens that decode to U+FFFD is one of real
# U+FFFD characters; it is taken in pieces of this many tokens.
_LONGEST_RUN = 8

_UNREADABLE = "\ufffd"


def token_offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> Offsets:
    """Which characters of `text` each token stands for.

    From the tokenizer itself where it can say so and gives the same ids again; else by decoding the
    ids one after the other.  Tokens that hold bytes of one character all stand for that character.

    Args:
        tokenizer: Made `ids` from `text`, without special tokens around it.
        text: The text, chunk wrapper included.
        ids: Its ids.
    """
    if isinstance(text, Composed) or getattr(tokenizer, "is_fast", False):
        encoder = TextEncoder.known.get(tokenizer) or TextEncoder.for_tokenizer(tokenizer)
        found = encoder.encode_with_offsets(text)
        if found is not None and list(found[0]) == list(ids):
            return found[1]
    return _decoded_offsets(tokenizer, text, ids)


def within(offsets: Offsets, start: int, length: int) -> Offsets:
    """Offsets in a part of the text: `length` characters from `start` on, counted from there."""
    return [
        (min(max(first - start, 0), length), min(max(stop - start, 0), length))
        for first, stop in offsets
    ]


def highest(offsets: Offsets, scores: Tensor) -> Tensor:
    """Per token the highest score of its characters, of the next token where it has none.

    Args:
        offsets: Of each token.
        scores: `(characters,)`.

    Returns:
        `(tokens,)` float32; zeros if no token has a character.
    """
    values = scores.detach().float().cpu().tolist()  # one copy from the device, then plain numbers
    return _filled([max(values[start:stop], default=None) for start, stop in offsets])


def spread(offsets: Offsets, scores: Tensor, length: int) -> Tensor:
    """Scores of characters from those of tokens: that of the token over it, the highest if several.

    Characters under no token (spaces, for many tokenizers) have the score of the next one.

    Args:
        offsets: Of each token, within the text.
        scores: `(tokens,)`.
        length: Characters of the text.

    Returns:
        `(length,)` float32 on the CPU.
    """
    # Per character; None where no token is over it.
    values: list[float | None] = [None] * length
    for (start, stop), score in zip(offsets, scores.detach().float().cpu().tolist(), strict=True):
        for place in range(start, stop):
            value = values[place]
            values[place] = score if value is None else max(value, score)
    return _filled(values)


def shared_out(offsets: Offsets, weights: Tensor, length: int) -> Tensor:
    """Weights of characters whose sum is that of the tokens: each divides its own among them.

    Args:
        offsets: Of each token, within the text.
        weights: `(tokens,)`; that of a token without characters is lost.
        length: Characters of the text.

    Returns:
        `(length,)` float64 on the CPU.
    """
    shares = torch.zeros(length, dtype=torch.float64)
    for (start, stop), weight in zip(offsets, weights.tolist(), strict=True):
        # A token without characters adds to an empty slice; the 1 keeps its division from failing.
        shares[start:stop] += weight / max(stop - start, 1)
    return shares


def _filled(values: Sequence[float | None]) -> Tensor:
    """Values with gaps closed from behind, at the end from before."""
    filled, following = list(values), None
    # First from the end, each gap from what follows it; then the gap at the end from before.
    for order in (range(len(filled) - 1, -1, -1), range(len(filled))):
        following = None
        for index in order:
            following = filled[index] = following if filled[index] is None else filled[index]
    # (values,); None is left only where there was no value at all
    return torch.tensor([value or 0.0 for value in filled], dtype=torch.float32)


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, Offsets]:
    """The text that ids give when they are decoded one after the other, and where each stands.

    A tokenizer may write a token otherwise at the start of a text (without its space), so each is
    read behind its predecessor; and only the last byte of a character makes it readable, so the
    bytes before wait for it and belong to the same character.
    """

    def decode(part: Sequence[int]) -> str:
        written: str = tokenizer.decode(
            list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return written

    text, spans = "", []
    context = read = certain = 0
    for stop in range(1, len(ids) + 1):
        before, whole = decode(ids[context:read]), decode(ids[context:stop])
        kept = len(before) if whole.startswith(before) else _common(before, whole)
        fresh, start = whole[kept:], len(text) + certain
        if fresh.endswith(_UNREADABLE) and stop - read < _LONGEST_RUN and stop < len(ids):
            certain = len(fresh.rstrip(_UNREADABLE))
            spans.append((start, len(text) + certain + 1))
            continue
        text += fresh
        spans.append((min(start, len(text)), len(text)))
        context, read, certain = read, stop, 0
    return text, [(min(start, len(text)), min(stop, len(text))) for start, stop in spans]


def _common(first: str, second: str) -> int:
    """Length of the common start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _decoded_offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> Offsets:
    read, spans = decoded(tokenizer, ids)
    unknown = getattr(tokenizer, "unk_token", None)
    if unknown and unknown not in text:  # stands for what the tokenizer does not know
        read = read.replace(unknown, _UNREADABLE * len(unknown))
    known = _same_letters(read, text)
    offsets: Offsets = []
    for start, stop in spans:
        own = [known[place] for place in range(start, stop) if place in known]
        behind = offsets[-1][1] if offsets else 0
        offsets.append((min(own), max(own) + 1) if own else (behind, behind))
    return _widened(offsets, len(text))


def _widened(offsets: Offsets, length: int) -> Offsets:
    """Let tokens without a known letter (spaces, unknown characters) have what lies between."""
    result, following = list(offsets), length
    for index in range(len(offsets) - 1, -1, -1):
        start, stop = offsets[index]
        if start == stop:
            result[index] = (start, max(start, following))
        else:
            following = start
    return result


def _same_letters(decoded: str, text: str) -> dict[int, int]:
    """Places of the decoded text and the places in the text that they stand for.

    Compared are letters without case and accents, and no spaces: these are what tokenizers lose.
    """
    if decoded == text:
        return {place: place for place in range(len(text))}
    ours, theirs = _skeleton(text), _skeleton(decoded)
    if [letter for _, letter in ours] == [letter for _, letter in theirs]:
        return {there: here for (there, _), (here, _) in zip(theirs, ours, strict=True)}
    matcher = difflib.SequenceMatcher(
        None, "".join(c for _, c in theirs), "".join(c for _, c in ours), autojunk=False
    )
    return {
        theirs[there + i][0]: ours[here + i][0]
        for there, here, size in matcher.get_matching_blocks()
        for i in range(size)
    }


def _skeleton(text: str) -> list[tuple[int, str]]:
    """Places of the characters that are no spaces, each with its plain lower-case letter."""
    return [
        (place, unicodedata.normalize("NFKD", character)[0].lower()[0])
        for place, character in enumerate(text)
        if not character.isspace() and character not in (_UNREADABLE, "\u2581")
    ]
