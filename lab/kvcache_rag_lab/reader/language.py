"""The controlled English of the reader: relations, sentence and question forms, invented names.

Pure data and a few small functions; nothing here draws an example. A relation links a subject of
one type to a value of another ("person was born in town"). Every statement names its subject and
its value, so that a fact can be understood from its own sentence.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

INSTRUCTION: Final = "Answer the question from the documents."
REFUSAL: Final = "not found"
ENTITY_TYPES: Final = ("person", "company", "product", "town")


@dataclass(frozen=True)
class Relation:
    """One kind of fact.

    Attributes:
        name: Short identifier, unique.
        subject: Entity type the fact is about.
        value: Type of the value: an entity type, "river", "job", "colour", "year" or "digits:N".
        statements: Sentences with `{s}` for the subject and `{v}` for the value.
        questions: Questions with `{s}` for the subject.
        phrase: Noun phrase for the value, used as the subject of a two-hop question.
        many: Whether one subject may have several values.
    """

    name: str
    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    phrase: str | None = None
    many: bool = False


RELATIONS: Final[tuple[Relation, ...]] = (
    Relation(
        "birthplace",
        "person",
        "town",
        ("{s} was born in {v}.", "The birthplace of {s} is {v}."),
        ("Where was {s} born?", "What is the birthplace of {s}?"),
        "the birthplace of {s}",
    ),
    Relation(
        "home",
        "person",
        "town",
        ("{s} lives in {v}.", "The home town of {s} is {v}."),
        ("Where does {s} live?", "What is the home town of {s}?"),
        "the home town of {s}",
    ),
    Relation(
        "employer",
        "person",
        "company",
        ("{s} works for {v}.", "The employer of {s} is {v}."),
        ("Which company employs {s}?", "Who is the employer of {s}?"),
        "the employer of {s}",
    ),
    Relation(
        "teacher",
        "person",
        "person",
        ("{s} was taught by {v}.", "The teacher of {s} is {v}."),
        ("Who taught {s}?", "Who is the teacher of {s}?"),
        "the teacher of {s}",
    ),
    Relation(
        "job",
        "person",
        "job",
        ("{s} is a {v} by profession.", "The profession of {s} is {v}."),
        ("What is the profession of {s}?", "What does {s} do for a living?"),
    ),
    Relation(
        "graduation",
        "person",
        "year",
        ("{s} finished school in {v}.", "The graduation year of {s} is {v}."),
        ("When did {s} finish school?", "What is the graduation year of {s}?"),
    ),
    Relation(
        "badge",
        "person",
        "digits:5",
        ("{s} has the badge number {v}.", "The badge number of {s} is {v}."),
        ("Which badge number does {s} have?", "What is the badge number of {s}?"),
    ),
    Relation(
        "visited",
        "person",
        "town",
        ("{s} has visited {v}.", "A town that {s} has visited is {v}."),
        ("Which towns has {s} visited?",),
        many=True,
    ),
    Relation(
        "seat",
        "company",
        "town",
        ("{s} is based in {v}.", "The seat of {s} is {v}."),
        ("Where is {s} based?", "What is the seat of {s}?"),
        "the seat of {s}",
    ),
    Relation(
        "founder",
        "company",
        "person",
        ("{s} was founded by {v}.", "The founder of {s} is {v}."),
        ("Who founded {s}?", "Who is the founder of {s}?"),
        "the founder of {s}",
    ),
    Relation(
        "director",
        "company",
        "person",
        ("{s} is led by {v}.", "The director of {s} is {v}."),
        ("Who leads {s}?", "Who is the director of {s}?"),
        "the director of {s}",
    ),
    Relation(
        "staff",
        "company",
        "digits:4",
        ("{s} has a staff of {v} people.", "The staff size of {s} is {v}."),
        ("How many people work at {s}?", "What is the staff size of {s}?"),
    ),
    Relation(
        "opened",
        "company",
        "year",
        ("{s} was opened in {v}.", "The opening year of {s} is {v}."),
        ("When was {s} opened?", "What is the opening year of {s}?"),
    ),
    Relation(
        "sells",
        "company",
        "product",
        ("{s} sells the {v}.", "One product of {s} is the {v}."),
        ("Which products does {s} sell?",),
        many=True,
    ),
    Relation(
        "price",
        "product",
        "digits:3",
        ("The {s} costs {v} euros.", "The price of the {s} is {v} euros."),
        ("How much does the {s} cost?", "What is the price of the {s}?"),
    ),
    Relation(
        "weight",
        "product",
        "digits:3",
        ("The {s} weighs {v} grams.", "The weight of the {s} is {v} grams."),
        ("How much does the {s} weigh?", "What is the weight of the {s}?"),
    ),
    Relation(
        "colour",
        "product",
        "colour",
        ("The {s} is painted {v}.", "The colour of the {s} is {v}."),
        ("What is the colour of the {s}?", "In which colour is the {s} painted?"),
    ),
    Relation(
        "designer",
        "product",
        "person",
        ("The {s} was designed by {v}.", "The designer of the {s} is {v}."),
        ("Who designed the {s}?", "Who is the designer of the {s}?"),
        "the designer of the {s}",
    ),
    Relation(
        "maker",
        "product",
        "company",
        ("The {s} is made by {v}.", "The maker of the {s} is {v}."),
        ("Which company makes the {s}?", "Who is the maker of the {s}?"),
        "the maker of the {s}",
    ),
    Relation(
        "mayor",
        "town",
        "person",
        ("{s} has a mayor called {v}.", "The mayor of {s} is {v}."),
        ("Who is the mayor of {s}?", "What is the mayor of {s} called?"),
        "the mayor of {s}",
    ),
    Relation(
        "river",
        "town",
        "river",
        ("{s} lies on the river {v}.", "The river of {s} is the {v}."),
        ("On which river does {s} lie?", "What is the river of {s}?"),
    ),
    Relation(
        "population",
        "town",
        "digits:5",
        ("{s} has a population of {v}.", "The population of {s} is {v}."),
        ("What is the population of {s}?", "How many people live in {s}?"),
    ),
    Relation(
        "postcode",
        "town",
        "digits:5",
        ("{s} has the postal code {v}.", "The postal code of {s} is {v}."),
        ("What is the postal code of {s}?", "Which postal code does {s} have?"),
    ),
)


def words(text: str) -> tuple[str, ...]:
    """Return the words of `text`."""
    return tuple(text.split())


JOBS: Final = words(
    "baker chemist pilot nurse lawyer painter farmer teacher singer plumber judge miner tailor "
    "sailor dentist carpenter"
)
COLOURS: Final = words(
    "red blue green black white yellow purple orange brown grey pink silver gold"
)


def relations_of(subject: str) -> tuple[Relation, ...]:
    """Return the relations whose subject is of type `subject`."""
    return _BY_SUBJECT[subject]


def sentences() -> tuple[str, ...]:
    """Return every fixed text of the language, with `{s}` and `{v}` where names stand."""
    texts = [INSTRUCTION, REFUSAL, " ".join(JOBS), " ".join(COLOURS)]
    for relation in RELATIONS:
        texts += [*relation.statements, *relation.questions]
        if relation.phrase:
            texts.append(relation.phrase)
    return tuple(texts)


@lru_cache(maxsize=1)
def vocabulary() -> frozenset[str]:
    """Return the words of the language that are not names, in lower case."""
    texts = " ".join(sentences()).replace("{s}", " ").replace("{v}", " ").split()
    return frozenset(word.strip(string.punctuation).lower() for word in texts) - {""}


_BY_SUBJECT: Final = {
    kind: tuple(relation for relation in RELATIONS if relation.subject == kind)
    for kind in ENTITY_TYPES
}
