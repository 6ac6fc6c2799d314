"""Where two answers to one question differ, word by word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from kvcache_rag.prompt.words import normalised

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ComparedPart:
    """A run of an answer's text.

    Attributes:
        text: As it was written.
        differs: Whether the other answer has other words in its place.
    """

    text: str
    differs: bool


@dataclass(frozen=True)
class Difference:
    """Two answers side by side.

    Attributes:
        same: Whether both have the same words, whatever their case, punctuation and articles.
        first: The parts of the one; joined they are its text.
        second: Those of the other.
    """

    same: bool
    first: tuple[ComparedPart, ...]
    second: tuple[ComparedPart, ...]


def difference(first: str, second: str) -> Difference:
    """Compare two answers as scores of answers do: by their words when `normalised`."""
    words = _words(first), _words(second)
    keys = [[normalised(word) for word in each] for each in words]
    # A word of which nothing is left, an article or a dash, is part of no difference.
    told = [[at for at, key in enumerate(each) if key] for each in keys]
    left = [[each[at] for at in places] for each, places in zip(keys, told, strict=True)]
    differing: tuple[set[int], set[int]] = (set(), set())
    for kind, *spans in SequenceMatcher(None, left[0], left[1]).get_opcodes():
        if kind != "equal":
            for side, start, stop in ((0, *spans[:2]), (1, *spans[2:])):
                differing[side].update(told[side][start:stop])
    is_same = normalised(first) == normalised(second)
    return Difference(
        is_same, *(_parts(each, marked) for each, marked in zip(words, differing, strict=True))
    )


def _words(text: str) -> list[str]:
    """Words and, behind each, the white space that follows; the first may be white space alone."""
    return re.findall(r"^\s+|\S+\s*", text)


def _parts(words: Sequence[str], marked: set[int]) -> tuple[ComparedPart, ...]:
    """Runs of words that differ or do not; white space at the end of a run is outside of it."""
    pieces: list[tuple[str, bool]] = []
    for at, word in enumerate(words):
        bare = word.rstrip()
        is_inside = at in marked and at + 1 in marked
        pieces.append((word if is_inside else bare, at in marked))
        pieces.append(("" if is_inside else word[len(bare) :], False))
    kept = [piece for piece in pieces if piece[0]]
    return tuple(
        ComparedPart("".join(text for text, _ in run), differs)
        for differs, run in groupby(kept, key=itemgetter(1))
    )
