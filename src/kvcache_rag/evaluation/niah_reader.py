"""Needles in the language of the packaged reader, at sizes that it can read.

The reader knows a small controlled English only, so RULER's text means nothing to it.  Here the
hay are facts of people, companies, products and towns, each of another entity and with names that
its training never had, and a needle is one more fact: "The badge number of Brano is 41972."

| variant | RULER's | what is hidden |
|---|---|---|
| niah_reader_single | single | one fact of a relation that no other sentence states |
| niah_reader_multikey_1 | multikey 1 | the same relation for three other entities |
| niah_reader_multikey_2 | multikey 2 | every sentence states the relation, each of another entity |
| niah_reader_multivalue | multivalue | two values for one entity, all else is one of each other |

Several values are hidden among other entities' values of that relation, because the reader learned
lists so; among unrelated facts it names only one.  The language has no question about several
entities, so there is no multiquery.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation.question import Question
from kvcache_rag.reader.contexts import Fact, World, single_valued
from kvcache_rag.reader.generator import write_documents
from kvcache_rag.reader.language import RELATIONS
from kvcache_rag.reader.names import names

if TYPE_CHECKING:
    from kvcache_rag.reader.language import Relation


@dataclass(frozen=True)
class ReaderNeedles:
    """What is hidden.

    Attributes:
        rivals: Other entities with the same relation; None: every other sentence.
        values: Values of the asked entity.
    """

    rivals: int | None = 0
    values: int = 1


READER_VARIANTS: Final[dict[str, ReaderNeedles]] = {
    "niah_reader_single": ReaderNeedles(),
    "niah_reader_multikey_1": ReaderNeedles(rivals=3),
    "niah_reader_multikey_2": ReaderNeedles(rivals=None),
    "niah_reader_multivalue": ReaderNeedles(rivals=None, values=2),
}


def reader_needle_question(name: str, seed: int, *, documents: int = 6, facts: int = 4) -> Question:
    """Hide a fact among others and ask for it; `documents` of `facts` sentences each.

    Args:
        name: One of `READER_VARIANTS`.
        seed: Decides everything else.
        documents: How many documents.
        facts: Sentences of each.

    Raises:
        InvalidInputError: If there is no such variant or its needles need more sentences.
    """
    variant = READER_VARIANTS.get(name)
    if variant is None:
        raise InvalidInputError(
            f"there is no needle task {name!r}; choose from {', '.join(READER_VARIANTS)}"
        )
    total = documents * facts
    rivals = total - variant.values if variant.rivals is None else variant.rivals
    if documents < 1 or facts < 1 or rivals < 0 or variant.values + rivals > total:
        raise InvalidInputError(
            f"{name} does not fit into {documents} documents of {facts} facts; ask for more"
        )
    rng = random.Random(f"{name}/{documents}x{facts}/{seed}")
    world = World(rng, names("held_out"))
    relation = rng.choice([one for one in RELATIONS if _suits(one, variant)])
    entity = world.entity(relation.subject)
    needles = [world.fact(entity, relation) for _ in range(variant.values)]
    others = [world.fact(world.entity(relation.subject), relation) for _ in range(rivals)]
    hay = others + [_noise(world, relation) for _ in range(total - len(needles) - rivals)]
    rng.shuffle(hay)
    for needle in needles:
        hay.insert(rng.randrange(len(hay) + 1), needle)
    context = [hay[start : start + facts] for start in range(0, total, facts)]
    return Question(
        id=f"{name}-{documents}x{facts}-{seed}",
        question=rng.choice(relation.questions).format(s=entity),
        chunks=write_documents(rng, context),
        answers=tuple(needle.value for needle in needles),
        relevant=tuple(
            index
            for index, document in enumerate(context)
            if any(fact.entity == entity for fact in document)
        ),
    )


def _suits(relation: Relation, variant: ReaderNeedles) -> bool:
    """Numbers of several digits, as RULER's values are; lists where several values are asked."""
    if variant.values > 1:
        return relation.many
    return relation.value.startswith("digits:") and not relation.many


def _noise(world: World, asked: Relation) -> Fact:
    """A fact of a new entity by any other relation."""
    kind = world.kind()
    relations = [one for one in single_valued(kind) if one is not asked]
    return world.fact(world.entity(kind), world.rng.choice(relations))
