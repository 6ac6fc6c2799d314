"""The engine: honest metrics, nothing computed twice, and the answers transformers would give."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import access
import pytest
import torch
from transformers import GenerationConfig
from zoo import build, byte_tokenizer

from kvcache_rag import (
    Answer,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    Message,
    PromptTemplate,
    Reuse,
    TieredStore,
)
from kvcache_rag.errors import ChunkNotFoundError, FingerprintMismatchError
from kvcache_rag.generation import StoredChunk

TEMPLATE = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
QUESTION = "Who?"
TEXTS = ["The cat sat on the mat.", "A dog ran away from home.", "It rained for three days."]


def make_engine(seed: int = 0, **options: Any) -> Engine:
    options = {"template": TEMPLATE, **options}
    return Engine(build("qwen2", seed=seed), byte_tokenizer(), **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def lengths(engine: Engine, texts: list[str]) -> list[int]:
    return [len(chunk) for chunk in engine.tokenize(QUESTION, texts).chunks]


def plain(engine: Engine, ids: tuple[int, ...], **options: Any) -> list[int]:
    output = engine.model.generate(torch.tensor([ids]), **options)
    new: list[int] = output[0, len(ids) :].tolist()
    return new


# ---------------------------------------------------------------------- metrics and partial hits
def test_metrics_add_up_over_hits_and_misses() -> None:
    engine = make_engine()
    sizes = lengths(engine, TEXTS)
    engine.add(TEXTS[:1])
    first = engine.generate(QUESTION, TEXTS, max_new_tokens=3).metrics
    assert (first.reused_tokens, first.prefilled_tokens) == (sizes[0], sizes[1] + sizes[2])
    assert (first.hits, first.misses) == ({"memory": 1}, 2)
    second = engine.generate(QUESTION, TEXTS, max_new_tokens=3).metrics
    assert (second.reused_tokens, second.prefilled_tokens) == (sum(sizes), 0)
    assert (second.hits, second.misses) == ({"memory": 3}, 0), "a miss never stays a miss"
    full = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=3).metrics
    assert (full.reused_tokens, full.prefilled_tokens) == (0, sum(sizes))
    ids = engine.tokenize(QUESTION, TEXTS)
    for metrics in (first, second, full):
        assert metrics.ttft >= metrics.load + metrics.stitch + metrics.recompute + metrics.prefill
        assert metrics.total >= metrics.ttft > 0
        assert (metrics.prefix_tokens, metrics.query_tokens) == (len(ids.prefix), len(ids.query))
        assert metrics.generated_tokens == 3
        assert metrics.rounds == 1
        assert metrics.prompt_tokens == len(ids.all)
    assert (second.policy, full.policy) == ("Reuse(positions='reordered')", "FullRecompute()")


def test_hits_are_counted_per_tier() -> None:
    back = MemoryStore(tier="back")
    make_engine(store=back).add(TEXTS)
    engine = make_engine(store=TieredStore(MemoryStore(tier="front"), back))
    assert engine.generate(QUESTION, TEXTS[:2], max_new_tokens=1).metrics.hits == {"back": 2}
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.hits == {
        "front": 2,
        "back": 1,
    }


# ---------------------------------------------------------------------- by reference
def test_a_stored_chunk_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    keys = engine.add(TEXTS)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    rows = [engine.reference(key.digest, key.spec, key.tokens) for key in keys]
    assert rows == keys
    calls: list[str] = []
    encoder = access.renderer(engine).encoder
    encode = encoder.encode

    def counted(text: str) -> list[int]:
        calls.append(text)
        return encode(text)

    monkeypatch.setattr(encoder, "encode", counted)
    stored = [StoredChunk(key, text) for key, text in zip(rows, TEXTS, strict=True)]
    ways: list[list[Any]] = [[*stored], [*keys], [keys[0], TEXTS[1], stored[2]]]
    for given in ways:
        calls.clear()
        access.renderer(engine).forget()
        answer = engine.generate(QUESTION, given, max_new_tokens=4)
        assert answer.token_ids == expected.token_ids
        assert answer.metrics.reused_tokens == expected.metrics.reused_tokens
        read = [text for text in TEXTS if any(text in call for call in calls)]
        assert read == [text for text in given if isinstance(text, str)]
    full = engine.generate(QUESTION, keys, policy=FullRecompute(), max_new_tokens=4)
    texts = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=4)
    assert full.token_ids == texts.token_ids


def test_a_reference_that_has_gone_is_read_from_its_text() -> None:
    engine = make_engine()
    key, *_ = engine.add(TEXTS)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    engine.store.delete(key)
    answer = engine.generate(QUESTION, [StoredChunk(key, TEXTS[0]), *TEXTS[1:]], max_new_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert answer.metrics.misses == 1
    assert engine.store.contains(key)


def test_a_key_without_text_that_has_gone_is_said_so() -> None:
    engine = make_engine()
    (key,) = engine.add(TEXTS[:1])
    engine.store.delete(key)
    with pytest.raises(ChunkNotFoundError, match=r"not in the store any more; pass its text"):
        engine.generate(QUESTION, [key])
    assert engine.generate(QUESTION, TEXTS[:1], max_new_tokens=1).metrics.misses == 1


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"seed": 5},
    # As many tokens before the chunk, but others.
    "prefix": {"template": dataclasses.replace(TEMPLATE, system="Read that.\n")},
    "namespace": {"namespace": "tenant"},
    "wrapper": {"template": dataclasses.replace(TEMPLATE, chunk_start="[")},
}


@pytest.mark.parametrize("other", OTHERS)
def test_keys_of_another_engine(other: str) -> None:
    store = MemoryStore()
    mine, theirs = make_engine(store=store), make_engine(store=store, **OTHERS[other])
    (key,) = theirs.add(TEXTS[:1])
    assert key != mine.keys(TEXTS[:1])[0]
    if other == "wrapper":  # other tokens behind the same prefix: just another chunk
        assert mine.generate(QUESTION, [key], max_new_tokens=1).metrics.misses == 0
        return
    with pytest.raises(FingerprintMismatchError, match="another model, dtype, codec, prefix"):
        mine.generate(QUESTION, [key])
    if other == "model":
        with pytest.raises(FingerprintMismatchError):
            mine.reference(key.digest, key.spec, key.tokens)
    answer = mine.generate(QUESTION, [StoredChunk(key, TEXTS[0])], max_new_tokens=4)
    assert answer.metrics.misses == 1
    assert store.contains(key), "it is still theirs"
    alone = make_engine().generate(QUESTION, TEXTS[:1], max_new_tokens=4)
    assert answer.token_ids == alone.token_ids


# ---------------------------------------------------------------------- what transformers gives
OPTIONS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True},
    {"do_sample": True, "temperature": 1.5},
    {"do_sample": True, "top_k": 5, "num_beams": 2},
    {"repetition_penalty": 1.3, "min_new_tokens": 3},
    {"bad_words_ids": [[70], [80, 81]]},
]


@pytest.mark.parametrize("settings", OPTIONS, ids=lambda one: "-".join(one))
@pytest.mark.parametrize("policy", [Reuse(), FullRecompute()], ids=lambda one: one.name)
def test_options_of_generate_do_what_they_do_without_us(
    engine: Engine, settings: dict[str, Any], policy: Any
) -> None:
    texts = TEXTS[:1]  # in its natural place Reuse is exact
    settings = {"max_new_tokens": 8, **settings}
    ids = engine.tokenize(QUESTION, texts).all
    torch.manual_seed(11)
    expected = plain(engine, ids, **{"do_sample": False, **settings})
    torch.manual_seed(11)
    answer = engine.generate(QUESTION, texts, policy=policy, **settings)
    assert list(answer.token_ids) == expected


def test_a_completion_is_plain_generation(engine: Engine) -> None:
    prompt = "Once upon a time"
    ids = tuple(engine.tokenizer(prompt)["input_ids"])
    answer = engine.complete(prompt, max_new_tokens=6)
    assert list(answer.token_ids) == plain(engine, ids, max_new_tokens=6, do_sample=False)
    assert answer.metrics.query_tokens == len(ids)
    assert (answer.metrics.prefix_tokens, answer.metrics.prefilled_tokens) == (0, 0)


def test_an_answer_says_why_it_ended(engine: Engine) -> None:
    long = engine.generate(QUESTION, TEXTS, max_new_tokens=6)
    assert (long.finish_reason, len(long.token_ids)) == ("length", 6)
    ended = engine.generate(QUESTION, TEXTS, max_new_tokens=6, eos_token_id=long.token_ids[3])
    assert ended.finish_reason == "stop"
    assert ended.token_ids == long.token_ids[: long.token_ids.index(long.token_ids[3]) + 1]


def test_history_stands_behind_the_chunks_and_changes_the_answer(engine: Engine) -> None:
    turns = [Message("user", "And before?"), Message("assistant", "Nothing.")]
    ids = engine.tokenize(QUESTION, TEXTS[:1], turns)
    assert ids.context == engine.tokenize(QUESTION, TEXTS[:1]).context
    answer = engine.generate(QUESTION, TEXTS[:1], history=turns, max_new_tokens=6)
    assert list(answer.token_ids) == plain(engine, ids.all, max_new_tokens=6, do_sample=False)
    assert answer.metrics.query_tokens == len(ids.query)


# ---------------------------------------------------------------------- side by side
def many() -> list[tuple[str, list[str]]]:
    """Long and short, none and all chunks, doubles, in an order that grows and shrinks."""
    return [
        ("What is it that they saw there, and who was it?", TEXTS * 2),
        ("x", []),
        (QUESTION, TEXTS[2:]),
        (QUESTION, [TEXTS[1], TEXTS[1]]),
        ("Was it late when the rain ended?", TEXTS[:2]),
        ("y?", TEXTS[::-1]),
        ("x", []),
        (QUESTION, TEXTS[:1]),
    ]


def ids_of(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def test_nothing_of_an_earlier_question_is_left_in_the_next() -> None:
    used = make_engine()
    reused = [used.generate(q, c, max_new_tokens=6) for q, c in many()]
    buffer = access.runner(used).memory.kept
    fresh = []
    for question, chunks in many():
        used.forget_buffer()
        fresh.append(used.generate(question, chunks, max_new_tokens=6))
    assert buffer is not access.runner(used).memory.kept
    assert ids_of(reused) == ids_of(fresh)


def test_eight_threads_get_the_answers_they_would_get_alone() -> None:
    alone = [make_engine().generate(q, c, max_new_tokens=6) for q, c in many()]
    engine = make_engine()
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(lambda one: engine.generate(*one, max_new_tokens=6), many())
        assert ids_of(list(together)) == ids_of(alone)


@pytest.mark.parametrize("stop", [[" not"], [">"], ["not", " found"], ["d", "ou"], ["a> not"]])
def test_law_a_batch_with_stops_equals_its_singles(stop: list[str]) -> None:
    engine = Engine.from_pretrained("tiny", device="cpu")
    asked = [
        ("Where is the red lamp?", ["The red lamp stands in the hall of the house."]),
        ("What is broken?", ["The blue lamp is broken and lies in the yard."]),
        (
            "Who founded Drenko?",
            ["Drenko was founded by Osha Grell.", "The Mobrit costs 412 euros."],
        ),
    ]
    singles = [engine.generate(*one, max_new_tokens=8, stop=stop) for one in asked]
    batch = engine.generate_batch(asked, max_new_tokens=8, stop=stop)
    for one, other in zip(batch, singles, strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.token_ids == other.token_ids
        assert one.metrics.generated_tokens == other.metrics.generated_tokens


@pytest.mark.parametrize(
    ("given", "same_as"),
    [
        ({"temperature": 1.5}, {"do_sample": True, "temperature": 1.5}),
        ({"temperature": 1.5, "do_sample": False}, {}),
        ({"temperature": 0}, {}),
        ({"temperature": None}, {}),
    ],
)
def test_a_temperature_above_zero_samples(
    engine: Engine, given: dict[str, Any], same_as: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    asked = engine.generate(QUESTION, TEXTS, max_new_tokens=8, **given)
    torch.manual_seed(3)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=8, **same_as)
    assert asked.token_ids == expected.token_ids


@pytest.mark.parametrize("cut", ["time", "cancelled"])
def test_an_answer_that_is_cut_says_so(engine: Engine, cut: str) -> None:
    cancelled = threading.Event()
    options: dict[str, Any] = {"max_time": 1e-6} if cut == "time" else {"cancelled": cancelled}
    cancelled.set()
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=50, min_new_tokens=50, **options)
    assert len(answer.token_ids) <= 1
    assert answer.finish_reason == "length"
    if cut == "cancelled":
        batch = engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], **options)
        assert [one.token_ids for one in batch] == [(), ()]


# ---------------------------------------------------------------------- whatever else is set
def test_no_chunks_and_no_prefix() -> None:
    engine = make_engine(template=PromptTemplate(system=""))
    assert engine.generate("x", [], max_new_tokens=2).metrics.generated_tokens == 2
    assert len(engine.generate_batch([("x", []), ("y", TEXTS)], max_new_tokens=2)) == 2


def test_a_first_call_in_inference_mode_does_not_break_later_ones() -> None:
    engine = make_engine()
    with torch.inference_mode():
        first = engine.generate(QUESTION, TEXTS, max_new_tokens=2)
        assert "".join(engine.stream(QUESTION, TEXTS, max_new_tokens=2)) == first.text
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).text == first.text


def test_a_cache_implementation_in_the_models_generation_config_is_overruled() -> None:
    engine = make_engine()
    engine.model.generation_config.cache_implementation = "static"
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics.generated_tokens == 2


def test_beams_from_a_generation_config_work(engine: Engine) -> None:
    config = GenerationConfig(num_beams=2, eos_token_id=2, pad_token_id=0)
    ids = engine.tokenize(QUESTION, TEXTS[:1]).all
    answer = engine.generate(QUESTION, TEXTS[:1], max_new_tokens=6, generation_config=config)
    assert list(answer.token_ids) == plain(engine, ids, num_beams=2, max_new_tokens=6)
    with pytest.raises(InvalidInputError, match="cannot stream"):
        engine.stream(QUESTION, TEXTS[:1], generation_config=config)


def test_none_means_the_default() -> None:
    engine = make_engine()
    for option in ("history", "stopping_criteria"):
        engine.generate(QUESTION, TEXTS, max_new_tokens=1, **{option: None})
    none = engine.generate(QUESTION, None, max_new_tokens=1)  # type: ignore[arg-type]  # wrong on purpose
    assert none.token_ids == engine.generate(QUESTION, [], max_new_tokens=1).token_ids


def specs(*models: Any) -> set[str]:
    return {Engine(model, byte_tokenizer(), template=TEMPLATE).spec for model in models}


def test_weights_changed_in_this_process_never_meet_the_caches_of_the_hub_model() -> None:
    one, other = build("qwen2"), build("qwen2", seed=3)  # such as merge_and_unload() of a LoRA
    for model in (one, other):
        model.config._commit_hash, model.config._name_or_path = "abc", "some/model"
    assert len(specs(one, other)) == 2


def test_weights_kept_in_buffers_are_part_of_the_identity() -> None:
    """GPTQ and AWQ layers keep their quantised weights as buffers."""
    one, other = build("qwen2"), build("qwen2")
    for value, model in enumerate((one, other)):
        model.model.layers[0].register_buffer("qweight", torch.full((4,), value, dtype=torch.int32))
    assert len(specs(one, other)) == 2


def test_ttft_counts_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    encode = access.renderer(engine).chunk_ids

    def slow(text: str) -> Any:
        time.sleep(0.2)
        return encode(text)

    monkeypatch.setattr(access.renderer(engine), "chunk_ids", slow)
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.ttft > 0.4


def test_questions_are_answered_while_a_corpus_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)

    def add() -> None:
        with suppress(ZeroDivisionError):
            engine.add([f"{n} " * 500 for n in range(60)])

    adding = threading.Thread(target=add)
    adding.start()
    deadline = time.monotonic() + 20
    while engine.store.stats().puts < 6 and time.monotonic() < deadline:
        time.sleep(0.005)
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    still_adding = adding.is_alive()
    monkeypatch.setattr(engine.store, "put", lambda *_: 1 / 0)  # the rest is not looked at
    adding.join()
    assert still_adding, "the question waited for the whole corpus"
