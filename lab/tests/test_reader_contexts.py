"""Kinds of questions that need the chunk before, repeated facts, and chains without a bridge.

The documents are read here by other rules than they were written by: a pronoun is the last name
before it, an alias what the sentence before says it is.
"""

from __future__ import annotations

import random
import re

import pytest

from kvcache_rag_lab.reader import KINDS, ReaderExample, make_example
from kvcache_rag_lab.reader.contexts import LINKED_KINDS, World, linked_context
from kvcache_rag_lab.reader.generator import draw_linked_example
from kvcache_rag_lab.reader.language import JOBS, RELATIONS
from kvcache_rag_lab.reader.names import is_for_training, names, wide_names
from training.reader.data import KEEPING, LINKED_SIZES, training_batch
from training.reader.scoring import prefix_ids
from training.reader.tokenizer import WordEncoder, build_tokenizer

_NAME = r"(?:[A-Z][a-z]+)(?: [A-Z][a-z]+)?"


def answers(text: str, subject: str, question: str) -> list[str]:
    """Values that sentences of `text` state about `subject` for a relation that `question` asks."""
    found = []
    for relation in RELATIONS:
        if question not in [form.format(s=subject) for form in relation.questions]:
            continue
        for form in relation.statements:
            start, _, stop = form.format(s=subject, v="\0").partition("\0")
            pattern = f"(?:^|[.] ){re.escape(start)}([^.]+?){re.escape(stop)}"
            found += re.findall(pattern, text)
    return found


def resolved(example: ReaderExample) -> str:
    """All documents as one text, with every pronoun and alias replaced by what it stands for."""
    texts: list[str] = []
    for number, text in enumerate(example.documents):
        before = example.documents[number - 1] if number else ""
        last = re.findall(_NAME, before)[-1:] or [""]
        whole = re.sub(r"^(?:She|It) ", f"{last[0]} ", text)
        alias = re.search(rf"([Tt]he (?:{'|'.join(JOBS)})) is ({_NAME})[.]$", before)
        if alias:
            whole = re.sub(rf"[Tt]he {alias[1][4:]}\b(?! is {_NAME}[.]$)", alias[2], whole, count=1)
        texts.append(whole)
    return " ".join(texts)


@pytest.mark.parametrize("kind", ["pronoun", "alias"])
@pytest.mark.parametrize("seed", range(20))
def test_answer_stands_behind_what_the_document_before_explains(kind: str, seed: int) -> None:
    example = make_example(seed, kind=kind)
    text, plain = resolved(example), " ".join(example.documents)
    assert 1 <= len(example.questions) <= 4
    for question in example.questions:
        asked = max(re.findall(_NAME, question.text[1:]), key=len)
        assert answers(text, asked, question.text) == [question.answer], text
        assert not answers(plain, asked, question.text), "it can be read without the link"
        first, second = question.documents
        assert second == first + 1
        assert asked in example.documents[first].rpartition(". ")[2]
        assert question.answer in example.documents[second].partition(". ")[0]


@pytest.mark.parametrize("seed", range(20))
def test_unit_stands_once_and_before_its_number(seed: int) -> None:
    example = make_example(seed, kind="unit")
    (question,) = example.questions
    number, unit = question.answer.split(maxsplit=1)
    first, second = question.documents
    assert example.documents[first].endswith(f"Lengths are in {unit}.")
    assert example.documents[second].startswith("The ")
    assert f" measures {number}." in example.documents[second].split(". ")[0] + "."
    assert " ".join(example.documents).count("Lengths are in") == 1


def test_one_alias_can_stand_for_all() -> None:
    world = World(random.Random(1), names("held_out"))
    context = linked_context(world, "alias", 5, 3, one_alias=True)
    aliases = {re.findall(r"The (\w+) is", text)[-1] for text in context.documents[:-1]}
    assert len(aliases) == 1
    assert len(context.linked) == 4
    assert all(f"the {aliases.copy().pop()}" not in one.text for one in context.plain)


def test_links_can_be_few_and_facts_are_counted() -> None:
    world = World(random.Random(2), names("held_out"))
    context = linked_context(world, "pronoun", 8, 4, share=0.0)
    assert len(context.linked) == 1
    assert {text.count(". ") + 1 for text in context.documents} == {4}
    assert all(one.kind == "single" for one in context.plain)


@pytest.mark.parametrize(("kind", "documents", "facts"), [("nothing", 3, 3), ("alias", 1, 4)])
def test_bad_sizes_and_kinds_are_refused(kind: str, documents: int, facts: int) -> None:
    world = World(random.Random(0), names("held_out"))
    with pytest.raises(ValueError, match=r"unknown kind|need two documents"):
        linked_context(world, kind, documents, facts)


@pytest.mark.parametrize("noise", [20, 40, 60, 80])
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_the_share_of_documents_without_the_answer(noise: int, seed: int) -> None:
    example = make_example(seed, kind=f"noise_{noise}", documents=5)
    for question in example.questions:
        holding = [index for index, text in enumerate(example.documents) if question.answer in text]
        assert list(question.documents) == holding
        assert len(holding) == 5 - noise * 5 // 100


@pytest.mark.parametrize("seed", range(10))
def test_direct_chain_is_answered_without_its_bridge(seed: int) -> None:
    example = make_example(seed, kind="two_hop_direct")
    for question in example.questions:
        assert question.text.startswith("In short: ")
        assert ";" not in question.answer
        assert question.answer in example.documents[question.documents[1]]


def test_training_mixes_linked_contexts_in() -> None:
    encoder = WordEncoder(build_tokenizer())
    batch = training_batch(
        "a", KEEPING, (6, 4), encoder, prefix_ids(encoder), questions=6, block=False, linked=1.0
    )
    again = training_batch(
        "a", KEEPING, (6, 4), encoder, prefix_ids(encoder), questions=6, block=False, linked=1.0
    )
    assert batch.ids.tolist() == again.ids.tolist()
    rng = random.Random(3)
    kinds = {
        question.kind
        for _ in range(60)
        for question in draw_linked_example(
            rng, rng.choice(LINKED_SIZES), 9, names("train")
        ).questions
    }
    assert kinds == {*LINKED_KINDS, "single"}


def test_wide_names_for_training_are_not_those_for_measuring() -> None:
    example = make_example(1, kind="single", names="wide_train")
    assert example != make_example(1, kind="single", names="wide")
    assert all(is_for_training(word) for word in wide_names(training=True)[:50] if " " not in word)


def test_kinds_have_one_name_each() -> None:
    assert len(set(KINDS)) == len(KINDS)
    assert set(LINKED_KINDS) < set(KINDS)
