"""Words of a text, for comparing answers."""

from __future__ import annotations

import re
import string
from typing import Final

PUNCTUATION: Final = frozenset(string.punctuation)
"""Of ASCII."""

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an, the, and extra white space.

    SQuAD v1.1's `normalize_answer` (arXiv 1606.05250): in this order, so that "U.S." is "us" and
    "the-end" is "theend", whose article stays.
    """
    bare = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())
