"""The auxiliary model: its attention is the model's own, over stitched chunks, by characters."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import access
import pytest
import torch
from laws import TEMPLATE
from test_eval_mode import traces
from tokenizers_zoo import byte_level, encode, word_pieces
from torch import Tensor
from transformers import AutoModelForCausalLM
from zoo import BY_PLACE, FAMILIES, build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, MemoryStore, Reuse
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.errors import ContextTooLongError, UnsupportedModelError
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.models.attention.last_layer import QueryAttention
from kvcache_rag.prefill import Prefiller
from kvcache_rag.prompt.alignment import token_offsets

QUESTION = "Who leads Grabra?"
TEXTS = [
    "Grabra is led by Dulek 👩.",
    "The staff of Sora is 5663623.",
    "a",
    "It was opened in 2012.",
]


def auxiliary_of(name: str = "llama", tokenizer: Any = None, **options: Any) -> Auxiliary:
    options = {"template": TEMPLATE, "store": MemoryStore(), **options}
    return Auxiliary(Engine(build(name), tokenizer or byte_tokenizer(), **options))


def eager(model: Any) -> Any:
    """The same model on transformers' slowest path, which gives all attention weights."""
    config = copy.deepcopy(model.config)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    frequencies = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        buffer.copy_(frequencies[name])
    return plain.eval()


def plain_weights(auxiliary: Auxiliary, question: str, texts: list[str]) -> list[Tensor]:
    """Per chunk `(tokens,)`: one eager forward under the block mask, weights read off it."""
    adapter, ids = access.adapter(auxiliary.engine), auxiliary.engine.tokenize(question, texts)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query)
    with torch.no_grad():
        found = eager(auxiliary.engine.model)(
            input_ids=sequence.ids[None],
            attention_mask=adapter.mask_argument(sequence.allowed, sequence.indices),
            position_ids=sequence.positions[None],
            output_attentions=True,
            use_cache=False,
        )
    layer = found.attentions[QueryAttention(adapter).layer][0]
    seen = sequence.allowed[-1]
    mean = layer[:, -len(ids.query) :].float().mean(0).mean(0)[seen][len(ids.prefix) :]
    return list(mean[: sum(map(len, ids.chunks))].split([len(chunk) for chunk in ids.chunks]))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama yarn",
        "mistral window",
        "qwen2 window",
        "gemma2",
        "gemma3",
        "gemma3n",
        "stablelm",
        "cohere2",
        "gpt_neox",
        "falcon",
        "deepseek_v3",
        "gpt_oss",
    ],
)
def test_weights_are_those_of_an_eager_pass_under_the_block_mask(name: str) -> None:
    auxiliary = auxiliary_of(name)
    expected = plain_weights(auxiliary, QUESTION, TEXTS)
    for _ in range(2):  # prefilled, then loaded
        found = auxiliary.attention(QUESTION, TEXTS)
        for one, reference in zip(found, expected, strict=True):
            assert one.weights.dtype == torch.float32
            assert float((one.weights - reference).abs().max()) < 2e-5
    other = plain_weights(auxiliary, QUESTION, TEXTS[::-1])[::-1]  # a control: order matters
    assert max(float((a - b).abs().max()) for a, b in zip(expected, other, strict=True)) > 1e-3


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BY_PLACE])
def test_the_last_layer_that_sees_everything_is_read(name: str) -> None:
    model = build(name)
    adapter = access.adapter(Engine(model, byte_tokenizer(), template=TEMPLATE))
    attention = QueryAttention(adapter)
    kinds = adapter.measured.kinds
    assert all(kind.window is not None for kind in kinds[attention.layer + 1 :])
    assert kinds[attention.layer].window is None or name == "mistral window"


def test_the_model_itself_is_left_alone() -> None:
    model = build("qwen2")
    engine, before = Engine(model, byte_tokenizer(), template=TEMPLATE), traces(model)
    expected = engine.logits(QUESTION, TEXTS, policy=Reuse())
    auxiliary = Auxiliary(engine)
    auxiliary.scores(QUESTION, TEXTS)
    assert traces(model) == before
    assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected)
    assert auxiliary._attention.model.model.lm_head.weight is model.lm_head.weight


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, byte_level, word_pieces])
def test_every_character_has_the_weight_of_its_token(tokenizer: Any) -> None:
    auxiliary = auxiliary_of(tokenizer=tokenizer())
    found = auxiliary.attention(QUESTION, TEXTS)
    scores = auxiliary.scores(QUESTION, TEXTS)
    for text, one, characters in zip(TEXTS, found, scores, strict=True):
        assert characters.shape == (len(text),)
        assert characters.dtype == torch.float32
        wrapped = TEMPLATE.wrap(text)
        spans = token_offsets(tokenizer(), wrapped, encode(tokenizer(), wrapped))
        assert len(one.offsets) == len(one.weights) == len(spans)
        for place, letter in enumerate(text):
            at = place + len(TEMPLATE.chunk_start)
            over = [float(w) for w, (a, b) in zip(one.weights, spans, strict=True) if a <= at < b]
            if over:
                assert float(characters[place]) == pytest.approx(max(over))
            else:
                assert letter == " "


def test_what_is_prefilled_ahead_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    auxiliary, twin = auxiliary_of(), auxiliary_of()
    keys = auxiliary.prefill(TEXTS)
    assert len(keys) == len(TEXTS)
    assert all(auxiliary.engine.store.contains(key) for key in keys)
    expected = twin.scores(QUESTION, TEXTS)  # prefills on the spot, and keeps it
    assert all(twin.engine.store.contains(key) for key in keys)

    def computed(*_: Any) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(Prefiller, "compute", computed)
    for one in (auxiliary, twin):
        for a, b in zip(one.scores(QUESTION, TEXTS), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("chunks", [[], [""], [" \n"], ["a"], ["a", "", "b"], ["1"] * 40])
def test_small_chunks(chunks: list[str]) -> None:
    scores = auxiliary_of().scores(QUESTION, chunks)
    assert [len(one) for one in scores] == [len(chunk) for chunk in chunks]
    for one, chunk in zip(scores, chunks, strict=True):
        assert bool((one > 0).all()) == bool(chunk.strip() or not chunk)


def test_what_does_not_fit_is_scored_in_parts() -> None:
    small, large = auxiliary_of(context_window=120), auxiliary_of()
    parts = ["abcdefgh " * 4, "ijkl mnop " * 3, "The staff is 5663623 now."]
    together = small.attention("Who?", parts)
    apart = [*large.attention("Who?", parts[:2]), *large.attention("Who?", parts[2:])]
    room = 120 - len(access.renderer(small.engine).prefix_ids)
    assert sum(len(one.weights) for one in together) > room
    for one, other in zip(together, apart, strict=True):
        assert one.offsets == other.offsets
        assert torch.allclose(one.weights, other.weights, atol=1e-6)


def test_a_long_chunk_is_cut_at_spaces() -> None:
    auxiliary = auxiliary_of(context_window=120)
    text = " ".join(f"word{number} 5663623" for number in range(40))
    (score,) = auxiliary.scores("Who?", [text])
    assert score.shape == (len(text),)
    assert bool((score > 0).all())
    keys = auxiliary.prefill([text])
    assert len(keys) > 5
    pieces = [piece.text for piece in auxiliary._pieces([text])]
    assert "".join(pieces) == text
    assert all(piece.endswith(" ") for piece in pieces[:-1])
    assert max(key.tokens for key in keys) <= 120 // 2
    # Of any question, the parts are the same, so they are computed once.
    assert auxiliary.prefill([text]) == keys
    solid = "x" * 500
    assert auxiliary.scores("Who?", [solid, text])[0].shape == (500,)


def test_a_question_that_leaves_no_room() -> None:
    auxiliary = auxiliary_of(context_window=120)
    with pytest.raises(ContextTooLongError, match=r"window of 120 .* shorten the question"):
        auxiliary.scores(
            "Who? " * 20, ["a longer text that fills half of the window, or nearly so"]
        )
    assert auxiliary.scores("Who? " * 20, []) == []


@pytest.mark.parametrize(
    ("question", "chunks", "message"),
    [
        ("", TEXTS, "question is empty"),
        ("  ", TEXTS, "question is empty"),
        (None, TEXTS, "question is empty"),
        (QUESTION, "one text", "must be a list of texts"),
        (QUESTION, ["\ud800"], "not valid Unicode"),
        (QUESTION, ["a", 1], "chunk 1 is a int"),
    ],
)
def test_what_cannot_be_scored(question: Any, chunks: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        auxiliary_of().scores(question, chunks)


def test_models_that_cannot_help() -> None:
    with pytest.raises(InvalidInputError, match="from_pretrained"):
        Auxiliary("tiny")  # type: ignore[arg-type]  # wrong on purpose
    for name in ("gpt2", "recurrent_gemma"):
        with pytest.raises(UnsupportedModelError):
            auxiliary_of(name)
    for name in BY_PLACE:
        with pytest.raises(UnsupportedModelError, match=r"\(ALiBi\), so it cannot be an auxiliary"):
            auxiliary_of(name)
    with pytest.raises(InvalidInputError, match="no model folder"):
        Auxiliary.from_pretrained("./no/such/model")


def test_it_runs_on_the_cpu_and_is_no_parcel() -> None:
    auxiliary = Auxiliary.from_pretrained("tiny")
    assert access.adapter(auxiliary.engine).device.type == "cpu"
    with pytest.raises(InvalidInputError, match="cannot be pickled"):
        pickle.dumps(auxiliary)


def test_many_threads_may_ask_while_the_model_answers() -> None:
    model = build("llama")
    main = Engine(model, byte_tokenizer(), template=TEMPLATE)
    auxiliary = Auxiliary(Engine(model, byte_tokenizer(), template=TEMPLATE))
    questions = [f"What is number {number}?" for number in range(6)] * 3
    expected = [torch.cat(auxiliary.scores(question, TEXTS)) for question in questions]
    logits = main.logits(QUESTION, TEXTS)
    stop = threading.Event()

    def answer() -> list[float]:
        off = []
        while not stop.is_set():
            off.append(float((main.logits(QUESTION, TEXTS) - logits).abs().max()))
        return off

    with ThreadPoolExecutor(4) as pool:
        answering = pool.submit(answer)
        try:
            found = list(pool.map(lambda one: torch.cat(auxiliary.scores(one, TEXTS)), questions))
        finally:
            stop.set()
        assert max(answering.result()) < 1e-5
    for one, reference in zip(found, expected, strict=True):
        assert torch.allclose(one, reference, atol=1e-6)
