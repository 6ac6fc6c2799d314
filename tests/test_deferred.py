"""Laws of deferred rotation: whatever is asked, chunks attended to in place equal copied ones."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import (
    QUESTION,
    TEMPLATE,
    TEXTS,
    Recorder,
    behind_system,
    error,
    make_engine,
    refused,
)
from torch import Tensor
from zoo import FAMILIES, OWN_ATTENTION, SEVERAL, build, byte_tokenizer

from kvcache_rag import (
    Ape,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    Reuse,
    TieredStore,
)
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.codecs import Int4, Int8
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.deferred import attention, support
from kvcache_rag.models.deferred.attention import is_fast

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.models.deferred.cache import LayerSegments
    from kvcache_rag.models.deferred.segments import LayerCall

# One angle per chunk, exact for the distance: a prompt of 200 tokens needs no more than rounding.
TOLERANCE = 1e-4
# Copied for good, and why: nothing else may fall back unnoticed.
NOT_DEFERRED = {
    "gemma2": "gemma2: Gemma2Attention passes softcap, which no kernel knows",
    "falcon alibi": "falcon: its attention does not go through transformers' attention interface",
    "bloom": "bloom: its attention does not go through transformers' attention interface",
    "mpt": "mpt: its attention does not go through transformers' attention interface",
    **{
        name: f"{name}: its attention does not go through transformers' attention interface"
        for name in OWN_ATTENTION
    },
    "deepseek_v2": "deepseek_v2: layer 0 keeps rotated columns in its V slot",
    "deepseek_v3": "deepseek_v3: layer 0 keeps rotated columns in its V slot",
}
LONG = "What is the name of the person that was seen there by all of the others on that day?"


@cache
def deferred_engine(name: str) -> Engine:
    return make_engine(name, rotation="deferred")


@cache
def copying_engine(name: str) -> Engine:
    return make_engine(name, rotation="copied")


@pytest.mark.parametrize("policy", [Reuse(), Reuse(positions="composite")], ids=repr)
@pytest.mark.parametrize("name", FAMILIES)
def test_deferred_is_copied(name: str, policy: Reuse) -> None:
    deferred, copied = deferred_engine(name), copying_engine(name)
    if refused(deferred, policy) or refused(copied, policy):
        return
    for question, chunks in ((QUESTION, TEXTS), (LONG, TEXTS[:1]), ("x", []), ("y", TEXTS * 2)):
        found = deferred.logits(question, chunks, policy=policy)
        assert error(found, copied.logits(question, chunks, policy=policy)) < TOLERANCE
    metrics = deferred.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    if name in NOT_DEFERRED:
        assert (metrics.rotation, metrics.not_deferred) == ("copied", NOT_DEFERRED[name])
    else:
        assert (metrics.rotation, metrics.not_deferred) == ("deferred", "")
    assert copied.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.rotation == "copied"


@pytest.mark.parametrize("name", ["llama", "mistral window", "gemma3", "gpt_oss"])
def test_questions_of_other_lengths_in_bfloat16_stay_finite(name: str) -> None:
    """Padding that sees nothing behind a window gave NaN, which spread to the answers."""
    model = build(name, dtype=torch.bfloat16, width=32)
    questions = [(QUESTION, TEXTS), ("x", []), ("Why?", TEXTS[:1]), (LONG * 3, TEXTS[1:])]
    steps = []
    for rotation in ("copied", "deferred"):
        engine = Engine(
            model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore(), rotation=rotation
        )
        seen = Recorder()
        answers = engine.generate_batch(questions, max_new_tokens=1, logits_processor=[seen])
        assert {answer.metrics.rotation for answer in answers} == {rotation}
        steps.append(seen.steps[0])
    assert all(bool(step.isfinite().all()) for step in steps)
    # By rows: in 16 bits a near tie sends a token of one question to another expert.
    off = (steps[0] - steps[1]).std(-1) / steps[0].std(-1)
    assert float(off.median()) < 0.05


@pytest.mark.parametrize("name", [name for name in SEVERAL if name not in NOT_DEFERRED])
def test_answers_batches_and_streams_are_those_of_copying(name: str) -> None:
    deferred, copied = deferred_engine(name), copying_engine(name)
    questions = [
        (QUESTION, TEXTS),
        ("What is it that they saw there?", TEXTS[:1]),
        ("x", []),
        (LONG, [TEXTS[2], TEXTS[0], TEXTS[2]]),
        ("Why?", TEXTS[1:]),
    ]
    together = Recorder()
    batch = deferred.generate_batch(questions, max_new_tokens=6, logits_processor=[together])
    for row, (question, chunks) in enumerate(questions):
        mine, theirs = Recorder(), Recorder()
        single = deferred.generate(question, chunks, max_new_tokens=6, logits_processor=[mine])
        expected = copied.generate(question, chunks, max_new_tokens=6, logits_processor=[theirs])
        assert single.token_ids == expected.token_ids == batch[row].token_ids
        assert single.metrics.rotation == batch[row].metrics.rotation == "deferred"
        for step, reference in enumerate(theirs.steps):
            assert error(mine.steps[step][0], reference[0]) < TOLERANCE
            assert error(together.steps[step][row], reference[0]) < TOLERANCE
        stream = deferred.stream(question, chunks, max_new_tokens=6)
        assert "".join(stream) == expected.text
        assert stream.metrics.rotation == "deferred"


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_metrics_count_the_same(name: str) -> None:
    times = {"ttft", "load", "stitch", "prefill", "total", "rotation", "not_deferred"}
    mine, theirs = (make_engine(name, rotation=mode) for mode in ("deferred", "copied"))

    def counts(metrics: Any) -> dict[str, Any]:
        return {name: value for name, value in asdict(metrics).items() if name not in times}

    asked: list[Any] = [(QUESTION, TEXTS), (QUESTION, TEXTS), ("y", [TEXTS[0]] * 2), ("z", [])]
    for question, policy in itertools.product(asked, (Reuse(), FullRecompute())):
        found, expected = (
            one.generate(*question, max_new_tokens=3, policy=policy).metrics
            for one in (mine, theirs)
        )
        assert counts(found) == counts(expected)
        assert found.rotation == ("" if policy.is_full else "deferred")
    asked = [(QUESTION, TEXTS), ("a", TEXTS[1:]), ("b", TEXTS[1:])]
    batches = (one.generate_batch(asked, max_new_tokens=3) for one in (mine, theirs))
    for one, other in zip(*batches, strict=True):
        assert one.metrics.hits == other.metrics.hits
        assert one.metrics.reused_tokens == other.metrics.reused_tokens


def test_stored_chunks_are_the_ones_attended_to_and_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines share the store's tensors: no K is copied, none is written."""
    store = MemoryStore()
    engines = [over_qwen(store=store, rotation="deferred") for _ in range(3)]
    layout = access.chunk_layout(engines[0])
    chunks = [store.get(key, layout).chunk for key in engines[0].add(TEXTS)]
    held_parts = [part for chunk in chunks for group in chunk.tensors for part in group]
    before = [part.clone() for part in held_parts]
    pointers = {chunk.keys(0)[layer].data_ptr() for chunk in chunks for layer in range(4)}
    met: dict[int, set[int]] = {}
    capacities = set()
    plain = attention.fast_attention

    def watched(call: LayerCall, layer: LayerSegments) -> Tensor:
        for held, _ in layer.held.views[layer.group].values():
            met.setdefault(threading.get_ident(), set()).add(held[layer.place].data_ptr())
        capacities.add(call.key.untyped_storage().nbytes())
        return plain(call, layer)

    monkeypatch.setattr(attention, "fast_attention", watched)
    with ThreadPoolExecutor(3) as pool:
        together = threading.Barrier(3)

        def ask(engine: Engine) -> list[tuple[int, ...]]:
            together.wait(60)
            return [
                engine.generate(QUESTION, order, max_new_tokens=5).token_ids
                for order in (TEXTS, TEXTS[::-1])
            ]

        answers = list(pool.map(ask, engines))
    assert answers[0] == answers[1] == answers[2]
    assert len(met) == 3
    assert all(pointers <= one for one in met.values())
    # The buffer of the tail is one step of room, whatever the length of the context.
    whole = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, width, float32
    assert capacities == {256 * whole}
    assert all(map(torch.equal, held_parts, before))
    copied = over_qwen(store=store, rotation="copied")
    assert answers[0][0] == copied.generate(QUESTION, TEXTS, max_new_tokens=5).token_ids


def over_qwen(**options: Any) -> Engine:
    options = {"store": MemoryStore(), **options}
    return Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE, **options)


def reason(engine: Engine, **asked: Any) -> str:
    """Why it copies, of a question and of a batch."""
    (batched,) = engine.generate_batch([(QUESTION, TEXTS)], max_new_tokens=2, **asked)
    for _ in range(2):
        metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2, **asked).metrics
        assert metrics.rotation == "copied"
        assert metrics.not_deferred == batched.metrics.not_deferred
    return metrics.not_deferred


@pytest.mark.parametrize(
    ("mode", "asked", "why"),
    [
        ("deferred", {"policy": LegoLink(4)}, f"{LegoLink(4)!r} computes tokens again"),
        ("deferred", {"policy": Ape()}, "Ape(temperature=0.9, scale=0.9) weighs"),
        ("deferred", {"num_beams": 2}, "beam search"),
        ("copied", {}, 'rotation="copied"'),
        ("auto", {}, 'rotation="auto" copies what is not in 8 bits'),
    ],
)
def test_everything_else_is_copied_and_says_why(mode: Any, asked: Any, why: str) -> None:
    assert why in reason(over_qwen(rotation=mode), **asked)


def test_keys_without_position_are_copied(tmp_path: Path) -> None:
    engine = over_qwen(rotation="deferred", store=DiskStore(tmp_path, codec=Int4()))
    assert reason(engine).startswith(f"codec {Int4().name} keeps every key at position 0")


def test_a_model_loaded_for_other_attention_is_copied() -> None:
    engine = over_qwen(rotation="copied")
    access.adapter(engine).config._attn_implementation_internal = "flex_attention"
    assert support.deferral_refusal(access.adapter(engine)) == (
        "qwen2: it was loaded for attention by flex_attention; load it with "
        'attn_implementation="sdpa" instead'
    )


def test_a_full_prefill_has_no_rotation() -> None:
    engine = over_qwen(rotation="deferred")
    for answer in (
        engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=1),
        engine.complete("Who", max_new_tokens=1),
    ):
        assert (answer.metrics.rotation, answer.metrics.not_deferred) == ("", "")


def test_an_empty_prefix_is_no_segment() -> None:
    engines = [behind_system("qwen2", "no prefix", rotation=one) for one in ("deferred", "copied")]
    assert error(*(one.logits(QUESTION, TEXTS) for one in engines)) < TOLERANCE


@pytest.mark.parametrize("mode", ["lazy", None, True])
def test_unknown_modes_are_refused(mode: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^rotation must be"):
        over_qwen(rotation=mode)


def test_combinations_are_held_too() -> None:
    deferred, copied = deferred_engine("qwen2"), copying_engine("qwen2")
    policy = Combination()
    for chunks in (TEXTS, TEXTS[:1], TEXTS[::-1]):
        found = deferred.logits(QUESTION, chunks, policy=policy)
        assert error(found, copied.logits(QUESTION, chunks, policy=policy)) < TOLERANCE
    answer = deferred.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=4)
    assert answer.metrics.rotation == "deferred"
    assert answer.metrics.hits == {"combinations": 1}
    batch = deferred.generate_batch(
        [(QUESTION, TEXTS), ("x", TEXTS[:1])], policy=policy, max_new_tokens=4
    )
    assert batch[0].token_ids == answer.token_ids


@pytest.mark.parametrize("tiers", [False, True])
def test_chunks_of_a_slow_tier_are_brought_and_held(tiers: bool, tmp_path: Path) -> None:
    expected = copying_engine("qwen2").generate(QUESTION, TEXTS, max_new_tokens=4).token_ids
    disk = DiskStore(tmp_path)
    store = TieredStore(MemoryStore(), disk) if tiers else disk
    for found in (0, len(TEXTS)):
        engine = over_qwen(store=store, rotation="deferred")
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
        assert (answer.metrics.rotation, answer.token_ids) == ("deferred", expected)
        assert sum(answer.metrics.hits.values()) == found


def test_a_file_that_lies_about_its_tokens_is_a_miss() -> None:
    engine = make_engine("qwen2", rotation="deferred")
    keys = engine.add(TEXTS)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    chunk = engine.store.get(keys[0], access.chunk_layout(engine)).chunk
    chunk.tokens[0] += 1
    again = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert (again.metrics.misses, again.token_ids) == (1, expected.token_ids)


# ---------------------------------------------------------------------- beside others
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
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_engines_over_one_model_take_turns() -> None:
    model, other = build("qwen2"), PromptTemplate(system="Look.\n", chunk_start="<e>")
    first, second = (
        Engine(model, byte_tokenizer(), template=template, rotation="deferred")
        for template in (TEMPLATE, other)
    )
    own = access.attention(model.config)

    def ask(engine: Engine, meanwhile: Any = None) -> tuple[int, ...]:
        options: dict[str, Any] = {"logits_processor": [Meanwhile(meanwhile)]}
        return engine.generate(QUESTION, TEXTS, max_new_tokens=6, **options).token_ids

    expected = [ask(first), ask(second)]
    entered, left = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        left.wait(20)

    with ThreadPoolExecutor(1) as pool:
        begun: list[Any] = []

        def begin() -> None:
            begun.append(pool.submit(ask, second, wait))
            entered.wait(0.3)

        found = [ask(first, begin)]
        left.set()
        found.append(begun[0].result())
    assert found == expected
    assert access.attention(model.config) == own


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_other_passes_of_the_model_stay_what_they_are(name: str) -> None:
    """Of whoever uses it meanwhile: the app, and an auxiliary over the very engine."""
    engine = make_engine(name, rotation="deferred")
    auxiliary, ids = Auxiliary(engine), torch.arange(5, 65)[None]

    def passes() -> Tensor:
        with torch.inference_mode():
            whole = engine.model(ids).logits
            held = engine.model(ids[:, :40], use_cache=True)[CACHE_NAME]
            pieces = (ids[:, 40:59], ids[:, 59:])
            parts = [engine.model(one, **{CACHE_NAME: held}).logits for one in pieces]
        return torch.cat([whole, *parts], 1)

    def scores() -> Tensor:
        return torch.cat(auxiliary.scores(QUESTION, TEXTS))

    expected = [passes(), passes(), scores()]
    plain = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    found: list[Tensor] = []

    def between() -> None:
        found.extend([passes(), in_thread(passes), in_thread(scores)])

    answer = engine.generate(
        QUESTION, TEXTS, max_new_tokens=4, logits_processor=[Meanwhile(between)]
    )
    assert answer.metrics.rotation == "deferred"
    assert answer.token_ids == plain.token_ids
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 1e-4


def test_guidance_by_a_second_pass_is_that_of_copying() -> None:
    engines = [make_engine("qwen2", rotation=mode) for mode in ("deferred", "copied")]
    options = {"max_new_tokens": 8, "eos_token_id": None}
    found, expected = (
        one.generate(QUESTION, TEXTS, guidance_scale=3.0, **options) for one in engines
    )
    assert found.token_ids == expected.token_ids
    assert found.metrics.rotation == "deferred"
    assert found.token_ids != engines[0].generate(QUESTION, TEXTS, **options).token_ids


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
