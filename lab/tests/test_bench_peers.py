"""The peers' benchmark: its arithmetic, its order of prompts, what it takes up again."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import peers
from benchmarks.peers import SIDES, Rounds, jobs
from benchmarks.peers_prompts import QUERY, fitted, material, order_of
from benchmarks.peers_report import (
    agreement,
    crossover,
    end_to_end,
    percentile95,
    report_of,
    rows_of,
    with_right,
)
from kvcache_rag import BestFew
from kvcache_rag.models.pretrained import load_tokenizer
from kvcache_rag.policies.relevance import Retrieved

if TYPE_CHECKING:
    from pathlib import Path

FACTS: dict[str, Any] = {
    "machine": "a processor, 2 cores",
    "cores": 2,
    "peers": {"llama.cpp": "llama.cpp 1", "kvboost": "kvboost 0.9.0"},
    "models": {"small": {"sha256": "12", "weights": "Q4_1"}},
    "commit": "0123456789ab",
    "prefix": 128,
    "chunk": 256,
    "query": 40,
}
SPENT: dict[str, Any] = {"date": "2026-01-01", "minutes": 2.0, "load": 1.0}
# Seconds to the first token and per further one.
OURS = {"prefix": 0.1, "reorder": 0.1, "cold": 2.1, "full": 2.0}
OURS |= {"few-prefix": 0.5, "few-reorder": 0.5, "few-cold": 2.5}
TIMES = {
    "ours-auto": OURS,
    "llama-BF16": {"prefix": 0.05, "reorder": 4.0, "shift": 3.0, "cold": 4.0},
    "kvboost": {"prefix": 1.0, "cold": 3.0},
}
STEPS = {"ours-auto": 0.02, "llama-BF16": 0.01, "kvboost": 0.1}


def records(sides: tuple[str, ...] = tuple(TIMES)) -> list[dict[str, Any]]:
    found = []
    for job in jobs("small", 1, 1024, Rounds(2, 2), sides):
        record = {"name": job.name, **asdict(job), "wall": 1.0, "load": 1.0}
        first = TIMES[job.side].get(job.kind, 0.0)
        if job.side == "kvboost" and job.kind == "reorder":
            found.append({**record, "error": "ValueError: not here"})
            continue
        # Answers depend on the prompt; a shifted one has another token at its end.
        tokens = [job.order, job.question, 7 if job.kind == "shift" else 5]
        record |= {"ttft": first, "total": 1.0, "step": STEPS[job.side], "tokens": tokens}
        found.append({**record, "reused": 1152, "peak_mib": 500.0, "anon_mib": 400.0})
    return found


def report(sides: tuple[str, ...] = tuple(TIMES)) -> dict[str, Any]:
    facts = {side: {"memory_bytes_per_token": 23040.0} for side in sides}
    flash = {"BF16": {"choice": "on", "on": 1.0, "off": 2.0}}
    made = report_of({**FACTS, **SPENT, "flash": flash}, facts, records(sides))
    copied: dict[str, Any] = json.loads(json.dumps(made))
    return copied


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((0.1, 0.02, 4.0, 0.01), 392),  # 0.1 + 391 * 0.02 = 7.92 and 4 + 391 * 0.01 = 7.91
        ((0.1, 0.02, 0.05, 0.01), 1),
        ((0.1, 0.02, 0.05, 0.03), None),  # ahead at first, but not for good
        ((0.1, 0.02, 0.2, 0.02), None),
        ((0.1, 0.02, 0.1, 0.02), None),
        ((0.2, 0.02, 0.1, 0.02), 1),
        ((0.1, 0.02, 0.1, 0.01), 2),
        ((1.0, 2.0, 2.0, 1.0), 3),  # equal at 2
    ],
)
def test_a_crossover_is_where_the_other_is_done_sooner_for_good(
    lines: tuple[float, float, float, float], expected: int | None
) -> None:
    found = crossover(*lines)
    assert found == expected
    for tokens in range(1, 1000):
        sooner = end_to_end(*lines[2:], tokens) < end_to_end(*lines[:2], tokens)
        if found is not None:
            assert sooner == (tokens >= found)


def test_percentiles_and_agreement() -> None:
    assert percentile95([float(value) for value in range(1, 22)]) == 20.0
    found = agreement([([1, 2, 3], [1, 2, 3]), ([1, 2, 4], [1, 5, 4]), ([9], [8]), ([1], None)])
    assert found is not None
    assert (found.prompts, found.tokens) == (3, 3)
    shares = (found.first_equal, found.all_equal, found.equal_tokens)
    assert shares == pytest.approx((2 / 3, 1 / 3, 4 / 3))


@pytest.mark.parametrize("full", [1, 2, 3])
def test_every_job_has_a_name_of_its_own_and_finds_the_state_that_it_needs(full: int) -> None:
    planned = [*jobs("small", 1, 1024, Rounds(full, 3), SIDES)]
    assert len({job.name for job in planned}) == len(planned)
    assert all(job.question < 24 for job in planned)
    for side in SIDES:
        order = None
        for job in (one for one in planned if one.side == side):
            kept = order_of(4, job.order)
            if job.kind == "prefix" or (job.kind == "shift" and order is not None):
                assert order == 0, "the chunks were asked in their first order just before"
            if job.kind == "reorder" and side.startswith("llama"):
                assert kept[0] != order_of(4, order or 0)[0], "only the instruction is shared"
            order = job.order


def test_orders_are_permutations_of_which_none_begins_like_the_one_before() -> None:
    for chunks in (4, 8, 16):
        orders = [order_of(chunks, number) for number in range(3 * chunks)]
        assert all(sorted(order) == [*range(chunks)] for order in orders)
        assert all(a[0] != b[0] for a, b in itertools.pairwise(orders))
        assert orders == [order_of(chunks, number) for number in range(3 * chunks)]


def test_texts_are_exactly_as_long_as_they_are_wanted() -> None:
    def count(text: str) -> int:  # long words take more tokens
        return sum(1 + len(word) // 5 for word in text.split())

    words = ["Somebody", "described", "it", "in", "extraordinarily", "long", "sentences"] * 9
    for tokens in range(20, 40):
        assert count(fitted(count, words, tokens)) == tokens
    with pytest.raises(ValueError, match="no text of 7 tokens"):
        fitted(lambda text: 2 * len(text.split()), words, 7)


def test_a_run_goes_on_where_it_stopped_but_not_with_another_commit(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = peers.Journal(path, FACTS)
    some = records()[:3]
    first.add({"sides": {"stock": {"memory_bytes_per_token": 1.0}}})
    for record in some:
        first.add({"record": record})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"record": {"name": "cut')
    fewer = {"peers": {"kvboost": "kvboost 0.9.0"}, "models": {"large": {"sha256": "34"}}}
    again = peers.Journal(path, {**FACTS, **fewer})  # of fewer sides, and of another model
    assert (again.records, again.sides) == (some, first.sides)
    assert again.facts["peers"] == FACTS["peers"]
    assert set(again.facts["models"]) == {"small", "large"}
    assert not peers.Journal(path, {**FACTS, "commit": "another"}).records


def test_rows_are_what_the_records_say() -> None:
    rows = {(row.side, row.kind): row for row in rows_of(records())}
    ours, shifted = rows["ours-auto", "reorder"], rows["llama-BF16", "shift"]
    assert (ours.samples, shifted.samples) == (4, 2)
    assert ours.ends["64"] == pytest.approx(0.1 + 63 * 0.02)
    assert ours.agreement is not None
    assert (ours.agreement.prompts, ours.agreement.all_equal) == (2, 1.0)
    assert shifted.agreement is not None
    assert (shifted.agreement.all_equal, shifted.agreement.equal_tokens) == (0.0, 2.0)
    assert rows["llama-BF16", "cold"].agreement is None
    assert ("kvboost", "reorder") not in rows


def test_the_report_says_who_ends_sooner_whoever_it_is() -> None:
    made = report()
    found = {(one["case"], one["peer"], one["kind"]): one for one in made["crossovers"]}
    assert found["new order, Reuse()", "llama-BF16", "shift"]["peer_from"] == 292
    assert found["new order, BestFew()", "llama-BF16", "shift"]["first_ratio"] == 6.0
    assert found["same beginning, Reuse()", "llama-BF16", "prefix"]["peer_from"] == 1
    assert found["nothing known", "kvboost", "cold"]["peer_from"] is None
    assert made["failures"] == {"small kvboost reorder": "ValueError: not here"}


def test_the_table_has_a_line_for_each_way_of_using_a_side() -> None:
    answers = {("small", "ours-auto", "full"): {"right": {"value": 0.5}, "rows": 200}}
    lines = {(one["side"], one["way"]): one for one in with_right(report(), answers)["table"]}
    assert lines["ours-auto", "BestFew()"]["new order s"] == 0.5
    assert lines["ours-auto", "BestFew()"]["cold s"] == 2.5
    assert lines["llama-BF16", "--cache-reuse"]["new order s"] == 3.0
    assert lines["llama-BF16", "--cache-reuse"]["cold s"] is None
    assert lines["llama-BF16", ""]["further token ms"] == pytest.approx(10.0)
    assert lines["kvboost", ""]["new order s"] is None, "it could not"
    # Who computes everything in bfloat16 answers as our full prefill does.
    right = {place: line["of rows"] for place, line in lines.items() if line["of rows"]}
    assert right == {("ours-auto", "full prefill"): 200, ("llama-BF16", ""): 200}


def test_questions_are_about_what_the_chunks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.peers_prompts.Retriever.scores",
        lambda _, rows: [[float(place) for place in range(len(row.chunks))] for row in rows],
    )
    tokenizer = load_tokenizer("tiny", {})
    asked = material(tokenizer, 1024)
    assert len(asked.questions) == len({*asked.questions}) == 24
    assert {len(ids) for ids in asked.queries} == {QUERY}
    prompt = asked.prompt(1024, 2, 0)
    assert prompt["scores"] == [float(asked.texts.index(text)) for text in prompt["texts"]]
    best = [BestFew(1).plan(Retrieved(asked_of, asked.texts)).order for asked_of in asked.questions]
    assert len({*best}) > 2, "questions have their answers in different chunks"


def test_what_the_default_policy_costs_is_told_as_a_mean() -> None:
    found = records(("ours-auto",))
    few = [one for one in found if one["kind"] == "few-reorder"]
    few[0]["ttft"] = 1.7  # one question took more documents
    for one, count in zip(few, (3, 1, 1, 1), strict=True):
        one["read"] = count
    row = next(row for row in rows_of(found) if row.kind == "few-reorder")
    assert (row.first_p50, row.first_mean, row.read) == (0.5, pytest.approx(0.8), 1.5)
    table = report_of({**FACTS, "flash": {}}, {}, found)["table"]
    (line,) = [line for line in table if line["way"] == "BestFew()"]
    assert line["new order s"] == pytest.approx(0.8)
