"""`Metrics.summary()`: two sentences, and the advice is the one that a real answer asks for."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_works import reader
from verdicts import REUSE, make_verdict

from kvcache_rag import (
    Auxiliary,
    BestLast,
    CacheBlend,
    CacheClip,
    DiskStore,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    Metrics,
    StoredChunk,
)
from kvcache_rag.integration import Reference
from kvcache_rag.metrics import _BY_REASON, _RULES, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag import Engine

QUESTION = "Who keeps the lighthouse of Orrin?"
# Long, so that what is done with them is most of the time.
TEXTS = [f"{name} keeps the lighthouse of Orrin. " * 40 for name in ("Marta", "Tomas", "Bralo")]
LONG = "Marta sells the map in the harbour. " * 120
# Clocks decide what is told of an answer, and on a busy machine something else may take longest.
ATTEMPTS = 5


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


@cache
def engine() -> Engine:
    """Its chunks are in memory."""
    made = reader()
    made.add(TEXTS)
    return made


def asked(made: Engine, chunks: Any = TEXTS, question: str = QUESTION, **options: Any) -> Metrics:
    return made.generate(question, chunks, max_new_tokens=2, **options).metrics


# ---------------------------------------------------------------------- misses, by their reasons
def not_prefilled(folder: Path) -> Metrics:
    return asked(reader(store=DiskStore(folder, durable=False)))


def evicted(folder: Path) -> Metrics:
    made = reader(store=DiskStore(folder, durable=False))
    for key in made.add(TEXTS):
        made.store.delete(key)
    return asked(made)


def damaged(folder: Path) -> Metrics:
    store = DiskStore(folder, durable=False)
    made = reader(store=store)
    for key in made.add(TEXTS):
        raw = bytearray(store.path(key).read_bytes())
        raw[-1] ^= 1
        store.path(key).write_bytes(raw)
    return asked(made)


def not_signed(folder: Path) -> Metrics:
    reader(store=DiskStore(folder, durable=False)).add(TEXTS)
    return asked(reader(store=DiskStore(folder, durable=False, signing_key=b"k" * 32)))


def other_model(folder: Path) -> Metrics:
    made = reader(store=DiskStore(folder, durable=False))
    keys = [replace(key, spec="0" * 64) for key in made.keys(TEXTS)]
    return asked(made, [*map(StoredChunk, keys, TEXTS)])


def other_text(folder: Path) -> Metrics:
    made = reader(store=DiskStore(folder, durable=False))
    chunks = []
    for key, text in zip(made.add(TEXTS), TEXTS, strict=True):
        chunks.append(Reference.of(key, text, made).chunk(text.replace("Orrin", "Vell"), made))
    return asked(made, chunks)


MISSES: dict[MissReason, Callable[[Path], Metrics]] = {
    "not prefilled": not_prefilled,
    "evicted": evicted,
    "damaged": damaged,
    "not signed": not_signed,
    "other model": other_model,
    "other text": other_text,
}


@pytest.mark.parametrize("reason", get_args(MissReason))
def test_a_miss_is_advised_by_its_reason(tmp_path: Path, reason: MissReason) -> None:
    for attempt in range(ATTEMPTS):
        metrics = MISSES[reason](tmp_path / str(attempt))
        assert {miss.reason for miss in metrics.missed} == {reason}
        if _BY_REASON[reason].format(m=metrics) in metrics.summary():
            break
    expected = _BY_REASON[reason].format(m=metrics)
    assert expected.startswith(f"{metrics.prefilled_tokens} tokens of chunks were computed")
    assert sentences(metrics.summary())[1] == expected


def test_the_reason_of_most_tokens_is_the_one() -> None:
    missed = (Miss(0, 5, "damaged"), Miss(1, 300, "evicted"), Miss(2, 4, "damaged"))
    metrics = Metrics(ttft=1.0, load=0.9, misses=3, missed=missed, prefilled_tokens=309)
    assert "raise its max_bytes" in metrics.summary()
    little = replace(metrics, load=0.1, prefill=0.9)
    assert "the question itself is what is left" in little.summary(), "it would save too little"


# ---------------------------------------------------------------------- everything else
class Slow(MemoryStore):
    """Memory behind a slow line."""

    seconds = 0.1

    def get(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(self.seconds)
        return super().get(*arguments, **options)


def slow(tier: str, **options: Any) -> Engine:
    made = reader(store=Slow(tier=tier), **options)
    made.add(TEXTS)
    return made


def gated() -> Metrics:
    made = reader()
    return asked(reader(gate=make_verdict(made.identity, {REUSE: 0.5})))


def declined() -> Metrics:
    made: Any = slow("far")
    made.store.seconds = 1.0  # longer than any machine computes a chunk
    for _ in range(12):
        metrics = asked(made)
        if metrics.declined:
            break
    return metrics


def scored_first_by_an_auxiliary() -> Metrics:
    made = reader()
    made.add(TEXTS)
    return asked(made, policy=CacheClip(Auxiliary(reader())))


def waiting() -> Metrics:
    made = engine()
    held = threading.Event()

    def hold() -> None:
        with made._lock:
            held.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    metrics = asked(made)
    other.join()
    return metrics


SCENES: dict[str, tuple[Callable[[], Metrics], str]] = {
    "gate": (gated, "because of the gate (fell back to FullRecompute(): Reuse(positions="),
    "declined": (declined, "is sooner than loading them"),
    "full": (
        lambda: asked(engine(), policy=FullRecompute()),
        "Every answer computes every chunk under FullRecompute(): BestLast() computes the best of",
    ),
    "auxiliary misses": (scored_first_by_an_auxiliary, "had to prefill chunks of its own (3)"),
    "choosing": (
        lambda: asked(engine(), policy=CacheBlend(0.01, check_layer=3)),
        "Choosing tokens is most of it",
    ),
    "recomputing": (lambda: asked(engine(), policy=CacheBlend(0.9)), "lower the ratio of CacheB"),
    "best chunks": (
        lambda: asked(engine(), policy=BestLast()),
        "tokens) is most of it: give smaller ones, lower the share of BestLast(share=0.2",
    ),
    "slow tier": (lambda: asked(slow("far", cost_aware=False)), "keep what is asked often in mem"),
    "copied": (
        lambda: asked(slow("memory", cost_aware=False, rotation="copied")),
        'rotation="auto" attends to them where they lie',
    ),
    "memory": (lambda: asked(slow("memory", cost_aware=False)), "Copying chunks out of memory is"),
    "other instruction": (
        lambda: asked(engine(), TEXTS[:1], f"{LONG}\n{QUESTION}", prefix_mismatch=True),
        "The instruction of the prompt is not the engine's",
    ),
    "dropped": (
        lambda: asked(reader(store=engine().store, context_window=1200), overflow="drop_lowest"),
        "Chunks were left out because the prompt would not fit (",
    ),
    "rounds": (
        lambda: asked(reader(store=engine().store, context_window=1200), overflow="refine"),
        "prompts were needed because the chunks do not fit into one",
    ),
    "waiting": (waiting, "Waiting for the model and tokenising is most of it"),
    "no chunks": (lambda: asked(engine(), (), f"{LONG}\n{QUESTION}"), "the prompt has no chunks"),
    "history": (
        lambda: asked(
            engine(),
            TEXTS[:1],
            history=[{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}],
        ),
        "History and question have",
    ),
    "nothing": (
        lambda: asked(engine(), TEXTS[:1]),
        "No cache would help further: the question itself is what is left.",
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_advice_is_what_the_answer_asks_for(scene: str) -> None:
    answered, advice = SCENES[scene]
    for _ in range(ATTEMPTS):
        summary = answered().summary()
        if advice in summary:
            break
    assert advice in summary
    assert len(sentences(summary)) == 2


def test_a_server_that_gives_no_reasons_is_advised_too() -> None:
    metrics = Metrics(ttft=1.0, load=0.9, misses=2, prefilled_tokens=700, rotation="copied")
    assert "700 tokens of chunks were computed because they were not cached" in metrics.summary()


def test_what_came_from_a_disk_was_not_copied_out_of_memory() -> None:
    parts = {"ttft": 0.038, "load": 0.012, "stitch": 0.008, "prefill": 0.015}
    metrics = Metrics(**parts, hits={"disk": 6}, reused_tokens=3606, query_tokens=15)
    moved = replace(metrics, rotation="copied", not_deferred="few tokens")
    assert "Getting chunks out of their store is most of it: keep what" in moved.summary()
    told = replace(moved, not_deferred='the engine was made with rotation="copied"')
    assert 'rotation="auto" attends to them' in told.summary()
    near = replace(moved, hits={"memory": 6})
    assert "Copying chunks out of memory is most of it" in near.summary()


def test_every_rule_is_reached() -> None:
    """By the scenes above, the reasons of misses and a server's report."""
    assert len(_RULES) == len(SCENES) + len(get_args(MissReason)) + 1
    assert {*MISSES} == {*_BY_REASON} == {*get_args(MissReason)}


# ---------------------------------------------------------------------- the form
def test_the_first_sentence_says_where_the_time_went() -> None:
    metrics = Metrics(
        ttft=1.25,
        load=0.8,
        stitch=0.2,
        prefill=0.2402,
        rotation="copied",
        reused_tokens=1200,
        query_tokens=31,
    )
    assert sentences(metrics.summary())[0] == (
        "The first token came after 1.2 s: loading chunks 800 ms (64%), computing the question "
        "240 ms (19%), moving keys 200 ms (16%); tokens reused: 1200, computed: 31."
    )
    best = replace(metrics, fresh_tokens=90)
    assert "computing the question and the best chunks 240 ms" in best.summary()
    assert sentences(Metrics().summary())[0] == (
        "The first token came and its parts were not timed; tokens reused: 0, computed: 0."
    )
    of_vllm = Metrics(ttft=0.5, misses=2, prefilled_tokens=700, query_tokens=9)
    assert sentences(of_vllm.summary()) == [
        "The first token came after 500 ms and its parts were not timed; tokens reused: 0, "
        "computed: 709.",
        "700 tokens of chunks were computed because they were not cached: prefill them at "
        "ingestion, and let the store keep them.",
    ]


seconds = st.floats(0.0, 1e4, allow_nan=False)
counts = st.integers(0, 10**6)
texts = st.text(max_size=60) | st.just('engine was made with rotation="copied". Is it? {m} {0}')
missed = st.lists(
    st.builds(Miss, st.integers(0, 99), counts, st.sampled_from(get_args(MissReason))), max_size=4
).map(tuple)
metrics_of_any_kind = st.builds(
    Metrics,
    **dict.fromkeys(("ttft", "load", "stitch", "choose", "recompute", "prefill"), seconds),
    **dict.fromkeys(("prefix_tokens", "reused_tokens", "recomputed_tokens"), counts),
    **dict.fromkeys(("prefilled_tokens", "query_tokens", "misses", "dropped_chunks"), counts),
    **dict.fromkeys(("policy", "gate", "rotation", "not_deferred"), texts),
    hits=st.dictionaries(texts, counts, max_size=3),
    declined=st.dictionaries(texts, counts, max_size=2),
    missed=missed,
    rounds=st.integers(1, 3),
    auxiliary_misses=counts,
    prefix_mismatch=st.booleans(),
)


@given(metrics_of_any_kind)
def test_there_are_always_two_sentences(metrics: Metrics) -> None:
    summary = metrics.summary()
    assert len(sentences(summary)) == 2
    assert summary.endswith(".")
    assert "\n" not in summary


# ---------------------------------------------------------------------- out of plain values
@given(metrics_of_any_kind)
def test_metrics_come_back_from_plain_values(metrics: Metrics) -> None:
    plain = json.loads(json.dumps({**metrics.to_dict(), "prompt": "reused"}))
    again = Metrics.from_dict(plain)
    assert again == metrics
    assert again.summary() == metrics.summary()


def test_what_is_left_out_has_its_default() -> None:
    assert Metrics.from_dict({}) == Metrics()
    assert Metrics.from_dict({"ttft": 1.5, "computed_tokens": 3}) == Metrics(ttft=1.5)


@pytest.mark.parametrize("values", [None, 3, ["ttft"], {"missed": [3]}, {"missed": [{"no": 1}]}])
def test_what_are_no_metrics_is_refused(values: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"metrics are read out of what Metrics\.to_dict"):
        Metrics.from_dict(values)
