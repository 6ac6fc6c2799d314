"""Load or prefill: the sooner one by measured rates, the same answer either way.

No test measures time: the clock is one that stores and the model move on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import build, byte_tokenizer

from kvcache_rag import (
    ChunkNotFoundError,
    Combination,
    Engine,
    MemoryStore,
    PromptTemplate,
    StoredChunk,
    TieredStore,
)
from kvcache_rag.stitching.costs import (
    FEWEST_LOADS,
    LOADS,
    PREFILLS,
    RETRY,
    Costs,
    Retry,
    Timings,
    saving,
)
from kvcache_rag.stitching.loader import ContextLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.stores import Hit

TEMPLATE = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
QUESTION = "Who?"
TEXTS = ["The cat sat on the mat.", "A dog ran away from home, it is said.", "It rained for days."]
MIB = 1 << 20


# ---------------------------------------------------------------------- what was measured
def timings(samples: Sequence[tuple[int, float]], last: int = 9, fewest: int = 1) -> Timings:
    made = Timings(last, fewest)
    for size, seconds in samples:
        made.note(size, seconds)
    return made


def test_nothing_is_said_of_too_few_times() -> None:
    few = timings([(10, 1.0), (20, 2.0)], fewest=3)
    assert (few.rate(), few.line(), few.seconds(10)) == (None, None, None)
    few.note(30, 3.0)
    assert few.rate() == pytest.approx(0.1)
    assert few.seconds(50) == pytest.approx(5.0)
    few.forget_oldest()
    assert few.seconds(50) is None
    few.forget()
    few.forget_oldest()
    assert (few.rates, few.slowest) == ([], 0.0)


def test_only_the_last_times_count() -> None:
    moved = timings([(1, 9.0)] * 5 + [(1, 1.0)] * 3, last=3)
    assert (moved.rate(), moved.seconds(4), moved.slowest) == (1.0, 4.0, 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-3, 9.0)), min_size=3, max_size=9),
    st.integers(0, 8),
)
def test_one_time_that_was_held_up_decides_nothing(
    samples: list[tuple[int, float]], which: int
) -> None:
    size, seconds = samples[which % len(samples)]
    samples[which % len(samples)] = (size, seconds + 1e6)
    rates = sorted(timings(samples).rates)
    rate = timings(samples).rate()
    assert rate is not None
    assert rates[0] <= rate <= rates[-2]


@given(st.integers(1, 1000), st.lists(st.floats(0.0, 9.0), min_size=1, max_size=9))
def test_times_of_one_size_tell_its_rate_and_no_latency(size: int, times: list[float]) -> None:
    same = timings([(size, seconds) for seconds in times])
    assert same.line() == (0.0, same.rate())


def test_one_chance_of_many_is_taken_each_by_itself() -> None:
    retry = Retry(3)
    assert [retry.is_due("a") for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [retry.is_due("b") for _ in range(3)] == [False, False, True]


def test_what_is_noise_is_not_saved() -> None:
    assert saving(10.0, 7.0, share=0.2) == pytest.approx(1.0)
    assert saving(10.0, 9.0, share=0.2) == pytest.approx(-1.0)
    assert saving(0.1, 0.0, share=0.2, least=0.5) == pytest.approx(-0.4)
    assert saving(float("inf"), 1.0, share=0.2) == float("inf")
    assert saving(1.0, float("inf"), share=0.2) == -float("inf")


# ---------------------------------------------------------------------- rates
def known(loads: Sequence[tuple[int, float]], prefill: float = 0.0) -> Costs:
    """Loads of the tier "far", and what 100 tokens take to prefill."""
    costs = Costs()
    for nbytes, seconds in loads:
        costs.loaded("far", nbytes, seconds)
    if prefill:
        for _ in range(PREFILLS):
            costs.prefilled([100], prefill)
    return costs


def test_until_both_sides_are_known_a_chunk_is_loaded() -> None:
    assert Costs().verdict("far", MIB, 100) == ""
    assert known([(MIB, 9.0)] * LOADS).verdict("far", MIB, 100) == "", "prefill unknown"
    few = known([(MIB, 9.0)] * (FEWEST_LOADS - 1), prefill=0.1)
    assert few.verdict("far", MIB, 100) == "", "too few loads"
    assert not few.is_slow(MIB, 100)
    few.loaded("far", MIB, 9.0)
    assert few.is_slow(MIB, 100)
    assert few.verdict("far", MIB, 100) == "far: load 9 s > prefill 0.1 s"
    assert few.verdict("near", MIB, 100) == "", "another tier"


@pytest.mark.parametrize(
    ("load", "prefill", "declines"),
    [(2.0, 0.4, True), (0.4, 2.0, False), (1.0, 0.9, False), (0.02, 0.001, False)],
    ids=["slower", "faster", "about the same", "both negligible"],
)
def test_the_sooner_one_unless_it_saves_nothing(
    load: float, prefill: float, declines: bool
) -> None:
    costs = known([(MIB, load)] * FEWEST_LOADS, prefill)
    assert costs.is_slow(MIB, 100) == declines
    assert bool(costs.verdict("far", MIB, 100)) == declines


def test_one_load_that_was_held_up_decides_nothing() -> None:
    costs = known([(MIB, 0.01), (MIB, 30.0), (MIB, 0.01)], prefill=0.1)
    assert costs.verdict("far", MIB, 100) == ""


def test_switched_off_nothing_is_slow() -> None:
    costs = Costs(enabled=False)
    for _ in range(LOADS):
        costs.loaded("far", MIB, 9.0)
        costs.prefilled([100], 0.1)
    assert not costs.is_slow(MIB, 100)


@given(
    latency=st.floats(0.0, 2.0),
    second_per_mib=st.floats(1e-3, 1.0),
    powers=st.lists(st.integers(0, 12), min_size=FEWEST_LOADS, max_size=LOADS, unique=True),
    asked=st.integers(1, 100),
)
def test_latency_and_bandwidth_are_told_apart(
    latency: float, second_per_mib: float, powers: list[int], asked: int
) -> None:
    costs = known([(2**power * MIB, latency + 2**power * second_per_mib) for power in powers])
    found = costs.load_seconds("far", asked * MIB)
    assert found == pytest.approx(latency + asked * second_per_mib, rel=1e-3, abs=1e-3)


def test_a_longer_chunk_is_judged_by_its_own_length_once_that_is_measured() -> None:
    costs = known([], prefill=1.0)
    assert costs.prefill_seconds(100) == pytest.approx(1.0)
    assert costs.prefill_seconds(1000) == pytest.approx(10.0)
    for _ in range(PREFILLS):
        costs.prefilled([1000], 40.0)
    assert costs.prefill_seconds(1000) == pytest.approx(40.0)
    assert costs.prefill_seconds(100) == pytest.approx(1.0)


def test_a_batch_is_shared_out_by_tokens() -> None:
    costs = Costs()
    for _ in range(PREFILLS):
        costs.prefilled([100, 300], 4.0)
    assert costs.prefill_seconds(100) == pytest.approx(1.0)
    assert costs.prefill_seconds(300) == pytest.approx(3.0)


def test_prefills_that_were_held_up_are_forgotten_in_time() -> None:
    costs = known([(MIB, 2.0)] * LOADS, prefill=30.0)  # others used the machine
    costs.passed(50, 0.5)
    assert costs.verdict("far", MIB, 100) == ""
    for _ in range(RETRY):
        costs.loaded("far", MIB, 2.0)
    assert costs.verdict("far", MIB, 100) == "far: load 2 s > prefill 1 s"
    costs.prefilled([100], 30.0)  # no, it is the model that is slow
    assert costs.verdict("far", MIB, 100) == ""


def test_what_questions_take_bounds_an_unmeasured_prefill() -> None:
    costs = known([(MIB, 9.0)] * FEWEST_LOADS)
    costs.passed(20, 1.0)
    costs.passed(0, 1.0)
    assert costs.prefill_seconds(100) == pytest.approx(5.0)
    assert costs.verdict("far", MIB, 100) == "far: load 9 s > prefill 5 s"
    for _ in range(PREFILLS):
        costs.prefilled([100], 20.0)
    assert costs.verdict("far", MIB, 100) == "", "measured, it is slower than it seemed"


def test_a_trial_takes_no_longer_than_the_load_and_is_not_repeated() -> None:
    costs = known([(MIB, 2.0)] * FEWEST_LOADS)
    assert costs.trial(MIB, 1000) == 0, "no pass is known that would bound it"
    costs.passed(10, 1.0)
    assert costs.trial(MIB, 1000) == 20
    costs.passed(20, 1.0)  # a pass takes its time, however short
    assert costs.trial(MIB, 1000) == 40
    costs.passed(40, 2.0)  # now it grows with the length: longer ones are no better
    assert costs.trial(MIB, 1000) == 0
    assert known([(MIB, 0.01)] * LOADS).trial(MIB, 1000) == 0, "nothing is slow"
    measured = known([(MIB, 2.0)] * LOADS, prefill=9.0)
    assert measured.trial(MIB, 100) == 0, "this length was measured"


def test_one_of_many_is_loaded_to_see_whether_the_tier_is_still_slow() -> None:
    costs = known([(MIB, 9.0)] * LOADS, prefill=0.1)
    verdicts = [bool(costs.verdict("far", MIB, 100)) for _ in range(3 * RETRY)]
    assert verdicts == ([True] * (RETRY - 1) + [False]) * 3
    costs.loaded("far", MIB, 8.0)  # still slow
    assert costs.verdict("far", MIB, 100) != ""
    while costs.verdict("far", MIB, 100):
        pass
    costs.loaded("far", MIB, 0.01)  # recovered: one look is enough
    assert not costs.is_slow(MIB, 100)


# ---------------------------------------------------------------------- the engine
@dataclass
class Machine:
    """A clock that loads and prefills move on by what they are said to take."""

    load: float = 0.0
    per_token: float = 0.01
    per_pass: float = 0.0
    now: float = 0.0
    asked: list[ChunkKey] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


class FarStore(MemoryStore):
    """Memory that takes its time."""

    def __init__(self, machine: Machine, tier: str = "far") -> None:
        super().__init__(tier=tier)
        self.machine, self.is_broken = machine, False

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        self.machine.now += self.machine.load
        if self.is_broken:
            raise ChunkNotFoundError("the line is dead")
        return super().get(key, layout, out)

    def locate(self, key: ChunkKey) -> str | None:
        self.machine.asked.append(key)
        return super().locate(key)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def make(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def passed(loader: ContextLoader, tokens: int, _seconds: float) -> None:
        loader.costs.passed(tokens, machine.per_pass + tokens * machine.per_token)

    monkeypatch.setattr(ContextLoader, "passed", passed)

    def made(name: str = "qwen2", **options: Any) -> Engine:
        options = {"store": FarStore(machine), "template": TEMPLATE, **options}
        engine = Engine(build(name), byte_tokenizer(), **options)
        access.costs(engine).clock = machine.clock
        prefill = access.adapter(engine).prefill

        def slow(prefix: ChunkKV | None, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
            machine.now += machine.per_pass + machine.per_token * sum(map(len, chunks))
            return prefill(prefix, chunks)

        monkeypatch.setattr(access.adapter(engine), "prefill", slow)
        return engine

    return made


def ask(engine: Engine, chunks: Sequence[Any] = TEXTS, **options: Any) -> Any:
    return engine.generate(QUESTION, chunks, max_new_tokens=5, **options)


def sizes(engine: Engine, texts: Sequence[str] = TEXTS) -> list[int]:
    return [len(chunk) for chunk in engine.tokenize(QUESTION, texts).chunks]


def test_short_questions_do_not_hide_that_a_prefill_is_sooner(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine = make()
    machine.load, machine.per_token, machine.per_pass = 6.0, 0.001, 1.0
    long = [text * 8 for text in TEXTS]
    engine.add(long)
    loaded = ask(engine, long)
    query = loaded.metrics.query_tokens
    assert sizes(engine, long)[0] * (1.0 + 0.001 * query) / query > 6.0
    began = machine.now
    declined = ask(engine, long)
    assert sum(declined.metrics.declined.values()) == 3
    assert declined.token_ids == loaded.token_ids
    assert machine.now - began < 2 * 6.0, "a trial and the prefills"


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "deepseek_v3"])
def test_law_a_declined_load_gives_the_same_answer(
    name: str, make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(name), 30.0
    engine.add(TEXTS)
    loaded = ask(engine)
    reference: Tensor = engine.logits(QUESTION, TEXTS)
    assert loaded.metrics.declined == {}
    declined = ask(engine)
    assert sum(declined.metrics.declined.values()) == 3
    assert declined.token_ids == loaded.token_ids
    torch.testing.assert_close(engine.logits(QUESTION, TEXTS), reference, atol=1e-4, rtol=1e-4)


def test_a_slow_tier_is_declined_with_the_reason_and_never_written_again(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 30.0
    engine.add(TEXTS)
    ask(engine)
    puts = engine.store.stats().puts
    gets = sum(engine.store.stats().hits.values())
    metrics = ask(engine).metrics
    # The times in the reasons are those of each chunk.
    assert set(metrics.declined) == {
        reason for reason in metrics.declined if reason.startswith("far: load ")
    }
    assert all(" s > prefill 0." in reason for reason in metrics.declined)
    assert sum(metrics.declined.values()) == 3
    assert (metrics.hits, metrics.misses) == ({}, 0)
    assert (metrics.reused_tokens, metrics.prefilled_tokens) == (0, sum(sizes(engine)))
    assert metrics.to_dict()["declined"] == metrics.declined
    assert engine.store.stats().puts == puts
    assert sum(engine.store.stats().hits.values()) == gets


def test_a_fast_tier_is_loaded_and_never_asked_where_a_chunk_lies(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 0.001
    engine.add(TEXTS)
    for _ in range(LOADS):
        metrics = ask(engine).metrics
        assert (metrics.hits, metrics.declined) == ({"far": 3}, {})
    assert machine.asked == []


def test_switched_off_everything_is_loaded(make: Callable[..., Engine], machine: Machine) -> None:
    engine, machine.load = make(cost_aware=False), 30.0
    engine.add(TEXTS)
    for _ in range(LOADS):
        metrics = ask(engine).metrics
        assert (metrics.hits, metrics.declined) == ({"far": 3}, {})


def test_decisions_follow_the_tier_and_the_model(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 30.0
    engine.add(TEXTS)
    ask(engine)
    assert ask(engine).metrics.hits == {}
    machine.load = 0.001  # the tier recovers
    for _ in range(RETRY):
        ask(engine)
    assert ask(engine).metrics.hits == {"far": 3}
    machine.load = 30.0  # and is slow again
    for _ in range(LOADS):
        ask(engine)
    assert sum(ask(engine).metrics.declined.values()) == 3
    machine.per_token = 10.0  # the model gets slower than the tier
    for _ in range(2 * PREFILLS):
        ask(engine)
    assert ask(engine).metrics.hits == {"far": 3}


def test_only_the_slow_tier_of_several_is_declined(
    make: Callable[..., Engine], machine: Machine
) -> None:
    near, far = MemoryStore(tier="near"), FarStore(machine)
    engine, machine.load = make(store=TieredStore(near, far)), 30.0
    keys = engine.add(TEXTS)
    for key in keys:
        near.delete(key)
    assert ask(engine).metrics.hits == {"far": 3}
    near.delete(keys[0])
    metrics = ask(engine).metrics
    assert metrics.hits == {"near": 2}
    assert sum(metrics.declined.values()) == 1
    assert metrics.reused_tokens == sum(sizes(engine)[1:])


def test_a_declined_chunk_reaches_the_faster_tiers_as_a_loaded_one_does(
    make: Callable[..., Engine], machine: Machine
) -> None:
    near, far = MemoryStore(tier="near"), FarStore(machine)
    engine, machine.load = make(store=TieredStore(near, far)), 30.0
    keys = engine.add(TEXTS)
    answers = []
    for _ in range(2):
        for key in keys:
            near.delete(key)
        answers.append(ask(engine))
    written = far.stats().puts
    answers.append(ask(engine))
    declined, again = (answer.metrics for answer in answers[1:])
    assert (declined.hits, sum(declined.declined.values())) == ({}, 3)
    assert (again.hits, again.declined) == ({"near": 3}, {})
    assert far.stats().puts == written
    assert len({answer.token_ids for answer in answers}) == 1


def test_a_reference_is_declined_only_if_its_text_is_the_chunk(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 30.0
    keys = engine.add(TEXTS)
    ask(engine)
    expected = ask(engine)
    bare = ask(engine, keys)
    assert (bare.metrics.hits, bare.metrics.declined) == ({"far": 3}, {})
    stored = ask(engine, [StoredChunk(*one) for one in zip(keys, TEXTS, strict=True)])
    assert sum(stored.metrics.declined.values()) == 3
    wrong = ask(engine, [StoredChunk(key, "Something else.") for key in keys])
    assert wrong.metrics.hits == {"far": 3}
    for answer in (bare, stored, wrong):
        assert answer.token_ids == expected.token_ids


def test_a_chunk_that_stands_twice_is_prefilled_once(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 30.0
    engine.add(TEXTS)
    loaded = ask(engine, [*TEXTS, TEXTS[0]])
    declined = ask(engine, [*TEXTS, TEXTS[0]])
    assert declined.token_ids == loaded.token_ids
    assert declined.metrics.prefilled_tokens == sum(sizes(engine))
    assert declined.metrics.reused_tokens == sizes(engine)[0]


def test_a_tier_that_holds_and_fails_slowly_is_declined(
    make: Callable[..., Engine], machine: Machine
) -> None:
    store = FarStore(machine)
    engine, machine.load = make(store=store), 30.0
    engine.add(TEXTS)
    expected = ask(engine)
    store.is_broken = True
    machine.now = 0.0
    answer = ask(engine)
    assert sum(answer.metrics.declined.values()) == 3
    assert machine.now < 30.0
    assert answer.token_ids == expected.token_ids


def test_a_missing_chunk_is_stored_whatever_its_tier_costs(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 30.0
    engine.add(TEXTS)
    ask(engine)
    metrics = ask(engine, ["A new one.", *TEXTS]).metrics
    assert metrics.misses == 1
    assert sum(metrics.declined.values()) == 3
    assert engine.store.contains(engine.keys(["A new one."])[0])


def test_combinations_are_weighed_too(make: Callable[..., Engine], machine: Machine) -> None:
    far = FarStore(machine, tier="combinations")
    engine = make(store=MemoryStore(), combinations=far, policy=Combination())
    machine.load = 30.0
    answers = [ask(engine) for _ in range(FEWEST_LOADS + 1)]
    assert answers[-1].metrics.hits == {"combinations": 1}
    declined = ask(engine)
    assert declined.metrics.prefilled_tokens == sum(sizes(engine))
    (reason,) = declined.metrics.declined
    assert reason.startswith("combinations: load 30 s > prefill ")
    assert declined.token_ids == answers[0].token_ids


def test_batches_and_rounds_count_what_was_declined(
    make: Callable[..., Engine], machine: Machine
) -> None:
    engine, machine.load = make(), 30.0
    engine.add(TEXTS)
    ask(engine)
    batch = engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], max_new_tokens=5)
    assert [sum(one.metrics.declined.values()) for one in batch] == [3, 1]
    long = [text * 8 for text in TEXTS]
    window = len(engine.tokenize(QUESTION, long[1:2]).all) + 150
    small = make(store=engine.store, context_window=window)
    small.add(long)
    for _ in range(2):
        metrics = ask(small, long, overflow="refine").metrics
        assert metrics.rounds > 1
    assert sum(metrics.declined.values()) == 3
