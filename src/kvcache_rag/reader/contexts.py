"""Draw the facts of a context: who and what exists, and which document states which fact.

A context is a list of documents, a document a list of `Fact`. The forms differ in what makes them
hard: `uniform` contexts state one or two relations of many entities, so that only the entity tells
the facts apart; `profile` documents each describe one or two entities; `chain` contexts hold the
two halves of two-hop questions in different documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvcache_rag.reader.language import COLOURS, ENTITY_TYPES, JOBS, Relation, relations_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

_TYPE_WEIGHTS: Final = (0.34, 0.24, 0.22, 0.20)
_TRIES: Final = 12


@dataclass(frozen=True)
class Fact:
    """One statement: `relation` of `entity` is `value`."""

    entity: str
    relation: Relation
    value: str


Context = list[list[Fact]]


class World:
    """Hands out entities and values that do not collide within one context."""

    def __init__(self, rng: random.Random, names: Sequence[str]) -> None:
        self.rng = rng
        self.entities: dict[str, list[str]] = {kind: [] for kind in ENTITY_TYPES}
        self._names = names
        self._taken: set[str] = set()
        self._stated: dict[str, set[str]] = {}

    def name(self) -> str:
        """Return a name that this world has not used yet.

        Raises:
            ValueError: If there is none left.
        """
        if len(self._taken) == len(self._names):
            raise ValueError(f"all {len(self._names)} names are used: ask for fewer documents")
        while True:
            name = self._names[self.rng.randrange(len(self._names))]
            if name not in self._taken:
                self._taken.add(name)
                return name

    def label(self, kind: str) -> str:
        """Return an unused name for an entity of type `kind`, without adding the entity."""
        if kind == "person" and self.rng.random() < 0.5:
            return f"{self.name()} {self.name()}"
        return self.name()

    def entity(self, kind: str) -> str:
        """Add an entity of type `kind` and return its name."""
        label = self.label(kind)
        self.entities[kind].append(label)
        return label

    def kind(self) -> str:
        """Draw an entity type."""
        return self.rng.choices(ENTITY_TYPES, _TYPE_WEIGHTS)[0]

    def fact(self, entity: str, relation: Relation, linked: float = 0.0) -> Fact:
        """State `relation` of `entity`, with a value no other entity has if one can be found.

        Args:
            entity: Name of the subject.
            relation: What is stated.
            linked: Probability that an entity-valued fact names an entity of this world.
        """
        stated = self._stated.setdefault(relation.name, set())
        value = self._value(relation, linked)
        for _ in range(_TRIES):
            if value not in stated and value != entity:
                break
            value = self._value(relation, 0.0)
        stated.add(value)
        return Fact(entity, relation, value)

    def _value(self, relation: Relation, linked: float) -> str:
        rng, kind = self.rng, relation.value
        if kind in ENTITY_TYPES:
            known = self.entities[kind]
            return rng.choice(known) if known and rng.random() < linked else self.label(kind)
        if kind == "river":
            return self.name()
        if kind == "job":
            return rng.choice(JOBS)
        if kind == "colour":
            return rng.choice(COLOURS)
        if kind == "year":
            return str(rng.randrange(1900, 2020))
        digits = int(kind.partition(":")[2])
        return str(rng.randrange(10 ** (digits - 1), 10**digits))


def single_valued(kind: str) -> list[Relation]:
    """Return the relations of entity type `kind` that have exactly one value."""
    return [relation for relation in relations_of(kind) if not relation.many]


def profile(world: World, documents: int, facts: int) -> Context:
    """Each document describes one entity, or two when it is long or by chance."""
    rng, plan = world.rng, []
    for _ in range(documents):
        kind = world.kind()
        pair = rng.random() < 0.4 or facts > len(single_valued(kind))
        first = (facts + 1) // 2 if pair else facts
        parts = [(world.entity(kind), kind, first)]
        if facts > first:
            other = world.kind()
            parts.append((world.entity(other), other, facts - first))
        plan.append(parts)
    context: Context = []
    for parts in plan:
        document: list[Fact] = []
        for entity, kind, count in parts:
            relations = relations_of(kind) if rng.random() < 0.3 else single_valued(kind)
            chosen = rng.sample(list(relations), min(count, len(relations)))
            document += [world.fact(entity, relation, linked=0.4) for relation in chosen]
        context.append(document)
    return context


def mixed(world: World, documents: int, facts: int) -> Context:
    """Facts of many entities and relations in any document, entities linked to one another."""
    rng, total = world.rng, documents * facts
    people = [(world.entity(kind), kind) for kind in _kinds(world, max(3, total // 3))]
    drawn: list[Fact] = []
    stated: set[tuple[str, str]] = set()
    while len(drawn) < total:
        entity, kind = rng.choice(people)
        relation = rng.choice(relations_of(kind))
        if (entity, relation.name) in stated:
            if rng.random() < 0.2:
                new_kind = world.kind()
                people.append((world.entity(new_kind), new_kind))
            continue
        stated.add((entity, relation.name))
        drawn.append(world.fact(entity, relation, linked=0.5))
    if rng.random() < 0.4:
        rng.shuffle(drawn)
    else:
        order = {entity: rng.random() for entity, _ in people}
        drawn.sort(key=lambda fact: order[fact.entity])
    return _cut(drawn, documents)


def uniform(world: World, documents: int, facts: int) -> Context:
    """One or two relations, each stated of many entities."""
    rng, total, kind = world.rng, documents * facts, world.kind()
    relations = rng.sample(single_valued(kind), rng.choice((1, 1, 2)))
    drawn: list[Fact] = []
    while len(drawn) < total:
        entity = world.entity(kind)
        drawn += [world.fact(entity, relation) for relation in relations]
    drawn = drawn[:total]
    if rng.random() < 0.5:
        rng.shuffle(drawn)
    return _cut(drawn, documents)


def rivals(world: World, documents: int, facts: int) -> Context:
    """Every document states one shared relation, each of another entity, among other facts."""
    rng, kind = world.rng, world.kind()
    shared = rng.choice(single_valued(kind))
    about_one = rng.random() < 0.5
    context: Context = []
    for _ in range(documents):
        entity = world.entity(kind)
        document = [world.fact(entity, shared)]
        rest = [relation for relation in single_valued(kind) if relation is not shared]
        rng.shuffle(rest)
        while len(document) < facts:
            if about_one and rest:
                document.append(world.fact(entity, rest.pop(), linked=0.2))
            else:
                other = world.kind()
                relation = rng.choice(single_valued(other))
                document.append(world.fact(world.entity(other), relation, linked=0.2))
        rng.shuffle(document)
        context.append(document)
    return context


def chain(world: World, documents: int, facts: int) -> Context:
    """Pairs of facts, the value of the first being the subject of the second."""
    rng, pairs = world.rng, max(1, documents * facts // 2)
    bridges = [
        relation
        for kind in ENTITY_TYPES
        for relation in single_valued(kind)
        if relation.phrase is not None
    ]
    first = rng.choice(bridges)
    second = rng.choice([other for other in single_valued(first.value) if other is not first])
    heads: list[Fact] = []
    tails: list[Fact] = []
    for _ in range(pairs):
        bridge = world.entity(first.value)
        heads.append(Fact(world.entity(first.subject), first, bridge))
        tails.append(world.fact(bridge, second))
    rng.shuffle(heads)
    drawn = tails + heads if rng.random() < 0.5 else heads + tails
    if documents == 1 or rng.random() < 0.3:
        rng.shuffle(drawn)
    return _cut(drawn, documents)


def several(world: World, documents: int, facts: int) -> Context:
    """Entities with one to three values of one relation, and sometimes another relation."""
    rng, total = world.rng, documents * facts
    kind = rng.choice(("company", "person"))
    listed = next(relation for relation in relations_of(kind) if relation.many)
    others = rng.sample(single_valued(kind), rng.choice((0, 1, 2)))
    drawn: list[Fact] = []
    while len(drawn) < total:
        entity = world.entity(kind)
        drawn += [world.fact(entity, listed) for _ in range(rng.choice((1, 2, 2, 3)))]
        drawn += [world.fact(entity, relation) for relation in others]
    drawn = drawn[:total]
    if rng.random() < 0.4:
        rng.shuffle(drawn)
    return _cut(drawn, documents)


def noisy(world: World, documents: int, facts: int, noise: float) -> tuple[Context, list[Fact]]:
    """Two facts that some documents state; a share `noise` states the relations of other entities.

    So it is in RGB (arXiv 2309.01431): some documents hold the answer, the others only seem to.
    """
    rng, kind = world.rng, world.kind()
    relations = rng.sample(single_valued(kind), min(2, facts))
    asked = [world.fact(world.entity(kind), relation) for relation in relations]
    others = min(round(documents * noise), documents - 1)
    context: Context = []
    for index in range(documents):
        document = list(asked)
        if index < others:
            document = [world.fact(world.entity(kind), relation) for relation in relations]
        while len(document) < facts:
            other = world.kind()
            document.append(world.fact(world.entity(other), rng.choice(single_valued(other))))
        rng.shuffle(document)
        context.append(document)
    rng.shuffle(context)
    return context, asked


FORMS: Final[dict[str, Callable[[World, int, int], Context]]] = {
    "profile": profile,
    "mixed": mixed,
    "uniform": uniform,
    "rivals": rivals,
    "chain": chain,
    "several": several,
}


def draw_context(world: World, form: str, documents: int, facts: int) -> Context:
    """Return a context of `documents` documents of about `facts` facts, in random order.

    Raises:
        ValueError: If `form` is not one of `FORMS` or a count is below one.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}, choose from {', '.join(FORMS)}")
    if documents < 1 or facts < 1:
        raise ValueError(f"need at least one document and one fact, got {documents} x {facts}")
    context = FORMS[form](world, documents, facts)
    if world.rng.random() < 0.5:
        world.rng.shuffle(context)
    return context


def _kinds(world: World, count: int) -> list[str]:
    return [world.kind() for _ in range(count)]


def _cut(drawn: list[Fact], documents: int) -> Context:
    edges = [round(index * len(drawn) / documents) for index in range(documents + 1)]
    return [drawn[start:stop] for start, stop in pairwise(edges)]
