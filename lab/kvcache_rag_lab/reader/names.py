"""Invented names of two makes, each in two pools that share no name.

Training draws from one pool and measurement from the other, so that a reader that is right about a
held-out name has read it.

The names of `names` come from one inventory of syllables, and a reader trained on them alone cannot
copy what that inventory cannot spell.  Those of `wide_names` are words of many makes, so that a
reader must copy spellings and not know them: from wider syllables, from the letter pairs of the
language's words, from random letters, and in training from the pieces of the vocabulary
(`piece_names`); some have several words, hyphens, apostrophes, digits or unusual case.  A hash of
its letters decides whether a wide word is for training or for measuring, so no draw can put one
word on both sides.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from kvcache_rag_lab.reader.language import vocabulary, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

WIDE_TRAIN_NAMES: Final = 40_000

WIDE_HELD_OUT_NAMES: Final = 20_000

_PIECE_ROUNDS: Final = 12

_SEED: Final = 20_306

_WIDE_ONSETS: Final = words(
    "b bl br c ch cl cr d dr f fl fr g gh gl gn gr h j k kh kl kn kr l ll m n p ph pl pr qu r rh "
    "s sc sch sh sk sl sm sn sp st str sv sw sz t th tr ts tw v vl w wh wr x y z zh"
)

_INNER: Final = (
    *_WIDE_ONSETS,
    *words("b d g k l m n p r s t v bb ck dd ff gg lb ld lt mb mm nd nn pp"),
)

_INNER_MORE: Final = words("ng nk nt rd rg rk rl rm rn rr rt ss st tt tz v z")

_WIDE_VOWELS: Final = words(
    "a a a e e e i i i o o o u u y aa ae ai au ay ea ee ei eu ey ia ie io oa oe oi oo ou oy ue ui"
)

_WIDE_CODAS: Final = words(
    "b c ch ck d f ff ft g gh h k l ld lf lk ll lm ls lt m mp n nd ng nk nn ns nt p ph r rd rg rk "
    "rl rm rn rs rt s sh sk ss st t th ts tt tz v w x y z"
)

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"

_COMMON: Final = (
    "aaaaabccddeeeeeeeffggghhhiiiiijkklllllmmmnnnnnnooooopprrrrrrsssssttttttuuuvvwwxyyz"
)

_BEFORE_APOSTROPHE: Final = words("O O D L N M")


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


def is_for_training(word: str) -> bool:
    """Whether `word` belongs to training and not to measuring: a hash of its letters decides."""
    letters = "".join(filter(str.isalpha, word.lower()))
    return hashlib.sha256(letters.encode()).digest()[0] % 2 == 0


@lru_cache(maxsize=2)
def wide_names(*, training: bool) -> tuple[str, ...]:
    """Return the wide names of one side, always the same; one in seven has two or three words."""
    rng = random.Random(f"{_SEED}/{training}")
    single = _words(rng, WIDE_TRAIN_NAMES if training else WIDE_HELD_OUT_NAMES, training)
    pool: dict[str, None] = {}
    for word in single:
        count = rng.choices((1, 2, 3), (0.86, 0.11, 0.03))[0]
        pool[" ".join([word, *rng.sample(single, count - 1)])] = None
    return tuple(pool)


def piece_names(pieces: Sequence[str]) -> tuple[str, ...]:
    """Return training names put together from `pieces` of a vocabulary, each piece several times.

    Args:
        pieces: The texts of tokens made of letters; a leading space marks one that begins a word.
    """
    rng = random.Random(_SEED)
    taken = _taken(training=True)
    first = [piece.strip() for piece in pieces if piece[0] == " " and piece.strip()]
    inner = [piece for piece in pieces if piece[0] != " "]
    capitals = [piece for piece in first if piece[0].isupper()]
    pool: dict[str, None] = {}
    for turn in range(_PIECE_ROUNDS):
        for piece in (first if turn < 2 else capitals) + inner:
            beginning = piece if piece in first else rng.choice(capitals)
            parts = [beginning] if piece in first else [beginning, piece]
            parts += rng.choices(inner, k=rng.choice((0, 1, 1, 2)))
            word = "".join(parts)
            if 1 < len(word) < 13 and _is_allowed(word, taken) and is_for_training(word):
                pool[word] = None
    return tuple(pool)


def _words(rng: random.Random, count: int, training: bool) -> list[str]:
    taken, pairs = _taken(training=training), _letter_pairs()
    makes: tuple[Callable[[], str], ...] = (
        lambda: _syllables(rng),
        lambda: _english_like(rng, pairs),
        lambda: _random_letters(rng),
        lambda: rng.choice("aeiou") + invent_name(rng).lower(),
        lambda: invent_name(rng),
    )
    pool: dict[str, None] = {}
    while len(pool) < count:
        first, other = (rng.choices(makes, (0.36, 0.26, 0.16, 0.10, 0.12))[0]() for _ in range(2))
        word = _dress(rng, first.capitalize(), other.capitalize())
        if _is_allowed(word, taken) and is_for_training(word) == training:
            pool[word] = None
    return list(pool)


def _taken(*, training: bool) -> frozenset[str]:
    """Return what a word must not be: the language and the other side of the syllable names."""
    other = names("held_out" if training else "train")
    return vocabulary() | {name.lower() for name in other}


def _is_allowed(word: str, taken: frozenset[str]) -> bool:
    plain = word.lower()
    return plain not in taken and not any(part in plain for part in UNWANTED)


def _syllables(rng: random.Random) -> str:
    word = rng.choice(_WIDE_ONSETS) if rng.random() < 0.7 else ""
    count = rng.choices((1, 2, 3), (0.22, 0.56, 0.22))[0]
    for index in range(count):
        word += rng.choice(_WIDE_VOWELS)
        if index < count - 1:
            word += rng.choice(_INNER + _INNER_MORE)
    return word + rng.choice(_WIDE_CODAS) if len(word) < 3 or rng.random() < 0.5 else word


def _english_like(rng: random.Random, pairs: dict[str, list[str]]) -> str:
    word, longest = "", rng.randrange(4, 10)
    while len(word) < longest:
        letter = rng.choice(pairs[word[-1:]])
        if not letter:
            if len(word) > 3:
                break
            letter = rng.choice("aeiou")
        word += letter
    return word


def _letter_pairs() -> dict[str, list[str]]:
    """Return what follows each letter in the words of the language; "" is the edge of a word."""
    table: dict[str, list[str]] = defaultdict(list)
    for word in sorted(vocabulary()):
        for before, after in zip(["", *word], [*word, ""], strict=True):
            table[before].append(after)
    for letter in _LETTERS:
        table[letter] += "aeiourlnst"
        table[""].append(letter)
    return table


def _random_letters(rng: random.Random) -> str:
    letters = rng.choice((_LETTERS, _COMMON, _COMMON))
    return "".join(rng.choices(letters, k=rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9))))


def _dress(rng: random.Random, word: str, other: str) -> str:
    """Return `word`, one time in eight with a second part or in another case."""
    chance = rng.random()
    if chance < 0.03:
        return f"{word}-{other}"
    if chance < 0.055:
        return f"{rng.choice(_BEFORE_APOSTROPHE)}'{word}"
    if chance < 0.065:
        return f"{rng.choice(('Mc', 'Mac', 'De', 'Le'))}{word}"
    if chance < 0.09:
        return word[:5].upper()
    if chance < 0.11:
        return word.lower()
    if chance < 0.125:
        return f"{word}{rng.randrange(100)}"
    return word
