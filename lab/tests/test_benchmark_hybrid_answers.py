"""Facts of the benchmark of answers: what the texts say, what is learned, what ways compute."""

from __future__ import annotations

import random

import torch

from benchmarks.hybrid_answers import (
    DOCUMENTS,
    KINDS,
    Lessons,
    build,
    build_tokenizer,
    draw,
    questions,
    sides,
)


def said(texts: list[str]) -> dict[str, list[tuple[str, int]]]:
    """What a reader of the texts is told of each entity, and where, in order."""
    found: dict[str, list[tuple[str, int]]] = {}
    mentioned = ""
    for document, text in enumerate(texts):
        words = text.split()
        for place, word in enumerate(words):
            if word == ".":
                subject, value = words[place - 2 : place]
                entity = mentioned if subject == "it" else subject
                found.setdefault(entity, []).append((value, document))
        mentioned = words[-1] if words[-2] == "see" else ""
    return found


def test_facts_are_what_the_texts_say() -> None:
    rng = random.Random(3)
    seen = set()
    for _ in range(60):
        texts, facts = draw(rng, DOCUMENTS)
        told = said(texts)
        assert {fact.entity: (fact.value, fact.document) for fact in facts} == {
            entity: values[-1] for entity, values in told.items()
        }
        for fact in facts:
            seen.add(fact.kind)
            assert (len(told[fact.entity]) > 1) == (fact.kind == "updated")
            is_called_it = f"see {fact.entity}" in " ".join(texts)
            assert is_called_it or fact.kind != "across"
    assert seen == {*KINDS, ""}


def test_what_is_learned_is_the_answer_behind_each_question() -> None:
    tokenizer = build_tokenizer()
    ids, labels = Lessons(tokenizer).batch(2)
    known = labels != -100
    assert known.any(1).all()
    assert torch.equal(labels[known], ids.roll(-1, 1)[known])
    # An answer stands behind what ends a question.
    asked = tokenizer.convert_ids_to_tokens(ids.roll(1, 1)[known].tolist())
    assert all(word.startswith("e") for word in asked)


def test_ways_compute_their_share() -> None:
    tokenizer = build_tokenizer()
    model = build("short convolution (lfm2)", len(tokenizer)).eval()
    asked = next(questions(1))
    shares = {name: ask(asked)[1] for name, ask in sides(model, tokenizer).items()}
    assert shares["FullRecompute()"] == shares["FullRecompute(), best document last"] == 1
    assert shares["Reuse()"] == shares["closed book"] == 0
    assert 0 < shares["LegoLink(5)"] < shares["LegoLink(16)"] < 1
    assert 0 < shares["BestLast(), retriever right"] < 0.6
