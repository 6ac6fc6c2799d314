"""Prefetch while queued: what waiting questions need is made ahead, and every key once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import access
import pytest
import torch
from serve_works import PATIENCE, QUESTION, TEXTS, Prefills, reader, serve_threads
from verdicts import REUSE, make_verdict

from kvcache_rag import (
    CacheClip,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    TieredStore,
)
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.prefetch import Prefetcher, twin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Prefills:
    return Prefills(monkeypatch)


@pytest.fixture
def prefetcher(prefills: Prefills) -> Iterator[Prefetcher]:
    made = Prefetcher(reader(), ahead=2)
    yield made
    prefills.go.set()
    made.close()
    assert not serve_threads()


def result(done: Future[bool]) -> bool:
    return done.result(PATIENCE)


# ---------------------------------------------------------------------------- the prefetcher alone
def test_missing_chunks_are_computed_once(prefetcher: Prefetcher, prefills: Prefills) -> None:
    first, second = prefetcher.want(TEXTS), prefetcher.want((*TEXTS, TEXTS[0]))
    assert first is not None
    assert second is not None
    assert result(first.done)
    assert result(second.done)
    assert prefills.by_chunk == [1, 1, 1, 0]
    assert prefetcher.turn(first)
    assert not prefetcher.turn(second), "everything was there already"
    stats = prefetcher.stats()
    assert (stats["started"], stats["finished"], stats["computed"]) == (1, 1, 3)
    assert prefetcher.want(()) is None


def test_an_auxiliary_models_chunks_are_computed_ahead_too() -> None:
    base = reader()
    scorer = Auxiliary(Engine(base.model, base.tokenizer))
    scored = Engine(base.model, base.tokenizer, auxiliary=scorer)
    policy = CacheClip(ratio=0.5, threshold=None)
    made = Prefetcher(scored, ahead=2)
    try:
        for held in (False, True):  # the answering model's own
            first = made.want(TEXTS, policy=policy)
            assert first is not None
            assert result(first.done)
            made.turn(first)
            metrics = scored.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
            assert (metrics.misses, metrics.auxiliary_misses) == (0, 0), held
            scorer.engine.delete_namespace()
        reused = made.want(TEXTS)
        assert reused is not None
        assert result(reused.done)
        keys = scorer.engine.keys(TEXTS)
        assert not any(map(scorer.engine.store.contains, keys)), "whom nobody asks"
    finally:
        made.close()


def test_a_combination_is_computed_as_one(prefetcher: Prefetcher, prefills: Prefills) -> None:
    wanted = prefetcher.want(TEXTS, policy=Combination())
    assert wanted is not None
    assert result(wanted.done)
    assert prefills.by_chunk == [0, 0, 0, 1]
    single = prefetcher.want(TEXTS[:1], policy=Combination())
    assert single is not None
    assert result(single.done)
    assert prefills.by_chunk == [1, 0, 0, 1], "a combination of one chunk is that chunk"


def test_a_full_prefill_needs_nothing(prefetcher: Prefetcher, prefills: Prefills) -> None:
    wanted = prefetcher.want(TEXTS, policy=FullRecompute())
    assert wanted is not None
    assert result(wanted.done)
    assert not prefetcher.turn(wanted)
    assert not prefills.counts


def test_what_the_gate_lets_nobody_reuse_is_not_computed(prefills: Prefills) -> None:
    verdict = make_verdict(reader().identity, {REUSE: 0.5})
    prefetcher = Prefetcher(twin(reader(gate=verdict), "cpu"))
    wanted = prefetcher.want(TEXTS)
    assert wanted is not None
    assert result(wanted.done)
    assert not prefills.counts
    prefetcher.close()


def test_nothing_is_computed_for_what_will_be_refused(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    window = reader().context_window
    texts = [f"{number} lamp " + "the lamp " * (window // 8) for number in range(20)]
    assert sum(key.tokens for key in reader().keys(texts)) > window
    wanted = prefetcher.want(texts)
    assert wanted is not None
    assert not result(wanted.done)
    assert not prefills.counts
    assert not prefetcher.turn(wanted)


def test_what_lies_in_a_slower_tier_is_brought_nearer(tmp_path: Path, prefills: Prefills) -> None:
    keys = reader(store=DiskStore(tmp_path)).add(TEXTS)
    store = TieredStore(MemoryStore(), DiskStore(tmp_path))
    prefetcher = Prefetcher(reader(store=store))
    wanted = prefetcher.want(TEXTS)
    assert wanted is not None
    assert result(wanted.done)
    assert [store.locate(key) for key in keys] == ["memory"] * 3
    assert prefills.by_chunk[:3] == [1, 1, 1]
    assert prefetcher.stats()["loaded"] == 3
    assert prefetcher.stats()["computed"] == 0
    assert prefetcher.turn(wanted)
    prefetcher.close()


def test_the_oldest_comes_first_and_who_left_is_skipped(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    prefills.go.clear()
    running = prefetcher.want(TEXTS[:1])
    assert prefills.busy.wait(PATIENCE)
    left, kept = prefetcher.want(TEXTS[1:2]), prefetcher.want(TEXTS[2:])
    assert running is not None
    assert left is not None
    assert kept is not None
    assert prefetcher.stats()["waiting"] == 2
    prefetcher.drop(left)
    assert not result(left.done)
    assert prefetcher.stats()["waiting"] == 1
    prefills.go.set()
    assert result(kept.done)
    assert prefills.by_chunk == [1, 0, 1, 0]


def test_it_stops_between_chunks_when_nobody_wants_the_rest(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    prefills.go.clear()
    wanted = prefetcher.want(TEXTS)
    assert wanted is not None
    assert prefills.busy.wait(PATIENCE)
    prefetcher.drop(wanted)
    prefills.go.set()
    assert not result(wanted.done)
    assert prefills.by_chunk == [1, 0, 0, 0]
    assert prefetcher.stats()["cancelled"] == 1
    assert prefetcher.stats()["useless"] == 0


def test_what_was_made_for_nobody_is_counted(prefetcher: Prefetcher) -> None:
    wanted = prefetcher.want(TEXTS)
    assert wanted is not None
    assert result(wanted.done)
    prefetcher.drop(wanted)
    stats = prefetcher.stats()
    assert (stats["finished"], stats["useless"]) == (1, 1)


def test_it_does_not_run_too_far_ahead(prefetcher: Prefetcher, prefills: Prefills) -> None:
    wanted = [prefetcher.want(TEXTS[index : index + 1]) for index in range(3)]
    first, second, third = (one for one in wanted if one is not None)
    assert result(first.done)
    assert result(second.done)
    assert not third.done.done()
    assert prefetcher.stats()["waiting"] == 1, "two are ready and have not had their turn"
    assert prefetcher.turn(first)
    assert result(third.done)
    assert prefills.by_chunk == [1, 1, 1, 0]


def test_tenants_take_turns(prefills: Prefills) -> None:
    prefetcher = Prefetcher(reader(), ahead=4)
    prefills.go.clear()
    many = [prefetcher.want([f"{n} {TEXTS[0]}"], namespace="many") for n in range(4)]
    assert prefills.busy.wait(PATIENCE)
    few = [prefetcher.want([f"{n} {TEXTS[1]}"], namespace="few") for n in range(3)]
    prefills.go.set()
    done = [one for one in (*many[:2], *few[:2]) if one is not None]
    assert all(result(one.done) for one in done), "two of each: they share what may be ready"
    left = [one for one in (*many[2:], *few[2:]) if one is not None]
    assert not any(one.done.done() for one in left)
    for one in done:
        prefetcher.turn(one)
    assert all(result(one.done) for one in left)
    prefetcher.close()


def test_what_would_not_be_ready_in_time_is_left_to_the_answer(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    first = prefetcher.want(TEXTS[:1], turn_in=lambda: 0.0)
    assert first is not None
    assert result(first.done), "nothing is known yet"
    soon = prefetcher.want(TEXTS[1:2], turn_in=lambda: 0.0)
    late = prefetcher.want(TEXTS[2:], turn_in=lambda: 3600.0)
    assert soon is not None
    assert late is not None
    assert not result(soon.done)
    assert result(late.done)
    assert prefills.by_chunk == [1, 0, 1, 0]


def test_a_full_queue_refuses(prefills: Prefills) -> None:
    prefetcher = Prefetcher(reader(), limit=1)
    prefills.go.clear()
    prefetcher.want(TEXTS[:1])
    assert prefills.busy.wait(PATIENCE)
    assert prefetcher.want(TEXTS[1:2]) is not None
    assert prefetcher.want(TEXTS[2:]) is None
    assert prefetcher.stats()["refused"] == 1
    prefills.go.set()
    prefetcher.close()
    assert prefetcher.want(TEXTS) is None


def test_a_failure_ends_neither_the_thread_nor_a_question(
    prefetcher: Prefetcher, prefills: Prefills, caplog: pytest.LogCaptureFixture
) -> None:
    prefills.fails = True
    broken = prefetcher.want(TEXTS)
    assert broken is not None
    assert not result(broken.done)
    assert "no memory left" in caplog.text
    prefills.fails = False
    empty, good = prefetcher.want(("",)), prefetcher.want(TEXTS)
    assert empty is not None
    assert good is not None
    assert not result(empty.done)
    assert result(good.done)
    assert prefetcher.stats()["failed"] == 2


def test_it_waits_until_a_question_has_waited_long_enough(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    later = prefetcher.want(TEXTS[:1], after=3600)
    now = prefetcher.want(TEXTS[1:2])
    assert later is not None
    assert now is not None
    assert result(now.done)
    assert not later.done.done()
    assert prefills.by_chunk == [0, 1, 0, 0]


# ------------------------------------------------------------------------------- a second engine
def test_a_twin_shares_weights_on_the_same_device_and_makes_the_same_keys() -> None:
    engine = reader()
    second = twin(engine, "cpu")
    assert second.model is not engine.model
    weights = dict(engine.model.named_parameters())
    for name, weight in second.model.named_parameters():
        assert weight.data_ptr() == weights[name].data_ptr(), name
    assert second.keys(TEXTS) == engine.keys(TEXTS)
    assert access.lock(second) is not access.lock(engine), "they compute at a time"
    second.add(TEXTS)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=8)
    assert answer.metrics.misses == 0
    assert answer.text == reader().generate(QUESTION, TEXTS, max_new_tokens=8).text


def test_a_second_engine_of_other_keys_is_refused() -> None:
    engine = reader()
    dtype = torch.float16 if engine.model.dtype == torch.bfloat16 else torch.bfloat16
    other = Engine.from_pretrained(
        "tiny", device="cpu", dtype=dtype, store=engine.store, template=engine.template
    )
    for second in (other, reader(store=engine.store, namespace="else")):
        with pytest.raises(InvalidInputError, match="other keys"):
            LocalBackend(engine, prefetch=second)


@pytest.mark.parametrize("device", ["nowhere", "cuda:97", "meta"])
def test_a_device_that_cannot_be_used_is_refused_in_one_sentence(device: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        LocalBackend(reader(), prefetch=device)
    assert device in str(error.value)
    assert "\n" not in str(error.value)
