"""PCED: the rule, worked by hand, and whole answers against plain forward passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import make_model, make_tokenizer

from benchmarks.pced import Experts, Saying, ask, cell_of, relevance
from kvcache_rag import Engine, MemoryStore, PromptTemplate
from kvcache_rag_lab.scoring.ask import RecordFile
from kvcache_rag_lab.scoring.question import Question, Task

ROWS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]], dtype=torch.float64).log()


def test_beta_is_the_divergence_from_the_row_without_documents() -> None:
    same, other = Experts().betas(ROWS).tolist()
    assert same == pytest.approx(0, abs=1e-12)
    middle = [0.4, 0.15, 0.45]
    rows = ([0.1, 0.1, 0.8], [0.7, 0.2, 0.1])
    apart = sum(p * math.log2(p / m) / 2 for row in rows for p, m in zip(row, middle, strict=True))
    assert other == pytest.approx(apart)
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], dtype=torch.float64)
    assert Experts().betas(certain).tolist() == [1.0]


def test_the_surest_row_says_the_token_and_relevance_weighs() -> None:
    betas, alike = torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5])
    # 1.5 ln 0.8 - 0.5 ln 0.1 is more than ln 0.7.
    assert Experts().token(ROWS, betas, alike) == 2
    assert Experts().token(ROWS, betas, torch.tensor([0.9, 0.3])) == 0
    assert Experts(gamma=0).token(ROWS, betas, torch.tensor([0.9, 0.3])) == 2
    assert Experts().token(ROWS, betas, torch.tensor([0.5, -0.2])) == 0, "a cosine may be negative"


def test_what_a_row_hardly_believes_it_does_not_say() -> None:
    rows = torch.tensor([[0.6, 0.37, 0.03], [0.9, 0.0999, 0.0001]], dtype=torch.float64).log()
    betas, one = torch.tensor([1.0]), torch.tensor([1.0])
    assert Experts(floor=0.051).token(rows, betas, one) == 1
    assert Experts(floor=0.049).token(rows, betas, one) == 2


def test_all_rows_say_the_same_and_beta_stays_that_of_the_first_token() -> None:
    saying = Saying(Experts(gamma=0), torch.tensor([1.0, 1.0]))
    first = saying(torch.zeros(3, 5), ROWS.float())
    assert first.argmax(-1).tolist() == [2, 2, 2]
    # With the beta of these rows, 0, the first row would be surest: ln 0.5 > ln 0.49.
    later = torch.tensor([[0.5, 0.4, 0.1], [0.02, 0.49, 0.49], [0.02, 0.1, 0.88]]).log()
    assert saying(torch.zeros(3, 6), later).argmax(-1).tolist() == [1, 1, 1]
    again = saying(torch.zeros(3, 5), ROWS.float())
    assert again.equal(first), "a prompt that is read once more begins anew"


TEXTS = ("the cat sat on a mat", "a dog ran home late", "birds fly south")
TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="<d>", chunk_end="</d>")


def engine() -> Engine:
    return Engine(make_model(), make_tokenizer(), template=TEMPLATE, context_window=400)


def asked(number: int) -> Question:
    scores = (0.6, 0.5, 0.1)
    return Question(f"q{number}", f"Who ran {number}?", TEXTS, ("dog",), scores=scores)


def task() -> Task:
    questions = [asked(number) for number in range(2)]
    return Task("own", ("containment",), "", 6, lambda *_: questions, lambda *_: (1.0,))


def read_alone(engine: Engine, question: Question, count: int) -> list[int]:
    """The rule over plain forward passes of whole prompts, without any cache."""
    prompts = [
        engine.tokenize(question.question, chunks).all
        for chunks in (*((chunk,) for chunk in question.chunks), ())
    ]
    said: list[int] = []
    betas = torch.empty(0)
    for _ in range(count):
        with torch.no_grad():
            logits = [engine.model(torch.tensor([[*ids, *said]])).logits[0, -1] for ids in prompts]
        rows = torch.stack(logits).double().log_softmax(-1)
        if not said:
            betas = Experts().betas(rows)
        said.append(Experts().token(rows, betas, relevance(question)))
    return said


def test_answers_are_those_of_plain_passes_and_are_not_asked_again(tmp_path: Any) -> None:
    opened: list[Engine] = []

    def opening() -> Engine:
        opened.append(engine())
        return opened[-1]

    file = tmp_path / "records.jsonl"
    ask([task()], "own", opening, file=file, store=MemoryStore())
    records = RecordFile(file)
    for question in task().questions():
        record = records._records[cell_of("own").place("own", question.id)]
        ids = read_alone(opened[0], question, record.generated_tokens)
        assert record.answer == opened[0].tokenizer.decode(ids, skip_special_tokens=True).strip()
        assert record.recomputed_tokens == 0
        lengths = map(len, opened[0].tokenize("?", TEXTS).chunks)
        assert record.reused_tokens == record.chunk_tokens == sum(lengths)
    ask([task()], "own", opening, file=file, store=MemoryStore())
    assert len(opened) == 1


def test_documents_without_scores_weigh_alike() -> None:
    assert relevance(replace(asked(0), scores=())).tolist() == [1.0, 1.0, 1.0]
