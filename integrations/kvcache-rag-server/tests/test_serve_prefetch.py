"""Prefetch while queued: what waiting questions need is made ahead, and every key once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from serve_works import (
    PATIENCE,
    QUESTION,
    TEXTS,
    Prefills,
    answer_of,
    events_of,
    eventually,
    held,
    make_work,
    reader,
    serve_threads,
)
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
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.models.language import Abilities
from kvcache_rag_server.backend import Finished, Started
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.prefetch import Engines, Prefetcher, twin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from kvcache_rag import Answer
    from kvcache_rag_server.backend import Event
    from kvcache_rag_server.prefetch import Prefetch


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Prefills:
    return Prefills(monkeypatch)


@pytest.fixture
def make(prefills: Prefills) -> Iterator[Callable[..., Prefetcher]]:
    made: list[Prefetcher] = []

    def prefetcher(engine: Engine | None = None, **options: Any) -> Prefetcher:
        made.append(Prefetcher(engine or reader(), **options))
        return made[-1]

    yield prefetcher
    prefills.go.set()
    for one in made:
        one.close()
    assert not serve_threads()


@pytest.fixture
def prefetcher(make: Callable[..., Prefetcher]) -> Prefetcher:
    return make(ahead=2)


def want(prefetcher: Prefetcher, texts: Sequence[str] = TEXTS, **options: Any) -> Prefetch:
    wanted = prefetcher.want(texts, **options)
    assert wanted is not None
    return wanted


def is_made(wanted: Prefetch) -> bool:
    """Whether it was made, once that is known."""
    return wanted.done.result(PATIENCE)


# ---------------------------------------------------------------------------- the prefetcher alone
def test_missing_chunks_are_computed_once(prefetcher: Prefetcher, prefills: Prefills) -> None:
    first, second = want(prefetcher), want(prefetcher, (*TEXTS, TEXTS[0]))
    assert is_made(first)
    assert is_made(second)
    assert prefills.by_chunk == [1, 1, 1, 0]
    assert prefetcher.turn(first)
    assert not prefetcher.turn(second), "everything was there already"
    stats = prefetcher.stats()
    assert (stats["started"], stats["finished"], stats["computed"]) == (1, 1, 3)
    assert prefetcher.want(()) is None


def test_an_auxiliary_models_chunks_are_computed_ahead_too(make: Callable[..., Prefetcher]) -> None:
    base = reader()
    scorer = Auxiliary(Engine(base.model, base.tokenizer))
    scored = Engine(base.model, base.tokenizer, auxiliary=scorer)
    policy = CacheClip(ratio=0.5, threshold=None)
    made = make(scored, ahead=2)
    for has_chunks in (False, True):  # the answering model's own
        first = want(made, policy=policy)
        assert is_made(first)
        made.turn(first)
        metrics = scored.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
        assert (metrics.misses, metrics.auxiliary_misses) == (0, 0), has_chunks
        scorer.engine.delete_namespace()
    assert is_made(want(made))
    keys = scorer.engine.keys(TEXTS)
    assert not any(map(scorer.engine.store.contains, keys)), "whom nobody asks"


def test_a_combination_is_computed_as_one(prefetcher: Prefetcher, prefills: Prefills) -> None:
    assert is_made(want(prefetcher, policy=Combination()))
    assert prefills.by_chunk == [0, 0, 0, 1]
    assert is_made(want(prefetcher, TEXTS[:1], policy=Combination()))
    assert prefills.by_chunk == [1, 0, 0, 1], "a combination of one chunk is that chunk"


def test_nothing_is_computed_for_a_full_prefill_or_what_the_gate_lets_nobody_reuse(
    make: Callable[..., Prefetcher], prefills: Prefills
) -> None:
    verdict = make_verdict(reader().identity, {REUSE: 0.5})
    for prefetcher, policy in (
        (make(), FullRecompute()),
        (make(twin(reader(gate=verdict), "cpu")), None),
    ):
        wanted = want(prefetcher, policy=policy)
        assert is_made(wanted)
        assert not prefetcher.turn(wanted)
        assert not prefills.counts


def test_nothing_is_computed_for_what_will_be_refused(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    window = reader().context_window
    texts = [f"{number} lamp " + "the lamp " * (window // 8) for number in range(20)]
    assert sum(key.tokens for key in reader().keys(texts)) > window
    wanted = want(prefetcher, texts)
    assert not is_made(wanted)
    assert not prefills.counts
    assert not prefetcher.turn(wanted)


def test_what_lies_in_a_slower_tier_is_brought_nearer(
    tmp_path: Path, make: Callable[..., Prefetcher], prefills: Prefills
) -> None:
    keys = reader(store=DiskStore(tmp_path)).add(TEXTS)
    store = TieredStore(MemoryStore(), DiskStore(tmp_path))
    prefetcher = make(reader(store=store))
    wanted = want(prefetcher)
    assert is_made(wanted)
    assert [store.locate(key) for key in keys] == ["memory"] * 3
    assert prefills.by_chunk[:3] == [1, 1, 1]
    stats = prefetcher.stats()
    assert (stats["loaded"], stats["computed"]) == (3, 0)
    assert prefetcher.turn(wanted)


def test_the_oldest_comes_first_and_who_left_is_skipped(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    prefills.go.clear()
    want(prefetcher, TEXTS[:1])
    assert prefills.busy.wait(PATIENCE)
    left, kept = want(prefetcher, TEXTS[1:2]), want(prefetcher, TEXTS[2:])
    assert prefetcher.stats()["waiting"] == 2
    prefetcher.drop(left)
    assert not is_made(left)
    assert prefetcher.stats()["waiting"] == 1
    prefills.go.set()
    assert is_made(kept)
    assert prefills.by_chunk == [1, 0, 1, 0]


def test_it_stops_between_chunks_when_nobody_wants_the_rest(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    prefills.go.clear()
    wanted = want(prefetcher)
    assert prefills.busy.wait(PATIENCE)
    prefetcher.drop(wanted)
    prefills.go.set()
    assert not is_made(wanted)
    assert prefills.by_chunk == [1, 0, 0, 0]
    stats = prefetcher.stats()
    assert (stats["cancelled"], stats["useless"]) == (1, 0)


def test_it_does_not_run_too_far_ahead(prefetcher: Prefetcher, prefills: Prefills) -> None:
    first, second, third = (want(prefetcher, [text]) for text in TEXTS)
    assert is_made(first)
    assert is_made(second)
    assert not third.done.done()
    assert prefetcher.stats()["waiting"] == 1, "two are ready and have not had their turn"
    assert prefetcher.turn(first)
    assert is_made(third)
    assert prefills.by_chunk == [1, 1, 1, 0]


def test_tenants_take_turns(make: Callable[..., Prefetcher], prefills: Prefills) -> None:
    prefetcher = make(ahead=4)
    prefills.go.clear()
    many = [want(prefetcher, [f"{n} {TEXTS[0]}"], namespace="many") for n in range(4)]
    assert prefills.busy.wait(PATIENCE)
    few = [want(prefetcher, [f"{n} {TEXTS[1]}"], namespace="few") for n in range(3)]
    prefills.go.set()
    done, left = [*many[:2], *few[:2]], [*many[2:], *few[2:]]
    assert all(map(is_made, done)), "two of each: they share what may be ready"
    assert not any(one.done.done() for one in left)
    for one in done:
        prefetcher.turn(one)
    assert all(map(is_made, left))


def test_what_would_not_be_ready_in_time_is_left_to_the_answer(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    first = want(prefetcher, TEXTS[:1], turn_in=lambda: 0.0)
    assert is_made(first), "nothing is known yet"
    soon = want(prefetcher, TEXTS[1:2], turn_in=lambda: 0.0)
    late = want(prefetcher, TEXTS[2:], turn_in=lambda: 3600.0)
    assert not is_made(soon)
    assert is_made(late)
    assert prefills.by_chunk == [1, 0, 1, 0]


def test_a_full_queue_refuses(make: Callable[..., Prefetcher], prefills: Prefills) -> None:
    prefetcher = make(limit=1)
    prefills.go.clear()
    want(prefetcher, TEXTS[:1])
    assert prefills.busy.wait(PATIENCE)
    want(prefetcher, TEXTS[1:2])
    assert prefetcher.want(TEXTS[2:]) is None
    assert prefetcher.stats()["refused"] == 1
    prefills.go.set()
    prefetcher.close()
    assert prefetcher.want(TEXTS) is None


def test_a_failure_ends_neither_the_thread_nor_a_question(
    prefetcher: Prefetcher, prefills: Prefills, caplog: pytest.LogCaptureFixture
) -> None:
    prefills.fails = True
    assert not is_made(want(prefetcher))
    assert "no memory left" in caplog.text
    prefills.fails = False
    empty, good = want(prefetcher, ("",)), want(prefetcher)
    assert not is_made(empty)
    assert is_made(good)
    assert prefetcher.stats()["failed"] == 2


def test_it_waits_until_a_question_has_waited_long_enough(
    prefetcher: Prefetcher, prefills: Prefills
) -> None:
    later, now = want(prefetcher, TEXTS[:1], after=3600), want(prefetcher, TEXTS[1:2])
    assert is_made(now)
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


def test_a_model_that_cannot_be_copied_has_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = property(lambda _: Abilities(cannot_copy="a model in stone cannot be copied"))
    monkeypatch.setattr(TransformersModel, "abilities", alone)
    with pytest.raises(InvalidInputError, match="in stone cannot be copied to prefetch beside"):
        twin(reader(), "cpu")


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


# ---------------------------------------------------------------------- behind the backend
@pytest.fixture
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(reader(), prefetch=getattr(request, "param", "cpu"), prefetch_after=0.0)
    yield made
    await made.close()
    assert not serve_threads()


def ask(backend: LocalBackend, number: int, **fields: Any) -> asyncio.Task[list[Event]]:
    return asyncio.create_task(events_of(backend, make_work(number, **fields)))


async def is_finished(backend: LocalBackend) -> None:
    await eventually(lambda: backend._prefetcher.stats()["finished"] == 1)


async def ends(task: asyncio.Task[list[Event]]) -> tuple[Started, Answer]:
    begun, last = await task
    assert isinstance(begun, Started)
    assert isinstance(last, Finished)
    return begun, last.answer


@pytest.mark.parametrize("policy", [None, "cacheblend:0.3", "combination", "bestfew:2"])
@pytest.mark.parametrize("backend", ["cpu", "same"], indirect=True)
async def test_who_waits_finds_its_chunks_ready(
    backend: LocalBackend,
    policy: str | None,
    prefills: Prefills,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    expected = reader().generate(QUESTION, TEXTS, max_new_tokens=8)
    prefills.counts.clear()
    is_apart = request.node.callspec.params["backend"] == "cpu"
    # The question in front comes with the valve closed, so the other one waits for long.
    valve, front = await held(backend, monkeypatch)
    behind = ask(backend, 1, policy=policy)
    if is_apart:
        await is_finished(backend)
    else:
        await eventually(lambda: access.scheduler(backend).stats()["waiting"] == 1)
    valve.open.set()
    await front
    begun, answer = await ends(behind)
    assert begun.queue_wait > 0
    if is_apart:
        assert begun.prefetched
        assert answer.metrics.misses == 0
    if policy is None:
        assert answer.text == expected.text
    assert max(prefills.counts.values()) == 1
    # All of a combination together; of the best two one, as the other comes with the question.
    assert sum(prefills.by_chunk) == (1 if policy in ("combination", "bestfew:2") else 3)
    if policy == "bestfew:2":
        assert prefills.by_chunk == [1, 0, 0, 0]
        assert answer.metrics.answered_from == (0, 1)


@pytest.mark.parametrize(
    "system", [(), ("Tomas Brandt, maps, harbour of Vell, sells: say who sells maps in Vell.",)]
)
async def test_what_is_not_answered_from_is_not_prefetched(
    backend: LocalBackend,
    system: tuple[str, ...],
    prefills: Prefills,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chunk is chosen by what is asked: a foreign instruction stands before it, and is not."""
    valve, front = await held(backend, monkeypatch)
    long = "The harbour is deep. " * backend._engines.base.context_window
    behind = ask(backend, 1, policy="bestfew:1", system=system, chunks=(*TEXTS, long))
    await is_finished(backend)
    valve.open.set()
    await front
    begun, answer = await ends(behind)
    assert begun.prefetched
    assert (answer.metrics.answered_from, answer.metrics.misses) == ((0,), 0)
    assert prefills.by_chunk == [1, 0, 0, 0]
    assert sum(prefills.counts.values()) == 1


async def test_a_turn_that_comes_midway_waits_for_the_chunk_and_computes_the_rest(
    backend: LocalBackend, prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve, front = await held(backend, monkeypatch)
    prefills.go.clear()
    behind = ask(backend, 1)
    await eventually(prefills.busy.is_set)  # the second engine holds the first chunk
    valve.open.set()
    await front
    await eventually(lambda: access.scheduler(backend).stats()["running"] == 1)
    assert not behind.done()
    prefills.go.set()
    begun, _ = await ends(behind)
    assert not begun.prefetched
    assert prefills.by_chunk == [1, 1, 1, 0], "nothing twice"
    await eventually(lambda: backend._prefetcher.stats()["cancelled"] == 1)


async def test_a_client_that_goes_away_takes_its_prefetch_along(
    backend: LocalBackend, prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    valve, front = await held(backend, monkeypatch)
    prefills.go.clear()
    leaving, staying = ask(backend, 1, chunks=TEXTS[:2]), ask(backend, 2, chunks=TEXTS[1:])
    await eventually(prefills.busy.is_set)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    prefills.go.set()
    await is_finished(backend)
    valve.open.set()
    await front
    begun, _ = await ends(staying)
    assert begun.prefetched, "what another one wants too is made for that one"
    assert prefills.by_chunk == [1, 1, 1, 0]
    assert backend._prefetcher.stats()["cancelled"] == 1


async def test_two_backends_on_one_directory_compute_every_key_once(
    tmp_path: Path, prefills: Prefills
) -> None:
    backends = [
        LocalBackend(
            reader(store=DiskStore(tmp_path), combinations=DiskStore(tmp_path / "joint")),
            prefetch="cpu",
            prefetch_after=0.0,
        )
        for _ in range(2)
    ]
    texts = [f"{text} It is number {number}." for number in range(6) for text in TEXTS]
    works = [
        make_work(
            number,
            chunks=tuple(texts[number % 7 : number % 7 + 4]),
            policy=(None, "combination")[number % 2],
            max_new_tokens=2,
        )
        for number in range(28)
    ]
    try:
        answers = [answer_of(backends[index % 2], work) for index, work in enumerate(works)]
        await asyncio.gather(*answers)
    finally:
        for backend in backends:
            await backend.close()
    assert len(prefills.counts) == 10 + 7, "ten chunks and seven combinations were asked for"
    assert set(prefills.counts.values()) == {1}


def test_engines_that_nobody_uses_are_gone_at_once() -> None:
    """Weights must not wait for a collection."""

    class Light:
        def __init__(self, namespace: str = "") -> None:
            self.namespace = namespace

        def in_namespace(self, namespace: str) -> Light:
            return Light(namespace)

    base: Any = Light()
    engines, left = Engines(base), weakref.ref(base)
    assert engines.for_namespace("") is base
    assert engines.for_namespace("a") is engines.for_namespace("a") is not base
    gc.disable()
    try:
        del base, engines
        assert left() is None
    finally:
        gc.enable()
