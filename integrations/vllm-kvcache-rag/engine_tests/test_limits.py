"""Laws where pages are few, prompts come in parts, or the store is slow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from conftest import SmallEngine, apart, random_case, reused, saved
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.kv.chunk import ChunkKey

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: Any) -> Iterator[SmallEngine]:
    """24 pages of 32 tokens, and 64 tokens of prefill in a step."""
    folder = tmp_path_factory.mktemp("narrow")
    made = SmallEngine(
        saved("llama", folder / "model"), folder / "kv", max_model_len=512,
        num_gpu_blocks_override=25, max_num_batched_tokens=64, disable_log_stats=False,
    )  # fmt: skip
    assert made.law() == ""
    yield made
    made.stop()


def test_a_chunk_that_is_computed_in_parts_is_stored_whole(narrow: SmallEngine) -> None:
    case = random_case(40, (11, 200, 150, 9))
    narrow.keep(case)
    for asked in (case, case.in_order(1, 0)):
        answer = narrow.ask(asked)
        assert apart(answer, narrow.stitched(asked)) < TOLERANCE
        assert reused(answer) == case.params.context


def test_answers_that_outgrow_the_pages_are_as_alone(narrow: SmallEngine) -> None:
    """Three prompts of seven pages and more begin together; each takes six more to its end."""
    cases = [random_case(50 + seed, (11, 100, 90, 9)) for seed in range(3)]
    cases = [replace(case, prefix=cases[0].prefix) for case in cases]
    for case in cases:
        narrow.keep(case)
    alone = []
    for case in cases:
        narrow.forget()
        alone.append(narrow.ask(case, max_tokens=170))
    narrow.forget()
    asked = [(case.ids, case.params, "") for case in cases]
    together = narrow.many(asked, max_tokens=170)
    counts = {one.name: getattr(one, "value", 0) for one in narrow.llm.get_metrics()}
    assert counts["vllm:num_preemptions"] > 0
    for case, one, other in zip(cases, together, alone, strict=True):
        assert apart(one, narrow.stitched(case)) < TOLERANCE
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            best = sorted((found.logprob for found in theirs.values()), reverse=True)
            if best[0] - best[1] < 10 * TOLERANCE:
                break  # a tie: what follows may differ
            assert max(mine, key=lambda token: mine[token].logprob) == max(
                theirs, key=lambda token: theirs[token].logprob
            )


def test_a_load_that_fails_behind_a_preemption(
    narrow: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun over stitched pages is gone on with over computed ones; no page is wrong."""
    cases = [random_case(75 + seed, (11, 100, 90, 9)) for seed in range(3)]
    for case in cases:
        narrow.keep(case)
    narrow.forget()
    get, left = DiskStore.get, [sum(1 + len(case.chunks) for case in cases)]

    def through(store: DiskStore, key: ChunkKey, *given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the share is gone")
        return get(store, key, *given)

    monkeypatch.setattr(DiskStore, "get", through)
    asked = [(case.ids, case.params, "") for case in cases]
    answers = narrow.many(asked, max_tokens=170)
    assert left[0] < 0, "one was loaded again, and failed"
    assert 0 in map(reused, answers)
    for case, answer in zip(cases, answers, strict=True):
        assert apart(answer, narrow.stitched(case)) < TOLERANCE
        assert len(answer.outputs[0].token_ids) == 170
        assert apart(narrow.plain(case), narrow.full(case)) < TOLERANCE


def test_more_prompts_than_pages_are_answered_one_after_the_other(narrow: SmallEngine) -> None:
    cases = [random_case(60 + seed, (11, 300, 9)) for seed in range(5)]
    cases = [replace(case, prefix=cases[0].prefix) for case in cases]
    for case in cases:
        narrow.keep(case)
    narrow.forget()
    asked = [(case.ids, case.params, "") for case in cases]
    for case, answer in zip(cases, narrow.many(asked), strict=True):
        assert apart(answer, narrow.stitched(case)) < TOLERANCE
        assert reused(answer) == case.params.context


def test_a_slow_store_holds_nobody_up(narrow: SmallEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = random_case(70), random_case(71)
    narrow.keep(case)
    narrow.forget()
    contains, get = DiskStore.contains, DiskStore.get
    slow = time.monotonic() + 1.0

    def slowly(store: DiskStore, key: ChunkKey) -> bool:
        time.sleep(max(0.0, slow - time.monotonic()))
        return contains(store, key)

    def got_slowly(store: DiskStore, *arguments: Any) -> Any:
        time.sleep(0.2)
        return get(store, *arguments)

    monkeypatch.setattr(DiskStore, "contains", slowly)
    monkeypatch.setattr(DiskStore, "get", got_slowly)
    asked = [(case.ids, case.params, ""), (other.ids, None, "")]
    stitched, plain = narrow.many(asked)
    assert apart(stitched, narrow.stitched(case)) < TOLERANCE
    assert reused(stitched) == case.params.context
    assert apart(plain, narrow.full(other)) < TOLERANCE
