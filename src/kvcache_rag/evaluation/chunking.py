"""Split a long text into chunks of so many tokens, at ends of sentences where there are any."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.evaluation.question import TokenCounter

# Chunks of CacheClip's experiments (arXiv 2510.10129).
CHUNK_TOKENS: Final = 1000
OVERLAP: Final = 50

_WIDE: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_SENTENCE_END: Final = re.compile(r"[.!?]+[\"')\]]*\s+|[。！？；]+[”’」』）]*\s*|\n+")
_WORD: Final = re.compile(rf"[{_WIDE}]\s*|[^\s{_WIDE}]+\s*|\s+")
_WIDE_LETTER: Final = re.compile(f"[{_WIDE}]")


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, where no tokenizer is at hand.

    One for each Chinese, Japanese or Korean letter, and one for every four other characters.
    """
    wide = len(_WIDE_LETTER.findall(text))
    return wide + (len(text) - wide + 3) // 4


def split_text(
    text: str, count: TokenCounter, *, tokens: int = CHUNK_TOKENS, overlap: int = OVERLAP
) -> list[str]:
    """Split `text` into chunks, each beginning with the end of the one before.

    A chunk ends at the last end of a sentence that fits; a sentence that is too long by itself is
    cut between words, a word between letters.  Every part of the text is in a chunk.

    Args:
        text: Anything; white space around chunks is dropped.
        count: Number of tokens of a text.
        tokens: Most tokens of a chunk (a single letter of more tokens stays whole).
        overlap: Most tokens that a chunk shares with the one before; it begins at a word.

    Raises:
        InvalidInputError: If `tokens` is below 1 or `overlap` is not within 0 and `tokens`.
    """
    if tokens < 1 or not 0 <= overlap < tokens:
        raise InvalidInputError(
            f"chunks of {tokens} tokens cannot overlap by {overlap}; "
            "choose at least 1 token and an overlap below that"
        )
    sentences = [match.end() for match in _SENTENCE_END.finditer(text)]
    words = [match.end() for match in _WORD.finditer(text)]
    letters = range(1, len(text) + 1)
    if not sentences or sentences[-1] < len(text):
        sentences.append(len(text))
    chunks = []
    start = stop = 0
    while stop < len(text):
        for ends in (sentences, words, letters):
            further = _furthest(text, start, stop, ends, count, tokens)
            if further > stop:
                break
        else:
            further = stop + 1
        stop = further
        chunks.append(text[start:stop].strip())
        start = _overlap_start(text, start, stop, words, count, overlap)
    return [chunk for chunk in chunks if chunk]


def _furthest(
    text: str, start: int, stop: int, ends: Sequence[int], count: TokenCounter, tokens: int
) -> int:
    """The last of `ends` behind `stop` up to which the text from `start` fits; else `stop`."""
    first = bisect_right(ends, stop)

    def fits(index: int) -> bool:
        return count(text[start : ends[index]].strip()) <= tokens

    step, good = 1, first - 1
    while good + step < len(ends) and fits(good + step):
        good += step
        step *= 2
    bad = min(good + step, len(ends))  # does not fit, or is not there
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return ends[good] if good >= first else stop


def _overlap_start(
    text: str, start: int, stop: int, words: Sequence[int], count: TokenCounter, overlap: int
) -> int:
    """Where the next chunk begins: the first word of the overlap, or `stop` without one."""
    found = stop
    for index in range(bisect_right(words, stop - 1) - 1, -1, -1):
        begin = words[index]
        if begin <= start or count(text[begin:stop].strip()) > overlap:
            break
        found = begin
    return found
