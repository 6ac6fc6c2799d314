"""Contexts whose facts need the chunk before: a pronoun, an alias or a unit explained there.

The last sentence of a document says what the first sentence of the next one needs. A chunk that was
prefilled alone has not seen that sentence, so these are the questions at which reuse loses and
remedies can be told apart.

- `pronoun`: "The founder of Kelo is Mirko." / "She lives in Bran." Nothing but the order of the
  documents links the two.
- `alias`: "The baker is Mirko." / "The baker lives in Bran." The alias links them, so a reader that
  has learned it can answer in two steps when the question is asked.
- `unit`: "Lengths are in Tolu." / "The Savo measures 35.", in one pair of documents only: one look
  at the whole context finds the unit when the question is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_rag.reader.contexts import single_valued
from kvcache_rag.reader.language import JOBS, RELATIONS, Relation
from kvcache_rag.reader.questions import ReaderQuestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.reader.contexts import World

LINKED_KINDS: Final = ("pronoun", "alias", "unit")
_INTRODUCTIONS: Final = {
    kind: tuple(one for one in RELATIONS if one.value == kind and not one.many)
    for kind in ("person", "company", "town")
}
_LENGTH_DIGITS: Final = 3


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
    relation = rng.choice([one for one in single_valued("person") if one.value != "job"])
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
