"""The reader's language and examples: deterministic, answerable from the documents, held out."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from functools import lru_cache

import pytest

from kvcache_rag_lab.reader import KINDS, ReaderExample, ReaderQuestion, make_corpus, make_example
from kvcache_rag_lab.reader.contexts import World
from kvcache_rag_lab.reader.language import REFUSAL, RELATIONS, vocabulary
from kvcache_rag_lab.reader.names import names

NAME = r"[A-Z][a-z]+(?: [A-Z][a-z]+)?"
SINGLE = ("single", "same_relation")


@lru_cache
def patterns(field: str) -> list[tuple[str, bool, re.Pattern[str]]]:
    """Return a pattern per statement or question form, with its relation."""
    return [
        (
            relation.name,
            relation.many,
            re.compile(
                re.escape(form)
                .replace(r"\{s\}", f"(?P<s>{NAME})")
                .replace(r"\{v\}", f"(?P<v>{NAME}|[a-z]+|[0-9]+)")
            ),
        )
        for relation in RELATIONS
        for form in getattr(relation, field)
    ]


def facts(document: str) -> list[tuple[str, str, str]]:
    """Return (subject, relation, value) of each sentence; each must have exactly one reading."""
    found = []
    for sentence in re.findall(r"[^.]+\.", document):
        readings = [
            (match["s"], relation, match["v"])
            for relation, _, pattern in patterns("statements")
            if (match := pattern.fullmatch(sentence.strip()))
        ]
        assert len(readings) == 1, sentence
        found += readings
    return found


def asked(question: ReaderQuestion) -> tuple[str, str]:
    """Return (subject, relation) of a question about one entity."""
    readings = {
        (match["s"], relation)
        for relation, _, pattern in patterns("questions")
        if (match := pattern.fullmatch(question.text))
    }
    assert len(readings) == 1, question.text
    return readings.pop()


def stated(example: ReaderExample) -> dict[tuple[str, str], list[tuple[int, str]]]:
    table: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for index, document in enumerate(example.documents):
        for subject, relation, value in facts(document):
            table.setdefault((subject, relation), []).append((index, value))
    return table


@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize("seed", range(8))
def test_answers_follow_from_the_documents(kind: str, seed: int) -> None:
    example = make_example(seed, kind=kind)
    assert len(example.documents) == 6
    assert 1 <= len(example.questions) <= 4
    table = stated(example)
    for question in example.questions:
        assert question.kind == kind
        if kind == "two_hop":
            bridge, final = question.answer.split("; ")
            first, second = question.documents
            assert any(v == bridge for _, _, v in facts(example.documents[first]))
            assert any(s == bridge and v == final for s, _, v in facts(example.documents[second]))
            continue
        where = table.get(asked(question), [])
        if kind == "unanswerable":
            assert (question.answer, question.documents, where) == (REFUSAL, (), [])
        else:
            assert question.answer == ", ".join(value for _, value in where)
            assert question.documents == tuple(dict.fromkeys(index for index, _ in where))
            assert (len(where) > 1) == (kind == "multi_value")


@pytest.mark.parametrize("seed", range(8))
def test_same_relation_is_stated_in_every_document_of_another_entity(seed: int) -> None:
    example = make_example(seed, kind="same_relation")
    table = stated(example)
    for question in example.questions:
        _, relation = asked(question)
        by_document = {
            index: subject
            for (subject, name), where in table.items()
            if name == relation
            for index, _ in where
        }
        assert sorted(by_document) == list(range(6))
        assert len(set(by_document.values())) == 6
    assert all(len(facts(document)) == 4 for document in example.documents)


@pytest.mark.parametrize(("documents", "size"), [(1, 4), (3, 2), (8, 5)])
def test_example_has_the_asked_shape(documents: int, size: int) -> None:
    example = make_example(1, documents=documents, facts=size, questions=2)
    assert len(example.documents) == documents
    assert {len(facts(document)) for document in example.documents} <= {size - 1, size, size + 1}


def test_examples_depend_on_the_seed_alone() -> None:
    code = (
        "import hashlib, sys\n"
        "import kvcache_rag\n"
        "loaded = 'torch' in sys.modules\n"
        "from kvcache_rag_lab.reader import KINDS, make_corpus, make_example\n"
        "assert ('torch' in sys.modules) == loaded, 'the reader imports torch'\n"
        "made = [make_example(5, kind=kind) for kind in KINDS]\n"
        "made.append(make_corpus(5, documents=9, questions=6, unanswerable=2))\n"
        "print(hashlib.sha256(repr(made).encode()).hexdigest())"
    )
    made = [make_example(5, kind=kind) for kind in KINDS]
    made.append(make_corpus(5, documents=9, questions=6, unanswerable=2))
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert there.stdout.strip() == hashlib.sha256(repr(made).encode()).hexdigest()
    assert make_example(5) != make_example(6)
    assert make_example(5) != make_example(5, names="train")


def test_held_out_names_are_new() -> None:
    training, held_out = set(names("train")), set(names("held_out"))
    assert (len(training), len(held_out)) == (20_000, 20_000)
    assert not training & held_out
    assert not {name.lower() for name in training | held_out} & vocabulary()
    documents = " ".join(make_example(3).documents)
    capitalised = set(re.findall(r"[A-Z][a-z]+", documents)) - {"The", "A", "One"}
    assert capitalised <= held_out


def test_corpus_questions_have_one_document_each() -> None:
    corpus = make_corpus(2, documents=40, questions=24, unanswerable=5)
    assert len(corpus.documents) == len(set(corpus.documents)) == 40
    table = stated(corpus)
    many = {relation.name for relation in RELATIONS if relation.many}
    # Nothing is said twice, so nothing is contradicted.
    assert all(len(where) == 1 for (_, name), where in table.items() if name not in many)
    assert len({question.text for question in corpus.questions}) == 29
    answered, refused = corpus.questions[:24], corpus.questions[24:]
    for question in answered:
        where = table[asked(question)]
        assert where == [(question.documents[0], question.answer)]
        assert asked(question)[0] in corpus.documents[question.documents[0]]
    assert len({question.documents for question in answered}) == 24
    assert all(asked(question) not in table for question in refused)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        make_example(0, kind="riddle")
    with pytest.raises(ValueError, match="unknown names"):
        make_example(0, names="mine")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="at least one document"):
        make_example(0, documents=0)
    with pytest.raises(ValueError, match="cannot give"):
        make_corpus(0, documents=2, facts=2, questions=5)


def test_more_names_than_there_are_is_an_error() -> None:
    world = World(random.Random(0), ("Ada", "Bela"))
    assert {world.name(), world.name()} == {"Ada", "Bela"}
    with pytest.raises(ValueError, match="all 2 names are used"):
        world.name()
