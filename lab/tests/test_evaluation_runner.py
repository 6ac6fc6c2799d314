"""Every cell answers the same questions; a run goes on where it stopped; times are a sample's."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from kvcache_rag import Combination, DiskStore, Engine, FullRecompute, InvalidInputError, Reuse
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.prefill import Prefiller
from kvcache_rag_lab.evaluation.runner import evaluate, make_cells
from kvcache_rag_lab.evaluation.verification import Verification
from kvcache_rag_lab.reader import examples
from kvcache_rag_lab.scoring.ask import CLOSED_BOOK, divergences, rotated
from kvcache_rag_lab.scoring.question import Question
from kvcache_rag_lab.scoring.statistics import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvcache_rag_lab.scoring.ask import Record, Records

POLICIES = {"full": FullRecompute(), "reuse": Reuse(), "composite": Reuse("composite")}
CELLS = make_cells(POLICIES)


@dataclass(frozen=True)
class Reading:
    """Questions of the packaged reader, scored letter for letter."""

    name: str = "reading"
    metric: str = "right"
    metrics: tuple[str, ...] = ("right", "begun")
    instruction: str = ""
    closed_instruction: str = ""
    max_new_tokens: int = 16
    kind: str = "single"
    documents: int = 3

    def questions(self, n: int | None, seed: int = 0, k: int | None = None) -> list[Question]:
        found = [
            Question(
                f"{number}/{place}",
                one.text,
                example.documents[: k or self.documents],
                (one.answer,),
            )
            for number, example in enumerate(examples(self.kind)[seed:])
            for place, one in enumerate(example.questions)
            if max(one.documents, default=0) < self.documents
        ]
        return found[: n or 8]

    def score(self, answer: str, question: Question) -> dict[str, float]:
        (right,) = question.answers
        return {"right": float(answer == right), "begun": float(answer[:1] == right[:1])}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("tiny", weight_format="plain")  # a test writes its weights


@pytest.fixture
def ask(engine: Engine) -> Callable[..., Records]:
    """`evaluate` with a small task and the packaged reader."""

    def asked(**options: object) -> Records:
        given = {"n": 4, "timed": 0, "models": {"tiny": engine}, **options}
        tasks = given.pop("tasks", (Reading(),))
        return evaluate(tasks, given.pop("cells", CELLS), **given)  # type: ignore[arg-type]  # handed on as they came

    return asked


def untimed(records: Records) -> list[Record]:
    return [replace(row, times=None) for row in records.rows]


def by_cell(records: Records) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for row in records.rows:
        found.setdefault(row.place.policy, []).append(row)
    return found


def test_every_cell_answers_the_same_questions_as_one_by_one(
    engine: Engine, ask: Callable[..., Records]
) -> None:
    task = Reading()
    questions = {one.id: one for one in task.questions(4)}
    records = ask(batch=3, timed=2)
    found = by_cell(records)
    assert list(found) == list(POLICIES)
    for rows in found.values():
        assert [row.place.question for row in rows] == list(questions)
        assert [row.digest for row in rows] == [row.digest for row in found["full"]]
        assert [row.times is not None for row in rows] == [True] * 2 + [False] * 2
        times = rows[0].times
        assert times is not None
        assert times["ttft"] >= times["prefill"] > 0
    for row in records.rows:
        question = questions[row.place.question]
        alone = engine.generate(
            question.question,
            question.chunks,
            policy=POLICIES[row.place.policy],
            max_new_tokens=task.max_new_tokens,
        )
        assert row.answer == alone.text.strip()
        assert row.scores == task.score(row.answer, question)
        is_full = row.place.policy == "full"
        costs = (row.recomputed_tokens, row.reused_tokens)
        assert costs == ((row.chunk_tokens, 0) if is_full else (0, row.chunk_tokens))
    assert (records.baseline, records.metrics) == ("full", {"reading": "right"})
    assert records.policies["composite"] == "Reuse(positions='composite')"


def test_nothing_is_prefilled_while_the_clock_runs(
    ask: Callable[..., Records], monkeypatch: pytest.MonkeyPatch
) -> None:
    misses: dict[str, int] = {}
    whole = Engine.generate

    def noted(engine: Engine, question: str, *chunks: object, **options: object) -> object:
        answer = whole(engine, question, *chunks, **options)  # type: ignore[arg-type]  # handed on as they came
        misses[answer.metrics.policy] = misses.get(answer.metrics.policy, 0) + answer.metrics.misses
        return answer

    monkeypatch.setattr(Engine, "generate", noted)
    policies = {"reuse": Reuse(), "together": Combination()}
    ask(cells=make_cells(policies), tasks=(Reading(documents=2),), seed=3, timed=4)
    ask(cells=make_cells(policies, codecs=("int8",)), seed=4, timed=4)
    assert misses == {repr(policy): 0 for policy in policies.values()}


def test_questions_over_the_same_documents_are_one_cluster(ask: Callable[..., Records]) -> None:
    cells = make_cells({"reuse": Reuse()}, ks=(1, None))
    rows = ask(cells=cells, n=12).rows
    of_question: dict[str, set[str]] = {}
    for row in rows:
        of_question.setdefault(row.place.question, set()).add(row.cluster)
    assert all(len(clusters) == 1 for clusters in of_question.values()), "k does not matter"
    contexts = {question.split("/")[0] for question in of_question}
    assert 1 < len(set().union(*of_question.values())) == len(contexts) < 12
    tokens = {row.place.k: row.chunk_tokens for row in rows}
    assert tokens[1] < tokens[None] / 2


def test_closed_book_is_asked_without_documents(
    engine: Engine, ask: Callable[..., Records]
) -> None:
    cells = make_cells(POLICIES, ks=(1, None), closed_book=True)
    closed = (CLOSED_BOOK, 1), (CLOSED_BOOK, None)
    assert tuple((cell.label, cell.k) for cell in cells if cell.is_closed) == closed
    task = Reading(closed_instruction="Say something.")
    records = ask(cells=cells, tasks=(task,), timed=1, divergence=True)
    assert (records.baseline, records.closed) == ("full", CLOSED_BOOK)
    found = by_cell(records)
    assert len(found[CLOSED_BOOK]) == 8
    template = replace(engine.template, system=task.closed_instruction)
    other = Engine(engine.model, engine.tokenizer, template=template)
    for row, question in zip(found[CLOSED_BOOK], task.questions(4) * 2, strict=True):
        assert (row.chunk_tokens, row.recomputed_tokens) == (0, 0)
        assert row.answer == other.generate(question.question, max_new_tokens=16).text.strip()
        assert row.divergence is not None
        assert row.divergence > 0
    assert found[CLOSED_BOOK][0].times is not None
    assert all(row.divergence is None for row in found["full"])


def test_a_run_that_adds_policies_computes_nothing_again(
    ask: Callable[..., Records], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "first"
    kept.mkdir()
    options = {"divergence": True, "first_tokens": kept, "store": DiskStore(tmp_path / "kv")}
    options |= {"file": tmp_path / "records.jsonl"}
    expected = ask(divergence=True)
    ask(cells=CELLS[:2], **options)
    assert len(list(kept.iterdir())) == 4, "of full prefill alone"
    monkeypatch.setattr(Prefiller, "compute", lambda *_: pytest.fail("a chunk was prefilled"))
    monkeypatch.setattr(Engine, "logits", lambda *_: pytest.fail("a prompt was computed again"))
    for row, other in zip(ask(**options).rows, expected.rows, strict=True):
        assert replace(row, divergence=None) == replace(other, divergence=None)
        known = other.divergence
        assert row.divergence == (None if known is None else pytest.approx(known, abs=1e-6))


def test_a_run_goes_on_where_it_was_cut_short(
    ask: Callable[..., Records], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "records.jsonl"
    expected = ask(batch=2)
    whole = Engine.generate_batch
    batches, stop_at = 0, 5

    def counted(engine: Engine, questions: Sequence[object], **options: object) -> object:
        nonlocal batches
        batches += 1
        if batches == stop_at:
            raise KeyboardInterrupt
        return whole(engine, questions, **options)  # type: ignore[arg-type]  # handed on as they came

    monkeypatch.setattr(Engine, "generate_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        ask(batch=2, file=file)
    half = file.read_bytes()
    assert half.count(b'"task"') == 3 * 2
    file.write_bytes(half + b'{"task":"reading","que')  # killed while it wrote
    for needed in (3, 0):
        batches, stop_at = 0, 99
        assert untimed(ask(batch=2, file=file)) == untimed(expected)
        assert batches == needed
    assert all(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def test_a_finished_file_needs_no_model_and_takes_more_cells(
    ask: Callable[..., Records], tmp_path: Path
) -> None:
    file = tmp_path / "records.jsonl"
    cells = CELLS[:2]
    before = ask(cells=cells, file=file)
    missing = {"tiny": str(tmp_path / "no model is here")}
    assert ask(cells=cells, file=file, models=missing) == before
    after = ask(cells=CELLS, file=file)
    assert untimed(after)[:8] == untimed(before)
    assert len(after.rows) == 12


def test_times_and_divergences_that_a_file_lacks_are_added(
    ask: Callable[..., Records], tmp_path: Path
) -> None:
    file = tmp_path / "records.jsonl"
    before = ask(cells=CELLS[:2], file=file)
    after = ask(cells=CELLS[:2], file=file, timed=2)
    assert [row.times is not None for row in after.rows] == [True, True, False, False] * 2
    assert untimed(after) == untimed(before)
    compared = ask(cells=CELLS[:2], file=file, timed=2, divergence=True)
    assert [row.divergence is not None for row in compared.rows] == [False] * 4 + [True] * 4
    size = file.stat().st_size
    assert ask(cells=CELLS[:2], file=file, timed=2, divergence=True) == compared
    assert file.stat().st_size == size, "what is there was asked again"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "other questions of reading"),
        ({"tasks": (Reading(documents=4),)}, "other questions of reading"),
        (
            {"cells": make_cells({"full": FullRecompute(), "reuse": Reuse("composite")})},
            "policy reuse",
        ),
    ],
)
def test_other_settings_need_another_file(
    ask: Callable[..., Records], tmp_path: Path, change: dict[str, object], says: str
) -> None:
    file = tmp_path / "records.jsonl"
    ask(file=file)
    with pytest.raises(InvalidInputError, match=says):
        ask(file=file, **change)


def test_another_model_of_the_same_name_needs_another_file(
    engine: Engine, ask: Callable[..., Records], tmp_path: Path
) -> None:
    file = tmp_path / "records.jsonl"
    ask(file=file)
    weight = engine.model.model.layers[0].self_attn.q_proj.weight
    kept = weight.data.clone()
    try:
        weight.data[0, 0] += 1
        with pytest.raises(InvalidInputError, match="model tiny"):
            ask(file=file, n=8)
    finally:
        weight.data.copy_(kept)


@pytest.mark.parametrize("content", ["{\n", "[]\n", '{"task": "x"}\n', "1\n", "[" * 99_999 + "\n"])
def test_a_file_of_something_else_is_refused(
    ask: Callable[..., Records], tmp_path: Path, content: str
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidInputError, match="line 1"):
        ask(file=file)
    assert file.read_text() == content


def test_codecs_go_through_files_and_are_compared_with_the_first(
    ask: Callable[..., Records],
) -> None:
    policies = {"full": FullRecompute(), "reuse": Reuse()}
    cells = make_cells(policies, codecs=("native", "int8", "int4"))
    expected = [("full", "native"), *(("reuse", codec) for codec in ("native", "int8", "int4"))]
    assert [(cell.label, cell.codec) for cell in cells] == expected
    records = ask(cells=cells, n=8, divergence=True, batch=4)
    means: dict[str, float] = {}
    for label, codec in expected:
        rows = [row for row in records.rows if row.place[3:5] == (label, codec)]
        found = [row.divergence for row in rows if row.divergence is not None]
        if label == "full":
            assert not found
        else:
            means[codec] = statistics.fmean(found)
            assert all(row.reused_tokens == row.chunk_tokens for row in rows), "from files"
    assert 0 < 5 * means["int8"] < means["int4"] < 0.5


def test_a_question_that_does_not_fit_says_which_task(
    engine: Engine, ask: Callable[..., Records]
) -> None:
    small = Engine(engine.model, engine.tokenizer, template=engine.template, context_window=80)
    with pytest.raises(ContextTooLongError, match="a question of reading does not fit"):
        ask(models={"tiny": small})


@dataclass(frozen=True)
class Empty(Reading):
    def questions(self, n: int | None, seed: int = 0, k: int | None = None) -> list[Question]:
        return []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch"),
        ({"timed": -1}, "timed"),
        ({"tasks": ()}, "needs a task"),
        ({"cells": ()}, "a cell"),
        ({"cells": (*CELLS, CELLS[0])}, "two cells have the same labels"),
        ({"tasks": (Empty(),)}, "reading has no questions"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    ask: Callable[..., Records], options: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        ask(**options)


def test_a_verdict_and_an_evaluation_say_the_same_of_the_same_questions(
    ask: Callable[..., Records], engine: Engine
) -> None:
    """Two ways to ask, batches and one question after the other, share every rule."""
    task = Reading()
    found = by_cell(ask(n=8, divergence=True))
    check = Verification(task.questions(8), task.score, "right", "x", max_new_tokens=16)
    verdict = check.verdict(engine, [POLICIES["reuse"], POLICIES["composite"]])
    scored = dict(zip(POLICIES, (verdict.full, *verdict.policies), strict=True))
    for label, row in scored.items():
        assert row.score == statistics.fmean(one.scores["right"] for one in found[label])
        pairs = zip(found[label], found["full"], strict=True)
        assert (
            row.agreement
            == Share.from_outcomes(one.answer == full.answer for one, full in pairs).value
        )
    for label in ("reuse", "composite"):
        divergences = [one.divergence or 0.0 for one in found[label]]
        # Rounded to bfloat16 on the way, in a batch and alone.
        expected = pytest.approx(statistics.fmean(divergences), rel=0.2, abs=1e-6)
        assert scored[label].first_divergence == expected


def test_everyone_is_first_in_turn() -> None:
    orders = [rotated("abc", turn) for turn in range(6)]
    assert orders[:3] == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")] == orders[3:]


def test_divergences_by_hand() -> None:
    half, sure = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    found = divergences(half.log(), sure.log())
    by_hand = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)]  # what is impossible adds 0
    assert found.tolist() == pytest.approx(by_hand)
    assert divergences(half.log(), half.log()).tolist() == [0, 0]
    broken = torch.full((1, 2), math.nan)
    assert math.isnan(float(divergences(half[:1].log(), broken)))
