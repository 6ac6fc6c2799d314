"""Examples to read: documents in controlled English, questions about them, and the exact answers.

Everything is a function of its seed, in every process and on every machine. `make_example` draws
one context with questions of one kind; `make_corpus` draws a larger collection to retrieve from;
`draw_example` and `draw_linked_example` draw what is learned from, contexts and questions of a
`Mix` of kinds.  The names of `names="held_out"` and `names="wide"` never occur in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from kvcache_rag_lab.reader.contexts import (
    LINKED_KINDS,
    Questioner,
    ReaderQuestion,
    World,
    draw_context,
    linked_context,
    noisy,
    profile,
)
from kvcache_rag_lab.reader.names import names, wide_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.reader.contexts import Context


NamePool = Literal["train", "held_out", "wide", "wide_train"]

_NOISE: Final = {"noise_20": 0.2, "noise_40": 0.4, "noise_60": 0.6, "noise_80": 0.8}

KINDS: Final = (
    *("single", "same_relation", "unanswerable", "two_hop", "multi_value", "two_hop_direct"),
    *_NOISE,
    *LINKED_KINDS,
)

_FORMS: Final = {
    "single": ("profile", "mixed"),
    "same_relation": ("rivals",),
    "unanswerable": ("profile", "mixed", "rivals"),
    "two_hop": ("chain",),
    "two_hop_direct": ("chain",),
    "multi_value": ("several",),
}

_TRIES: Final = 20


Size = tuple[int, int]  # documents, facts per document

_LINKED_KINDS: Final = {"pronoun": 0.45, "alias": 0.45, "unit": 0.1}

_LINKED_PAIRS: Final = (1.0, 0.7, 0.4)  # how many neighbours are linked

_ONE_ALIAS: Final = 0.5  # of the contexts with aliases

_DRAWS_OF_A_QUESTION: Final = 3


@dataclass(frozen=True)
class ReaderExample:
    """Documents and the questions about them."""

    documents: tuple[str, ...]
    questions: tuple[ReaderQuestion, ...]


def write_documents(rng: random.Random, context: Context) -> tuple[str, ...]:
    """Return the text of each document: one sentence per fact, joined by a space."""
    return tuple(
        " ".join(
            rng.choice(fact.relation.statements).format(s=fact.entity, v=fact.value)
            for fact in document
        )
        for document in context
    )


def make_example(
    seed: int,
    *,
    documents: int = 6,
    facts: int = 4,
    kind: str = "single",
    questions: int = 4,
    names: NamePool = "held_out",
) -> ReaderExample:
    """Return one context and questions about it, all of one kind.

    Args:
        seed: Decides everything else.
        documents: How many documents.
        facts: Facts per document ("several" values and odd products may shift one by rounding).
        kind: One of `KINDS`. "same_relation": every document states the asked relation, each of
            another entity; "noise_40": 40 % of the documents state it of another entity, the others
            state the answer; "unanswerable": no document states the answer, which is "not found";
            "two_hop_direct": a chain answered without its bridge; for those that need the document
            before see `linked`.
        questions: How many questions at most; fewer if the context does not give that many.
        names: Which pool the names come from. "held_out" names are new ones of the syllables that
            "train" names have; "wide" ones are new too and of every make, up to three words long;
            "wide_train" ones are like these, for training.

    Raises:
        ValueError: If `kind` or `names` is unknown or a count is below one.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}, choose from {', '.join(KINDS)}")
    rng = random.Random(f"example/{names}/{kind}/{documents}x{facts}/{seed}")
    if kind in LINKED_KINDS:
        linked = linked_context(World(rng, _pool(names)), kind, documents, facts)
        return ReaderExample(linked.documents, linked.linked[:questions])
    drawn: list[ReaderQuestion] = []
    if kind in _NOISE:
        world = World(rng, _pool(names))
        context, asked = noisy(world, documents, facts, _NOISE[kind])
        asker = Questioner(world, context)
        texts = write_documents(rng, context)
        drawn = [asker.about(fact, kind) for fact in asked[:questions]]
    while not drawn:
        world = World(rng, _pool(names))
        context = draw_context(world, rng.choice(_FORMS[kind]), documents, facts)
        asker = Questioner(world, context)
        texts = write_documents(rng, context)
        for _ in range(_TRIES * questions):
            question = asker.ask(kind)
            if question is not None and not _is_degenerate(question):
                drawn.append(question)
            if len(drawn) >= questions:
                break
    return ReaderExample(texts, tuple(drawn))


def make_corpus(
    seed: int,
    *,
    documents: int,
    facts: int = 4,
    questions: int,
    unanswerable: int = 0,
    names: NamePool = "held_out",
) -> ReaderExample:
    """Return a collection to retrieve from, with questions that one document each answers.

    Every document is a profile of one or two entities, named in each sentence; documents refer to
    one another's entities but never contradict one another.

    Args:
        seed: Decides everything else.
        documents: How many documents.
        facts: Facts per document.
        questions: How many single-hop questions, spread over the documents.
        unanswerable: How many questions more that no document answers.
        names: Which pool the names come from.

    Raises:
        ValueError: If a count is out of range or the corpus has too few facts for `questions`.
    """
    if documents < 1 or facts < 1 or questions > documents * facts:
        raise ValueError(f"{documents} x {facts} facts cannot give {questions} questions")
    rng = random.Random(f"corpus/{names}/{documents}x{facts}/{seed}")
    world = World(rng, _pool(names))
    context = profile(world, documents, facts)
    rng.shuffle(context)
    texts = write_documents(rng, context)
    asker = Questioner(world, context)
    tries = _TRIES * (documents + questions)
    drawn = [attempt for _ in range(tries) if (attempt := asker.ask("single")) is not None]
    per_document = [0] * documents
    rank: list[tuple[int, int]] = []
    for index, answered in enumerate(drawn):
        rank.append((per_document[answered.documents[0]], index))
        per_document[answered.documents[0]] += 1
    chosen = [drawn[index] for _, index in sorted(rank)[:questions]]
    if len(chosen) < questions:
        raise ValueError(f"only {len(chosen)} of {questions} questions found")
    rng.shuffle(chosen)
    refused: list[ReaderQuestion] = []
    while len(refused) < unanswerable:
        question = asker.ask("unanswerable")
        if question is not None:
            refused.append(question)
    return ReaderExample(texts, tuple(chosen + refused))


def _pool(pool: NamePool) -> tuple[str, ...]:
    if pool not in get_args(NamePool):
        raise ValueError(f"unknown names {pool!r}, choose from {', '.join(get_args(NamePool))}")
    if pool in ("wide", "wide_train"):
        return wide_names(training=pool == "wide_train")
    return names("train" if pool == "train" else "held_out")


def _is_degenerate(question: ReaderQuestion) -> bool:
    """Whether a question for several values has only one."""
    return question.kind == "multi_value" and "," not in question.answer


@dataclass(frozen=True)
class Mix:
    """Weights of context forms, and of question kinds within each form."""

    forms: dict[str, float]
    questions: dict[str, dict[str, float]]


READING: Final = Mix(
    {
        "uniform": 0.22,
        "rivals": 0.16,
        "profile": 0.22,
        "mixed": 0.14,
        "chain": 0.14,
        "several": 0.12,
    },
    {
        "uniform": {"single": 0.86, "unanswerable": 0.14},
        "rivals": {"single": 0.56, "same_relation": 0.30, "unanswerable": 0.14},
        "profile": {"single": 0.84, "unanswerable": 0.16},
        "mixed": {"single": 0.62, "two_hop": 0.14, "multi_value": 0.10, "unanswerable": 0.14},
        "chain": {"single": 0.24, "two_hop": 0.66, "unanswerable": 0.10},
        "several": {"single": 0.26, "multi_value": 0.64, "unanswerable": 0.10},
    },
)


def draw_example(
    rng: random.Random, mix: Mix, size: Size, questions: int, pool: Sequence[str]
) -> ReaderExample:
    """Return one training example of `mix`; it may have no question at all."""
    world = World(rng, pool)
    form = rng.choices(list(mix.forms), list(mix.forms.values()))[0]
    context = draw_context(world, form, *size)
    asker = Questioner(world, context)
    texts = write_documents(rng, context)
    weights = mix.questions[form]
    kinds = rng.choices(list(weights), list(weights.values()), k=questions * _DRAWS_OF_A_QUESTION)
    drawn = []
    for kind in kinds:
        question = asker.ask(kind)
        if question is not None:
            drawn.append(question)
        if len(drawn) == questions:
            break
    return ReaderExample(texts, tuple(drawn))


def draw_linked_example(
    rng: random.Random, size: Size, questions: int, pool: Sequence[str]
) -> ReaderExample:
    """Return one training example in which facts need the document before."""
    kind = rng.choices(list(_LINKED_KINDS), list(_LINKED_KINDS.values()))[0]
    context = linked_context(
        World(rng, pool),
        kind,
        *size,
        share=rng.choice(_LINKED_PAIRS),
        one_alias=rng.random() < _ONE_ALIAS,
    )
    return ReaderExample(context.documents, (context.linked + context.plain)[:questions])
