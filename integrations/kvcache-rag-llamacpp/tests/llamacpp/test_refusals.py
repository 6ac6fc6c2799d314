"""What llama.cpp cannot do is said in one sentence, by name, with what to do instead."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import QUESTION, TEXTS, error
from llamacpp import ggufs
from llamacpp.asking import Picked, ids_of, opened, rounding
from small import make_tokenizer
from zoo import byte_tokenizer

from kvcache_rag import (
    Ape,
    BestFew,
    BestLast,
    CacheBlend,
    CacheClip,
    Engine,
    FullRecompute,
    InvalidInputError,
    KVCacheRagError,
    LegoLink,
    ProphetKV,
    Reuse,
)
from kvcache_rag.errors import ContextTooLongError, UnsupportedModelError
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag_llamacpp import binding

if TYPE_CHECKING:
    from pathlib import Path

    from llamacpp.conftest import Decoder, Files


@pytest.fixture(scope="module")
def engine(files: Files) -> Engine:
    return opened(files("llama"))


def is_a_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and 20 < len(text) < 420


# ---------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "lfm2",
            r"lfm2: some layers are recurrent.* backend=\"transformers\" stitches such models",
        ),
        ("qwen2vl", r"qwen2vl: a token's position is several numbers \(M-RoPE\)"),
    ],
)
def test_models_that_cannot_be_stitched_answer_by_full_prefill(
    files: Files, own: Decoder, name: str, words: str
) -> None:
    """Law: of the best few chunks, with one warning; chunks are refused."""
    engine = opened(files(name))
    few = [TEXTS[at] for at in BestFew().plan(Retrieved(QUESTION, tuple(TEXTS))).order]
    with pytest.warns(UserWarning, match=rf"^{words}.*; it answers by full prefill"):
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=5).token_ids == answer.token_ids
    if name == "lfm2":  # the reference cannot say several positions
        said, _ = own(files(name)).answer([], [], [*ids_of(engine, few).all], 5)
        assert [*answer.token_ids] == said
    for call in (
        lambda: engine.generate(QUESTION, TEXTS, policy=Reuse()),
        lambda: engine.add(TEXTS),
    ):
        with pytest.raises(UnsupportedModelError, match=rf"^{words}") as caught:
            call()
        assert is_a_sentence(caught.value)
    rows = [(QUESTION, few), ("x", TEXTS[:1])]
    batch = engine.generate_batch(rows, policy=FullRecompute(), max_new_tokens=5)
    assert batch[0].token_ids == answer.token_ids


def test_keys_that_cannot_be_moved_stay_where_they_are(files: Files, own: Decoder) -> None:
    """Law: with learned positions one chunk is reused in its place, and several are refused.

    Of the best few one alone is reused, so that they are answered from without a word.
    """
    engine, alone = opened(files("mpt learned")), own(files("mpt learned"))
    assert "learned absolute positions" in engine.refusal
    for count in (1, 2):
        few = engine.generate(QUESTION, TEXTS, policy=BestFew(count), max_new_tokens=5)
        said, _ = alone.answer([], [], [*ids_of(engine, TEXTS[:count]).all], 5)
        assert [*few.token_ids] == said
    assert few.metrics.reused_tokens > 0
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.policy == repr(BestFew())
    engine.delete(engine.add(TEXTS))
    ids = ids_of(engine, TEXTS[:1])
    for misses in (1, 0):
        one = engine.generate(QUESTION, TEXTS[:1], policy=Reuse(), max_new_tokens=5)
        assert one.metrics.misses == misses
        said, logits = alone.answer([], [], [*ids.all], 5)
        assert [*one.token_ids] == said
    found = engine.logits(QUESTION, TEXTS[:1], policy=Reuse())
    assert error(found[-1:], logits[:1]) < rounding("mpt")
    with pytest.raises(UnsupportedModelError, match="learned absolute positions"):
        engine.generate(QUESTION, TEXTS, policy=Reuse())


# ---------------------------------------------------------------------- policies
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (CacheBlend(0.3), r"llama.cpp gives neither attention nor keys of single layers"),
        (ProphetKV(0.3), r"llama.cpp gives neither attention nor keys of single layers"),
        (Ape(0.8, 0.9), r"lets nobody weigh chunks inside attention"),
        (Reuse("composite"), r"chunks cannot overlap in position as Reuse\("),
        (LegoLink(4, positions="composite"), r"chunks cannot overlap in position as LegoLink"),
        (BestLast(positions="composite"), r"chunks cannot overlap in position as BestLast"),
        (Picked(lambda prompt: torch.ones(3)), r"select must return a bool tensor"),
        (CacheClip(ratio=0.3), r"needs an auxiliary model to choose tokens"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_policies_that_are_refused(engine: Engine, policy: Any, words: str) -> None:
    for call in (
        lambda: engine.generate(QUESTION, TEXTS, policy=policy),
        lambda: engine.generate_batch([(QUESTION, TEXTS), ("x", TEXTS)], policy=policy),
        lambda: engine.logits(QUESTION, TEXTS, policy=policy),
        lambda: engine.explain(QUESTION, TEXTS, policy=policy),
    ):
        with pytest.raises(KVCacheRagError, match=words) as caught:
            call()
        assert is_a_sentence(caught.value)
    assert engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    "look", [lambda signals: signals.deviation(1), lambda signals: signals.attention()]
)
def test_policies_of_users_that_look_at_layers_are_refused(engine: Engine, look: Any) -> None:

    class Looking(Picked):
        def select(self, prompt: Any, signals: Any) -> Any:
            return look(signals) > 0

    with pytest.raises(UnsupportedModelError, match="gives neither attention nor keys") as told:
        engine.generate(QUESTION, TEXTS, policy=Looking(lambda prompt: None))
    assert is_a_sentence(told.value)


def test_why_chunks_are_copied_is_told(files: Files) -> None:
    for rotation in ("auto", "copied", "deferred"):
        engine = opened(files("llama"), rotation=rotation)
        metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics
        assert metrics.rotation == "copied"
        assert metrics.not_deferred == "llama.cpp has contexts in cells of its own"


def test_longropes_length_holds_of_full_prefills_too(files: Files) -> None:
    """Law: llama.cpp has one set of frequencies in a context, of which the error tells."""
    engine, texts = opened(files("phi3")), ["a" * 300, "b" * 300]
    for policy in (Reuse(), FullRecompute()):
        with pytest.raises(ContextTooLongError, match="give the engine a larger context_window"):
            engine.generate(QUESTION, texts, policy=policy)
    with pytest.raises(ContextTooLongError):
        engine.complete(texts[0] * 2)
    longer = opened(files("phi3"), context_window=ggufs.LENGTH)
    for policy in (Reuse(), FullRecompute()):
        assert longer.generate(QUESTION, texts, policy=policy, max_new_tokens=2).token_ids


def test_a_prompt_that_fills_its_window(files: Files, own: Decoder) -> None:
    engine = opened(files("phi3"))
    tokens = len(ids_of(engine, ["a", "b"]).all)
    first, second = "a" * 200, "b" * (ggufs.ORIGINAL - tokens - 200 + 2 - 8)
    assert len(ids_of(engine, [first, second]).all) == ggufs.ORIGINAL - 8
    for policy in (Reuse(), LegoLink(30), FullRecompute()):
        options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "policy": policy}
        assert len(engine.generate(QUESTION, [first, second], **options).token_ids) == 8


def test_ids_that_there_are_not(files: Files) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens(["<new>"])
    engine = opened(files("llama"), tokenizer=tokenizer)
    with pytest.raises(InvalidInputError, match="beyond the model's 259 embeddings") as caught:
        engine.complete("a <new>")
    assert is_a_sentence(caught.value)
    assert engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=2).token_ids


# ---------------------------------------------------------------------- loading
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "q8_0"}, r"llama.cpp keeps keys and values in float32, float16, bfloat16 here"),
        ({"dtype": "float64"}, r"llama.cpp keeps keys and values in float32"),
        ({"model_kwargs": {"attn_implementation": "sdpa"}}, r"attn_implementation"),
        ({"model_kwargs": {"n_gpu_layers": "all"}}, r"n_gpu_layers must be a whole number"),
        ({"tokenizer": make_tokenizer()}, r"the tokenizer has .* for token \d+, and llama.gguf"),
        ({"context_window": 0}, r"context_window must be positive"),
    ],
    ids=str,
)
def test_options_that_are_refused(files: Files, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        opened(files("llama"), **options)
    assert is_a_sentence(caught.value)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda raw: b"GGML" + raw[4:],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b"llama", b"lamma"),
        None,
    ],
    ids=["no gguf", "cut", "another architecture", "no file"],
)
def test_files_that_are_refused(files: Files, spoilt: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if spoilt is not None:
        path.write_bytes(spoilt(files("llama").read_bytes()))
    for wrong in (path, tmp_path):
        with pytest.raises(InvalidInputError) as caught:
            opened(wrong)
        assert is_a_sentence(caught.value)


def test_an_encoder_is_no_language_model(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding.LlamaCpp, "can_generate", False)
    with pytest.raises(InvalidInputError, match="is no causal language model"):
        opened(files("llama"))


# ---------------------------------------------------------------------- the model itself
def test_its_model_answers_the_engine_alone(engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="ask the engine"):
        engine.model(torch.tensor([[5, 6]]), None)
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInputError, match="cannot be copied or pickled"):
            call(engine.model)
