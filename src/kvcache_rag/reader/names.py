"""Invented names: random syllables, in two pools that share no name.

Training draws from one pool and measurement from the other, so that a reader that is right about a
held-out name has read it.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final, Literal

from kvcache_rag.reader.language import vocabulary, words

NameSplit = Literal["train", "held_out"]

TRAIN_NAMES: Final = 20_000
HELD_OUT_NAMES: Final = 20_000

_ONSETS: Final = words("b d g h j l m n r s t v w br dr gr kl kr tr sk st")
_VOWELS: Final = words("a e i o u")
_CODAS: Final = ("", "", "", *words("n r l s m k"))
# A few names use rarer letters, so that every letter is seen and copied in training.
_RARE_ONSETS: Final = words("c ch cl cr f fl gl k p ph qu sc th x y z")
_RARE_VOWELS: Final = words("a e i o u y ea ou ai oo")
_RARE_CODAS: Final = ("", *words("x ck th nd rt ng d t bs v"))
UNWANTED: Final = ("fag", "fuck", "vagin")  # chance also makes rude words
_RARE_SHARE: Final = 0.06
_POOL_SEED: Final = 20_305


def invent_name(rng: random.Random) -> str:
    """Return a capitalised word of two or three random syllables."""
    if rng.random() < _RARE_SHARE:
        onsets, vowels, codas = _ONSETS + _RARE_ONSETS * 2, _RARE_VOWELS, _RARE_CODAS
    else:
        onsets, vowels, codas = _ONSETS, _VOWELS, _CODAS
    syllables = rng.choice((2, 2, 2, 3))
    word = ""
    for index in range(syllables):
        word += rng.choice(onsets) + rng.choice(vowels)
        if index == syllables - 1 or rng.random() < 0.25:
            word += rng.choice(codas)
    return word.capitalize()


@lru_cache(maxsize=2)
def names(split: NameSplit) -> tuple[str, ...]:
    """Return the names of `split`; the two splits share no name and are always the same."""
    rng = random.Random(_POOL_SEED)
    taken = {word.capitalize() for word in vocabulary()}
    pool: list[str] = []
    while len(pool) < TRAIN_NAMES + HELD_OUT_NAMES:
        word = invent_name(rng)
        if word not in taken and not any(part in word.lower() for part in UNWANTED):
            taken.add(word)
            pool.append(word)
    return tuple(pool[:TRAIN_NAMES] if split == "train" else pool[TRAIN_NAMES:])
