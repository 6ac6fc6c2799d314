"""Laws of vLLM with the connector: an answer is that under the block mask, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from conftest import BLOCK, KEY, Case, SmallEngine, apart, random_case, reused
from vllm_kvcache_rag.transfer.params import TransferParams

if TYPE_CHECKING:
    from pathlib import Path

# Log-probabilities in float32.
TOLERANCE = 1e-3


@pytest.mark.parametrize("positions", ["reordered", "composite"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,), (2, 2, 0)], ids=str)
def test_an_answer_is_that_under_the_block_mask(
    engine: SmallEngine, order: tuple[int, ...], positions: Any
) -> None:
    case = random_case()
    engine.keep(case)
    asked = replace(case.in_order(*order), positions=positions)
    for _ in range(2):  # from the store, then from vLLM's pages
        answer = engine.ask(asked)
        assert apart(answer, engine.stitched(asked)) < TOLERANCE
        assert reused(answer) == len(asked.ids) - len(asked.query)
    engine.forget()
    assert apart(engine.ask(asked), engine.stitched(asked)) < TOLERANCE
    if len(order) > 1:
        assert apart(answer, engine.full(asked)) > 100 * TOLERANCE


def test_one_chunk_behind_the_prefix_is_exact_whatever_follows(engine: SmallEngine) -> None:
    """What `BestFew` asks: the best chunk comes from the store, further ones with the question."""
    case = random_case(90)
    engine.keep(case)
    engine.forget()
    best, *others = case.chunks
    for place, other in enumerate(others):  # from the store, then from vLLM's pages
        asked = replace(case, chunks=(best,), query=(*other, *case.query))
        answer = engine.ask(asked)
        assert apart(answer, engine.full(asked)) < TOLERANCE
        assert reused(answer) == len(case.prefix) + len(best)
        found = answer.num_cached_tokens if place else 0
        assert found >= place * (len(case.prefix) + len(best)) // BLOCK * BLOCK


def test_plain_and_stitched_never_meet(engine: SmallEngine) -> None:
    """Before and after each other, and in one batch; also for who sends a salt of its own."""
    case = random_case(2)
    engine.keep(case)
    engine.forget()
    full, stitched = engine.full(case), engine.stitched(case)
    assert apart(engine.plain(case), full) < TOLERANCE
    assert apart(engine.ask(case), stitched) < TOLERANCE
    again = engine.plain(case)
    assert apart(again, full) < TOLERANCE
    assert again.num_cached_tokens == len(case.ids) // BLOCK * BLOCK, "its own pages are found"
    engine.forget()
    mixed = [(case.ids, None, ""), (case.ids, case.params, "")] * 3
    for (_, params, _), answer in zip(mixed, engine.many(mixed), strict=True):
        assert apart(answer, full if params is None else stitched) < TOLERANCE
    engine.forget()
    engine.ask(case)
    assert engine.plain(case).num_cached_tokens == 0


def test_tenants_share_neither_files_nor_pages(engine: SmallEngine) -> None:
    case = random_case(10)
    engine.keep(case, "a")
    before = {*engine.store.rglob("*.safetensors")}
    assert reused(engine.ask(case, "a")) == case.params.context
    other = engine.ask(case, "b")
    assert (reused(other), other.num_cached_tokens) == (0, 0)
    assert apart(other, engine.full(case)) < TOLERANCE
    engine.keep(case, "b")
    both = {*engine.store.rglob("*.safetensors")}
    assert len(both - before) == len(case.chunks) + 1
    found = engine.ask(case, "b")
    assert reused(found) == case.params.context
    assert apart(found, engine.stitched(case)) < TOLERANCE


def test_without_a_grant_nothing_is_read_or_written(engine: SmallEngine) -> None:
    case = random_case(11)
    engine.keep(case)
    engine.forget()
    files = {*engine.store.rglob("*.safetensors")}
    forged = KEY.issue("", case.params.digest(case.ids[1:]))
    for grant in ("nothing", forged):
        answer = engine.many([(case.ids, replace(case.params, grant=grant), "")])[0]
        assert apart(answer, engine.full(case)) < TOLERANCE
        assert not answer.kv_transfer_params
    new = random_case(12)
    wanted = TransferParams(len(new.prefix), (len(new.chunks[0]),), mode="store", grant="nothing")
    engine.many([([*new.prefix, *new.chunks[0]], wanted, "")], max_tokens=1)
    assert {*engine.store.rglob("*.safetensors")} == files


def chunk_files(engine: SmallEngine, case: Case) -> list[Path]:
    """Files of a case that no other test has stored."""
    before = {*engine.store.rglob("*.safetensors")}
    engine.keep(case)
    engine.forget()
    files = {*engine.store.rglob("*.safetensors")} - before
    assert len(files) == len(case.chunks) + 1
    return sorted(files, key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("fault", ["truncated", "header", "key", "value", "gone", "of another"])
def test_damage_is_computed_and_not_kept(engine: SmallEngine, fault: str) -> None:
    seed = 20 + ["truncated", "header", "key", "value", "gone", "of another"].index(fault)
    case = random_case(seed)
    files = chunk_files(engine, case)
    largest, good = files[-1], files[-1].read_bytes()
    bad = bytearray(good)
    if fault == "truncated":
        bad = bad[: len(bad) // 2]
    elif fault == "header":
        bad[good.index(b'"xxh3_128":"') + 15] ^= 1
    elif fault in ("key", "value"):
        # [layers, 2, heads, tokens, width] at the end of the file: the last layer's K or V
        quarter = len(case.chunks[2]) * 2 * 32 * 4
        bad[-quarter - 9 if fault == "key" else -9] ^= 1
    elif fault == "of another":
        bad = bytearray(files[0].read_bytes())
    if fault == "gone":
        largest.unlink()
    else:
        largest.write_bytes(bad)
    answer = engine.ask(case)
    assert apart(answer, engine.full(case)) < TOLERANCE
    assert reused(answer) == 0
    assert answer.outputs[0].finish_reason == "length"
    engine.keep(case)
    answer = engine.ask(case)
    assert apart(answer, engine.stitched(case)) < TOLERANCE
    assert reused(answer) == case.params.context


def test_log_probabilities_of_the_prompt_are_those_of_full_prefill(engine: SmallEngine) -> None:
    case = random_case(30)
    engine.keep(case)
    answer = engine.ask(case, prompt_logprobs=1)
    assert len(answer.prompt_logprobs) == len(case.ids)
    assert apart(answer, engine.full(case)) < TOLERANCE
    assert apart(engine.ask(case), engine.stitched(case)) < TOLERANCE
