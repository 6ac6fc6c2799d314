"""The same question again and again: one answer, wherever its chunks come from."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from conftest import BLOCK, CONFIGS, Case, SmallEngine, random_case, reused, saved, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTH = 16


def exact(seed: int) -> Case:
    """A chunk behind the prefix, which is exact, and a question of some length."""
    case = random_case(seed)
    best, *others = case.chunks
    return replace(case, chunks=(best,), query=(*others[0], *case.query))


CASES = [exact(seed) for seed in range(120, 124)]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("again") / "model")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """Answers of vLLM without the connector."""
    made = SmallEngine(model, None)
    found = [tokens(made.plain(case, max_tokens=LENGTH)) for case in CASES]
    made.stop()
    assert len({tuple(answer) for answer in found}) == len(CASES)
    return found


@pytest.fixture(scope="module")
def made(model: Path, alone: list[list[int]]) -> Iterator[SmallEngine]:
    made = SmallEngine(model, model.parent / "kv")
    assert made.law() == ""
    yield made
    made.stop()


def test_four_times_the_answer_of_vllm_alone(made: SmallEngine, alone: list[list[int]]) -> None:
    between = random_case(130)
    made.keep(between)
    for case, expected in zip(CASES, alone, strict=True):
        made.forget()
        cold = made.ask(case, max_tokens=LENGTH)
        assert (tokens(cold), reused(cold)) == (expected, 0)
        made.keep(case)
        made.forget()  # of vLLM's pages: it comes from the store
        found = made.ask(case, max_tokens=LENGTH)
        again = made.ask(case, max_tokens=LENGTH)
        other = made.ask(between, max_tokens=LENGTH)
        made.ask(between.in_order(2, 0, 1), max_tokens=LENGTH)
        behind = made.ask(case, max_tokens=LENGTH)
        for answer in (found, again, behind):
            assert (tokens(answer), reused(answer)) == (expected, case.params.context)
        assert tokens(other) != expected


def test_all_at_once_as_one_after_the_other(made: SmallEngine, alone: list[list[int]]) -> None:
    for case in CASES:
        made.keep(case)
    made.forget()
    asked = [(case.ids, case.params, "") for case in CASES]
    for _ in range(2):
        for answer, expected in zip(made.many(asked, max_tokens=LENGTH), alone, strict=True):
            assert tokens(answer) == expected


def test_stitched_chunks_give_one_answer_from_wherever_they_come(made: SmallEngine) -> None:
    case = random_case(131)
    made.keep(case)
    made.forget()
    answers = [made.ask(case, max_tokens=LENGTH)]
    answers.append(made.ask(case, max_tokens=LENGTH))
    made.ask(case.in_order(1, 0), max_tokens=LENGTH)
    made.plain(case, max_tokens=LENGTH)
    answers.append(made.ask(case, max_tokens=LENGTH))
    made.forget()
    answers.append(made.ask(case, max_tokens=LENGTH))
    assert [reused(answer) for answer in answers] == [case.params.context] * 4
    assert len({tuple(tokens(answer)) for answer in answers}) == 1


def test_the_log_says_of_each_request_what_was_reused(
    made: SmallEngine, caplog: pytest.LogCaptureFixture
) -> None:
    case = exact(140)
    made.forget()
    caplog.set_level(logging.INFO, "vllm.kvcache_rag")
    made.keep(case)
    storing = len(caplog.records)
    made.forget()
    answers = [made.ask(case), made.ask(case), made.plain(case)]
    lines = [one.getMessage() for one in caplog.records]
    assert storing >= 2, "a request that stored, and the one that found it"
    assert len(lines) == storing + 3, "one line of each"
    whole, context = len(case.ids), case.params.context
    pages = (whole - 1) // BLOCK * BLOCK
    assert [line.partition(": ")[2].partition(": ")[2] for line in lines[storing:]] == [
        f"{whole} prompt tokens, {context} from chunks, 0 from vLLM's prefix cache, "
        f"{whole - context} computed; 0 of 2 pieces missed",
        f"{whole} prompt tokens, {context} from chunks, {pages - context} from vLLM's prefix "
        f"cache, {whole - pages} computed; 0 of 2 pieces missed",
        f"{whole} prompt tokens, 0 from chunks, 0 from vLLM's prefix cache, {whole} computed; "
        "0 of 0 pieces missed",
    ]
    for line, answer in zip(lines[storing:], answers, strict=True):
        assert answer.request_id in line
        computed = int(line.partition(" computed")[0].rpartition(" ")[2])
        assert computed == whole - answer.num_cached_tokens
