"""Draw the facts of a context, which document states which fact, and questions about them.

A context is a list of documents, a document a list of `Fact`, drawn from a `World` (who and what
exists).  The forms differ in what makes them hard: `uniform` contexts state one or two relations of
many entities, so that only the entity tells the facts apart; `profile` documents each describe one
or two entities; `chain` contexts hold the two halves of two-hop questions in different documents.
A `Questioner` asks about a context: which facts answer a question, and which cannot be answered.

In a `linked_context` the last sentence of a document says what the first sentence of the next one
needs.  A chunk that was prefilled alone has not seen that sentence, so these are the questions at
which reuse loses and remedies can be told apart.

- `pronoun`: "The founder of Kelo is Mirko." / "She lives in Bran."  Nothing but the order of the
  documents links the two.
- `alias`: "The baker is Mirko." / "The baker lives in Bran."  The alias links them, so a reader
  that has learned it can answer in two steps when the question is asked.
- `unit`: "Lengths are in Tolu." / "The Savo measures 35.", in one pair of documents only: one look
  at the whole context finds the unit when the question is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvcache_rag_lab.reader.language import (
    COLOURS,
    ENTITY_TYPES,
    JOBS,
    REFUSAL,
    RELATIONS,
    Relation,
    relations_of,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence


_TYPE_WEIGHTS: Final = (0.34, 0.24, 0.22, 0.20)

_TRIES: Final = 12

LINKED_KINDS: Final = ("pronoun", "alias", "unit")

_INTRODUCTIONS: Final = {
    kind: tuple(relation for relation in RELATIONS if relation.value == kind and not relation.many)
    for kind in ("person", "company", "town")
}

_LENGTH_DIGITS: Final = 3


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


@dataclass(frozen=True)
class ReaderQuestion:
    """A question about the documents of a `ReaderExample`.

    Attributes:
        text: The question.
        answer: The exact answer; "bridge; final" for two hops, "A, B" for several values,
            "not found" if the documents do not say.
        kind: One of `kvcache_rag_lab.reader.KINDS`.
        documents: Indices of the documents that state the facts; empty for a refusal.
    """

    text: str
    answer: str
    kind: str
    documents: tuple[int, ...]


_Key = tuple[str, str]  # entity, name of the relation


class Questioner:
    """Draws questions about one context; no question twice."""

    def __init__(self, world: World, context: Context) -> None:
        self._world = world
        self._rng = world.rng
        self._relations = {relation.name: relation for relation in RELATIONS}
        self._values: dict[_Key, list[str]] = {}
        self._documents: dict[_Key, list[int]] = {}
        self._types: dict[str, str] = {}
        for index, document in enumerate(context):
            for fact in document:
                key = (fact.entity, fact.relation.name)
                values = self._values.setdefault(key, [])
                if fact.value not in values:
                    values.append(fact.value)
                self._documents.setdefault(key, []).append(index)
                self._types[fact.entity] = fact.relation.subject
                if fact.relation.value in ENTITY_TYPES:
                    self._types.setdefault(fact.value, fact.relation.value)
        self._stated = sorted({name for _, name in self._values})
        self._single = [key for key in self._values if not self._relations[key[1]].many]
        self._several = [key for key in self._values if self._relations[key[1]].many]
        self._shared = [key for key in self._single if self._is_shared(key[1], len(context))]
        self._chains = self._find_chains()
        self._asked: set[str] = set()

    def about(self, fact: Fact, kind: str) -> ReaderQuestion:
        """Return the question about one fact of the context."""
        return self._question((fact.entity, fact.relation.name), kind)

    def ask(self, kind: str) -> ReaderQuestion | None:
        """Return a new question of `kind`, or None if none was found.

        Raises:
            ValueError: If `kind` is unknown.
        """
        draw = {
            "single": self._ask_single,
            "same_relation": self._ask_shared,
            "unanswerable": self._ask_unanswerable,
            "two_hop": self._ask_two_hop,
            "two_hop_direct": self._ask_two_hop_directly,
            "multi_value": self._ask_several,
        }.get(kind)
        if draw is None:
            raise ValueError(f"unknown kind of question {kind!r}")
        question = draw()
        if question is None or question.text in self._asked:
            return None
        self._asked.add(question.text)
        return question

    def _is_shared(self, relation: str, documents: int) -> bool:
        stating = {self._documents[key][0] for key in self._values if key[1] == relation}
        return len(stating) == documents

    def _find_chains(self) -> list[tuple[_Key, _Key]]:
        second: dict[str, list[_Key]] = {}
        for key in self._single:
            second.setdefault(key[0], []).append(key)
        return [
            (key, follow)
            for key in self._single
            if self._relations[key[1]].phrase is not None
            for follow in second.get(self._values[key][0], ())
            if self._documents[key] != self._documents[follow] and follow[1] != key[1]
        ]

    def _form(self, relation: Relation, subject: str) -> str:
        form = self._rng.choice(relation.questions)
        if subject.startswith("the "):
            form = form.replace("the {s}", "{s}")
        return form.format(s=subject)

    def _question(self, key: _Key, kind: str) -> ReaderQuestion:
        text = self._form(self._relations[key[1]], key[0])
        where = tuple(dict.fromkeys(self._documents[key]))
        return ReaderQuestion(text, ", ".join(self._values[key]), kind, where)

    def _ask_single(self) -> ReaderQuestion | None:
        return self._question(self._rng.choice(self._single), "single") if self._single else None

    def _ask_shared(self) -> ReaderQuestion | None:
        if not self._shared:
            return None
        return self._question(self._rng.choice(self._shared), "same_relation")

    def _ask_several(self) -> ReaderQuestion | None:
        if not self._several:
            return None
        return self._question(self._rng.choice(self._several), "multi_value")

    def _ask_two_hop(self) -> ReaderQuestion | None:
        if not self._chains:
            return None
        first, second = self._rng.choice(self._chains)
        phrase = self._relations[first[1]].phrase
        if phrase is None:
            return None
        text = self._form(self._relations[second[1]], phrase.format(s=first[0]))
        answer = f"{self._values[first][0]}; {self._values[second][0]}"
        where = (self._documents[first][0], self._documents[second][0])
        return ReaderQuestion(text, answer, "two_hop", where)

    def _ask_two_hop_directly(self) -> ReaderQuestion | None:
        """Ask for the end of a chain without its bridge."""
        question = self._ask_two_hop()
        if question is None:
            return None
        final = question.answer.partition("; ")[2]
        return ReaderQuestion(
            f"In short: {question.text}", final, "two_hop_direct", question.documents
        )

    def _ask_unanswerable(self) -> ReaderQuestion | None:
        """Ask about an unknown entity, or about a known one what no document says of it."""
        if self._rng.random() < 0.5:
            relation = self._relations[self._rng.choice(self._stated)]
            entity = self._world.label(relation.subject)
        else:
            entity = self._rng.choice(list(self._types))
            unsaid = [
                relation
                for relation in relations_of(self._types[entity])
                # "X makes Y" would half answer "which products does X sell": not asked.
                if not relation.many and (entity, relation.name) not in self._values
            ]
            if not unsaid:
                return None
            relation = self._rng.choice(unsaid)
        return ReaderQuestion(self._form(relation, entity), REFUSAL, "unanswerable", ())


@dataclass(frozen=True)
class LinkedContext:
    """Documents whose neighbours belong together.

    Attributes:
        documents: Their texts.
        linked: Questions that need the document before the one with the answer.
        plain: Questions about facts that stand in one sentence.
    """

    documents: tuple[str, ...]
    linked: tuple[ReaderQuestion, ...]
    plain: tuple[ReaderQuestion, ...]


@dataclass
class _Writer:
    """Sentences per document, and the questions about them, while they are drawn."""

    world: World
    kind: str
    texts: list[list[str]]
    linked: list[ReaderQuestion]
    plain: list[ReaderQuestion]

    def state(self, document: int, entity: str, relation: Relation, *, value: str = "") -> str:
        """State a fact about a named entity, ask about it, and return the value."""
        rng = self.world.rng
        value = value or self.world.fact(entity, relation).value
        self.texts[document].append(rng.choice(relation.statements).format(s=entity, v=value))
        text = rng.choice(relation.questions).format(s=entity)
        self.plain.append(ReaderQuestion(text, value, "single", (document,)))
        return value

    def ask(self, document: int, text: str, answer: str) -> None:
        """Ask what needs `document` and the one before it."""
        self.linked.append(ReaderQuestion(text, answer, self.kind, (document - 1, document)))


def linked_context(
    world: World,
    kind: str,
    documents: int,
    facts: int,
    *,
    share: float = 1.0,
    one_alias: bool = False,
) -> LinkedContext:
    """Return a context of linked documents.

    Args:
        world: Where names and values come from.
        kind: One of `LINKED_KINDS`.
        documents: How many, at least two.
        facts: Sentences per document, at least two.
        share: How many of the neighbours are linked; at least one pair is.
        one_alias: Whether all aliases of the context are the same name, so that only the nearest
            explanation counts.

    Raises:
        ValueError: If `kind` is unknown or a number is too small.
    """
    if kind not in LINKED_KINDS:
        raise ValueError(f"unknown kind {kind!r}, choose from {', '.join(LINKED_KINDS)}")
    if documents < 2 or facts < 2:
        raise ValueError(f"links need two documents of two facts, got {documents} x {facts}")
    rng = world.rng
    writer = _Writer(world, kind, [[] for _ in range(documents)], [], [])
    pairs = [index for index in range(1, documents) if rng.random() < share]
    pairs = pairs or [rng.randrange(1, documents)]
    if kind == "unit":
        pairs = [rng.choice(pairs)]
    link: Callable[[int], str]
    if kind == "pronoun":
        filler, link = _pronouns(writer)
    elif kind == "alias":
        filler, link = _aliases(writer, f"the {rng.choice(JOBS)}" if one_alias else None)
    else:
        filler, link = _units(writer)
    last = {index - 1: link(index) for index in pairs}
    for index, text in enumerate(writer.texts):
        while len(text) + (index in last) < facts:
            filler(index)
        if index in last:
            text.append(last[index])
    rng.shuffle(writer.linked)
    rng.shuffle(writer.plain)
    texts = tuple(" ".join(text) for text in writer.texts)
    return LinkedContext(texts, tuple(writer.linked), tuple(writer.plain))


_Draw = tuple["Callable[[int], object]", "Callable[[int], str]"]


def _relation(writer: _Writer, kind: str) -> Relation:
    return writer.world.rng.choice(single_valued(kind))


def _filler(writer: _Writer, kind: str, relation: Relation) -> Callable[[int], object]:
    """Half of the other sentences state the asked relation of entities that are named there."""
    rng, world = writer.world.rng, writer.world

    def fill(document: int) -> object:
        if rng.random() < 0.5:
            return writer.state(document, world.entity(kind), relation)
        other = world.kind()
        return writer.state(document, world.entity(other), _relation(writer, other))

    return fill


def _pronouns(writer: _Writer) -> _Draw:
    rng, world = writer.world.rng, writer.world
    kind = rng.choice(tuple(_INTRODUCTIONS))
    relation = _relation(writer, kind)

    def link(document: int) -> str:
        entity = world.entity(kind)
        value = world.fact(entity, relation).value
        pronoun = "She" if kind == "person" else "It"
        # The second forms begin with "The ... of": only the first name the subject first.
        writer.texts[document].insert(0, relation.statements[0].format(s=pronoun, v=value))
        writer.ask(document, rng.choice(relation.questions).format(s=entity), value)
        introduction = rng.choice(_INTRODUCTIONS[kind])
        subject = world.entity(introduction.subject)
        text = rng.choice(introduction.questions).format(s=subject)
        writer.plain.append(ReaderQuestion(text, entity, "single", (document - 1,)))
        return rng.choice(introduction.statements).format(s=subject, v=entity)

    return _filler(writer, kind, relation), link


def _aliases(writer: _Writer, shared: str | None) -> _Draw:
    rng, world = writer.world.rng, writer.world
    relation = rng.choice(
        [candidate for candidate in single_valued("person") if candidate.value != "job"]
    )
    aliases = [f"the {job}" for job in rng.sample(JOBS, len(JOBS))]

    def link(document: int) -> str:
        entity, alias = world.entity("person"), shared or aliases.pop()
        value = world.fact(entity, relation).value
        statement = rng.choice(relation.statements).format(s=alias, v=value)
        writer.texts[document].insert(0, statement[0].upper() + statement[1:])
        text = rng.choice(relation.questions)
        writer.ask(document, text.format(s=entity), value)
        if shared is None:
            question = ReaderQuestion(text.format(s=alias), value, "single", (document,))
            writer.plain.append(question)
        return f"{alias.capitalize()} is {entity}."

    return _filler(writer, "person", relation), link


def _units(writer: _Writer) -> _Draw:
    rng, world = writer.world.rng, writer.world

    def link(document: int) -> str:
        entity, unit = world.entity("product"), world.name()
        value = str(rng.randrange(10 ** (_LENGTH_DIGITS - 1), 10**_LENGTH_DIGITS))
        writer.texts[document].insert(0, f"The {entity} measures {value}.")
        writer.ask(document, f"What does the {entity} measure?", f"{value} {unit}")
        return f"Lengths are in {unit}."

    return _filler(writer, "product", _relation(writer, "product")), link
