"""Samples from the reader's generator: every kind of question it knows, by name."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.finetune.samples import Asked, QASample
from kvcache_rag.reader import KINDS, ReaderExample, make_example

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.finetune.config import ReaderData

# Seeds of `make_example`: a stretch of their own for each run, far from those of evaluation.
_STRETCH = 1_000_000_000_000
MIX = "mix"
# What its questions are measured with.
_MIX_KINDS = ("single", "same_relation", "unanswerable", "two_hop", "multi_value")


def reader_data(
    data: ReaderData, seed: int, holdout: int
) -> tuple[Callable[[int], QASample], tuple[QASample, ...], str]:
    """How to draw, what is held out (names that never occur in training), and the refusal.

    Args:
        data: Kinds and sizes.
        seed: Another seed, other samples.
        holdout: Contexts held out; every kind in turn, those of the mix one by one.

    Raises:
        InvalidInputError: If a kind, a pool of names or a size is not known.
    """
    from kvcache_rag.reader.language import REFUSAL

    kinds = _weights(data.kinds)
    if min((*data.documents, *data.facts), default=0) < 1 or not data.names:
        raise InvalidInputError("documents and facts of a context must be at least 1")
    every = [one for kind in kinds for one in (_MIX_KINDS if kind == MIX else (kind,))]
    held = []
    for number in range(holdout):
        rng = random.Random(f"finetune/held/{seed}/{number}")
        kind = every[number % len(every)]
        held.append(_sample(_example(data, rng, kind, "held_out", seed, number)))

    def draw(number: int) -> QASample:
        rng = random.Random(f"finetune/kinds/{seed}/{number}")
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        names = rng.choice(data.names)
        if kind == MIX:
            return _sample(_mixed(data, rng, names))
        return _sample(_example(data, rng, kind, names, seed, number))

    _try(lambda: draw(0))
    return draw, tuple(held), REFUSAL


def _weights(kinds: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in kinds:
        name, _, weight = text.partition(":")
        try:
            found[name] = float(weight or 1)
        except ValueError as error:
            raise InvalidInputError(f"{text!r}: a kind is NAME or NAME:WEIGHT") from error
        if name not in (MIX, *KINDS) or not found[name] > 0:
            raise InvalidInputError(
                f"{text!r} is no kind of question with a weight above 0; kinds: "
                f"{', '.join((MIX, *KINDS))}"
            )
    if not found:
        raise InvalidInputError(f"name at least one kind of question, such as {MIX}")
    return found


def _mixed(data: ReaderData, rng: random.Random, pool: str) -> ReaderExample:
    """A context with questions of several kinds, as the reader's own training drew them."""
    from kvcache_rag.reader.data import READING, draw_example
    from kvcache_rag.reader.names import names
    from kvcache_rag.reader.wide import wide_names

    known = names("train") if pool == "train" else wide_names(training=True)
    size = (rng.choice(data.documents), rng.choice(data.facts))
    while True:
        example = draw_example(rng, READING, size, data.questions, known)
        if example.questions:
            return example


def _example(
    data: ReaderData, rng: random.Random, kind: str, pool: Any, seed: int, number: int
) -> ReaderExample:
    example: ReaderExample = _try(
        lambda: make_example(
            (seed + 1) * _STRETCH + number,
            documents=rng.choice(data.documents),
            facts=rng.choice(data.facts),
            kind=kind,
            questions=data.questions,
            names=pool,
        )
    )
    return example


def _try(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise InvalidInputError(f"the reader's generator refuses: {error}") from error


def _sample(example: ReaderExample) -> QASample:
    asked = tuple(Asked(one.text, one.answer, one.documents) for one in example.questions)
    return QASample(tuple(example.documents), asked)
