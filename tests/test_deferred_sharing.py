"""Deferred rotation beside everything else that uses the same model, store or settings."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, error, make_engine
from torch import Tensor
from zoo import build, byte_tokenizer

from kvcache_rag import Combination, DiskStore, Engine, FullRecompute, PromptTemplate
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.codecs import Int8
from kvcache_rag.generation import StoredChunk
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.deferred.attention import is_fast

if TYPE_CHECKING:
    from pathlib import Path


class Meanwhile:
    """A logits processor that calls something at its first step."""

    def __init__(self, call: Any) -> None:
        self.call: Any = call

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        call, self.call = self.call, None
        if call is not None:
            call()
        return scores


def in_thread(call: Any) -> Any:
    """What `call` gives in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def pair(**options: Any) -> tuple[Engine, Engine]:
    """Two engines over one model, with templates of their own."""
    model, other = build("qwen2"), PromptTemplate(system="Look.\n", chunk_start="<e>")
    first = Engine(model, byte_tokenizer(), template=TEMPLATE, **options)
    return first, Engine(model, byte_tokenizer(), template=other, **options)


def test_engines_over_one_model_take_turns() -> None:
    first, second = pair(rotation="deferred")
    own = access.attention(first.model.config)
    expected = [
        one.generate(QUESTION, TEXTS, max_new_tokens=6).token_ids for one in (first, second)
    ]
    entered, left = threading.Event(), threading.Event()
    found: list[Any] = []

    def later() -> None:
        def wait() -> None:
            entered.set()
            left.wait(20)

        answer = second.generate(
            QUESTION, TEXTS, max_new_tokens=6, logits_processor=[Meanwhile(wait)]
        )
        found.append(answer.token_ids)

    thread = threading.Thread(target=later)

    def begin() -> None:
        thread.start()
        entered.wait(0.3)

    answer = first.generate(QUESTION, TEXTS, max_new_tokens=6, logits_processor=[Meanwhile(begin)])
    left.set()
    thread.join()
    assert [answer.token_ids, *found] == expected
    assert access.attention(first.model.config) == own


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_other_passes_of_the_model_stay_what_they_are(name: str) -> None:
    engine = make_engine(name, rotation="deferred")
    ids = torch.arange(5, 65)[None]

    def passes() -> Tensor:
        with torch.inference_mode():
            whole = engine.model(ids).logits
            held = engine.model(ids[:, :40], use_cache=True)[CACHE_NAME]
            pieces = (ids[:, 40:59], ids[:, 59:])
            parts = [engine.model(one, **{CACHE_NAME: held}).logits for one in pieces]
        return torch.cat([whole, *parts], 1)

    expected = passes()
    plain = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    found: list[Tensor] = []

    def between() -> None:
        found.extend([passes(), in_thread(passes)])

    answer = engine.generate(
        QUESTION, TEXTS, max_new_tokens=4, logits_processor=[Meanwhile(between)]
    )
    assert answer.metrics.rotation == "deferred"
    assert answer.token_ids == plain.token_ids
    assert [error(one, expected) < 1e-4 for one in found] == [True, True]


def test_guidance_by_a_second_pass_is_that_of_copying() -> None:
    engines = [make_engine("qwen2", rotation=mode) for mode in ("deferred", "copied")]
    options = {"max_new_tokens": 8, "eos_token_id": None}
    found, expected = (
        one.generate(QUESTION, TEXTS, guidance_scale=3.0, **options) for one in engines
    )
    assert found.token_ids == expected.token_ids
    assert found.metrics.rotation == "deferred"
    assert found.token_ids != engines[0].generate(QUESTION, TEXTS, **options).token_ids


def test_an_auxiliary_over_the_very_engine_may_score_meanwhile() -> None:
    engine = make_engine("qwen2", rotation="deferred")
    auxiliary = Auxiliary(engine)
    expected = torch.cat(auxiliary.scores(QUESTION, TEXTS))
    found: list[Any] = []

    def between() -> None:
        found.append(torch.cat(in_thread(lambda: auxiliary.scores(QUESTION, TEXTS))))

    engine.generate(QUESTION, TEXTS, max_new_tokens=3, logits_processor=[Meanwhile(between)])
    assert error(found[0], expected) < 1e-4


def test_an_answer_that_fails_leaves_the_model_as_it_was() -> None:
    engine = make_engine("qwen2", rotation="deferred")
    own = access.attention(engine.model.config)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4).token_ids

    def fail() -> None:
        raise RuntimeError("no more")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more"):
            engine.generate(QUESTION, TEXTS, logits_processor=[Meanwhile(fail)])
        assert access.attention(engine.model.config) == own
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=4).token_ids == expected
    full = engine.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert error(full, make_engine("qwen2").logits(QUESTION, TEXTS, policy=FullRecompute())) < 1e-4


def test_nothing_of_a_chunk_stays_behind_an_answer() -> None:
    engine = make_engine("gpt_oss", rotation="deferred")
    keys = engine.add(TEXTS)
    questions = [(QUESTION, TEXTS), ("And why is it so?", TEXTS[1:])]
    engine.generate_batch(questions, max_new_tokens=3)
    engine.generate(QUESTION, TEXTS, max_new_tokens=3)
    layout = access.chunk_layout(engine)
    watched = [weakref.ref(engine.store.get(key, layout).chunk.tensors[0][0]) for key in keys]
    for key in keys:
        engine.store.delete(key)
    gc.collect()
    assert [one() for one in watched] == [None] * 3


def test_every_store_of_a_batch_is_asked_for_its_codec(tmp_path: Path) -> None:
    """A prompt of one chunk and one of a combination lie in stores of their own."""
    joint = DiskStore(tmp_path, codec=Int8())
    engines = [
        Engine(
            build("qwen2"), byte_tokenizer(), template=TEMPLATE, rotation=mode, combinations=joint
        )
        for mode in ("deferred", "copied")
    ]
    questions = [("x", TEXTS[:1]), (QUESTION, TEXTS)]
    options: dict[str, Any] = {"policy": Combination(), "max_new_tokens": 6}
    found, expected = (one.generate_batch(questions, **options) for one in engines)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.metrics.rotation for one in found] == ["copied"] * 2
    assert "keeps every key at position 0" in found[0].metrics.not_deferred
    alone = engines[0].generate(*questions[0], **options)
    assert alone.metrics.rotation == "deferred"


def test_beams_that_only_the_model_asks_for_are_none() -> None:
    answers = []
    for mode in ("deferred", "copied"):
        engine = make_engine("qwen2", rotation=mode)
        engine.model.generation_config.num_beams = 3
        engine.model.generation_config.num_return_sequences = 2
        torch.manual_seed(0)
        answers.append(engine.generate(QUESTION, TEXTS, max_new_tokens=5, temperature=1.0))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].metrics.rotation == "deferred"


@pytest.mark.parametrize("mode", ["deferred", "copied"])
@pytest.mark.parametrize("size", [2, 5])
def test_queries_read_in_pieces_are_the_same_in_a_batch(mode: Any, size: int) -> None:
    engine = make_engine("qwen2", rotation=mode)
    questions = [(QUESTION, TEXTS), ("What is it that they saw there?", TEXTS[:1]), ("x", TEXTS)]
    expected = engine.generate_batch(questions, max_new_tokens=5)
    found = engine.generate_batch(questions, max_new_tokens=5, prefill_chunk_size=size)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_devices_without_a_kernel_have_none() -> None:
    shape = (torch.float32, 16, 16, 4, 2)
    assert is_fast(*shape, torch.device("cpu"))
    assert not is_fast(*shape, torch.device("mps"))


@pytest.mark.parametrize("mode", ["copied", "deferred"])
def test_a_reference_that_has_gone_is_its_text_in_a_batch_too(mode: Any) -> None:
    engine = make_engine("qwen2", rotation=mode)
    keys = engine.add(TEXTS)
    chunks = [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]
    questions: list[Any] = [(QUESTION, chunks), ("x", chunks[:1])]
    expected = engine.generate_batch(questions, max_new_tokens=4)
    chunks[0] = StoredChunk(keys[0], text="This one is new.")
    store, get = engine.store, engine.store.get

    def gone(key: Any, *rest: Any, **options: Any) -> Any:
        store.delete(keys[0])  # after the question was planned
        return get(key, *rest, **options)

    engine.forget_buffer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get", gone)
        found = engine.generate_batch([questions[0], ("x", chunks[:1])], max_new_tokens=4)
    written = ["This one is new.", *TEXTS[1:]]
    alone = [engine.generate(QUESTION, written, max_new_tokens=4)]
    alone.append(engine.generate("x", written[:1], max_new_tokens=4))
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert found[0].token_ids != expected[0].token_ids
