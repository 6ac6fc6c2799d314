"""The training forward is the stitched computation itself, for every supported family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import BY_PLACE, SEVERAL, build, byte_tokenizer

from kvcache_rag import Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData, attention
from kvcache_rag_lab.finetune.attention import use_tiled_attention
from kvcache_rag_lab.finetune.learner import Learner, answer_loss
from kvcache_rag_lab.finetune.packing import IGNORED, lay_out
from kvcache_rag_lab.finetune.sources import (
    Encoded,
    Encoder,
    PlainSample,
    QAPair,
    QASample,
    TargetSpan,
)

TOLERANCE = 1e-3
TEMPLATE = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
TEXTS = ("dada fe hcab gah bdc", "ab hhg fedc abcd aabb hgf edcb gh fa bcade fg", "gfah bcd" * 6)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", 16)  # so that these short samples have several


SAMPLE = QASample(
    TEXTS, (QAPair("Who?", "fe"), QAPair("What is it that they saw?", "hgf edcb"), QAPair("x", "y"))
)


def make_learner(name: str, positions: Any = "reordered", **settings: Any) -> Learner:
    """A learner of a model that is not on disk."""
    config = FinetuneConfig(
        "unused", Path("unused"), JsonlData(Path("unused")), positions=positions, **settings
    )
    adapter = TransformersModel(build(name), packed_attention=False)
    use_tiled_attention(adapter.model)
    return Learner(adapter, byte_tokenizer(), TEMPLATE, True, config, torch.float32)


def encoder(learner: Learner) -> Encoder:
    return Encoder(PromptRenderer(learner.template, learner.tokenizer), learner.tokenizer)


def error(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).abs().max() / reference.std())


def query_logits(logits: Tensor, sample: Encoded, index: int) -> Tensor:
    """Logits of the tokens of one question's prompt, of a batch of this sample alone."""
    start = sum(len(span.prompt) + len(span.target) for span in sample.spans[:index])
    return logits[0, start : start + len(sample.spans[index].prompt)]


@pytest.fixture(scope="module", params=[name for name in SEVERAL if name not in BY_PLACE])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ensure_the_engines(learner: Learner, family: str, scheme: Any) -> None:
    """Logits of training are those of an engine, for every packed question."""
    engine = Engine(build(family), byte_tokenizer(), template=TEMPLATE, store=MemoryStore())
    learner.adapter.model.train()
    sample = encoder(learner).qa(SAMPLE)
    logits = learner.logits(learner.batch([sample]))
    assert logits.requires_grad
    full = learner.logits(learner.batch([sample.joined]))
    for index, asked in enumerate(SAMPLE.questions):
        stitched = engine.logits(asked.question, TEXTS, policy=Reuse(positions=scheme))
        assert error(query_logits(logits.detach(), sample, index), stitched) < TOLERANCE
        plain = engine.logits(asked.question, TEXTS, policy=FullRecompute())
        assert error(query_logits(full.detach(), sample, index), plain) < TOLERANCE
        assert error(stitched, plain) > 10 * TOLERANCE, "the two could not be told apart"


def test_training_logits_are_the_engines_for_every_packed_question(family: str) -> None:
    for scheme in ("reordered", "composite"):
        ensure_the_engines(make_learner(family, scheme), family, scheme)


def test_every_weight_of_an_attention_layer_gets_a_gradient(family: str) -> None:
    learner = make_learner(family)
    batch = learner.batch([encoder(learner).qa(SAMPLE)])
    torch.autograd.backward(answer_loss(learner.logits(batch), batch))
    silent = [
        name
        for name, parameter in learner.trained.items()
        if ("q_" in name or "k_proj" in name or "query_key" in name or "qkv" in name)
        and (parameter.grad is None or not parameter.grad.abs().sum() > 0)
    ]
    assert silent == []


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "mistral window", "deepseek_v3"])
def test_a_padded_batch_of_packed_questions_equals_separate_forwards(
    name: str, scheme: Any
) -> None:
    learner = make_learner(name, scheme)
    encode = encoder(learner)
    samples = [encode.qa(SAMPLE), encode.qa(QASample(TEXTS[:1], (QAPair("Why?", "because"),)))]
    with learner.measuring():
        batch = learner.batch(samples)
        together = learner.logits(batch)
        row = 0
        for row, sample in enumerate(samples):
            for index, span in enumerate(sample.spans):
                alone = learner.batch([Encoded(sample.prefix, sample.chunks, (span,))])
                known = alone.labels[0] != IGNORED
                own = batch.segments[row] == index
                assert torch.equal(batch.labels[row][own], alone.labels[0][known])
                reference = learner.logits(alone)[0][known]
                assert error(together[row][own], reference) < TOLERANCE
    assert row == 1


def test_labels_are_the_next_tokens_of_the_answers_only() -> None:
    learner = make_learner("llama")
    sample = Encoded(
        (5, 6), ((7, 8), (9,)), (TargetSpan((20, 21), (30, 31)), TargetSpan((22,), (32,)))
    )
    batch = learner.batch([sample])
    assert batch.ids.tolist() == [[5, 6, 7, 8, 5, 6, 9, 20, 21, 30, 31, 22, 32]]
    # 20 21 -> 30, 30 -> 31; 22 -> 32: counted from the first question on.
    assert batch.labels.tolist() == [[IGNORED, 30, 31, IGNORED, 32, IGNORED]]
    assert batch.segments.tolist() == [[-1, 0, 0, -1, 1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 5, 6]]
    assert batch.tokens == sample.row_tokens == 13
    assert sample.prompt_tokens == 5 + 4
    assert not lay_out(sample, "reordered").allowed[11, 7:11].any(), "sees another question"


def test_plain_text_and_dialogues_are_learned_whole() -> None:
    learner = make_learner("llama")
    encode = encoder(learner)
    text = encode.plain(PlainSample("abc"), 100)
    assert text is not None
    ids = learner.tokenizer("abc", add_special_tokens=False)["input_ids"]
    assert text == Encoded((), (), (TargetSpan((ids[0],), tuple(ids[1:])),))
    plain = learner.adapter.model(torch.tensor([ids])).logits
    assert error(learner.logits(learner.batch([text])).detach(), plain.detach()) < TOLERANCE
    cut = encode.plain(PlainSample("abcdef"), 3)
    assert cut is not None
    assert cut.row_tokens == 3
    assert encode.plain(PlainSample("a"), 3) is None
    turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})
    talk = encode.plain(PlainSample(messages=turns), 100)
    assert talk is not None
    said = talk.spans[0].prompt + talk.spans[0].target
    assert learner.tokenizer.decode(said) == "User: hi\nAssistant: yo<eos>"


@pytest.mark.parametrize("chat", [False, True])
def test_ids_are_the_engines_and_an_answer_ends_where_generation_stops(chat: bool) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    end = tokenizer.eos_token_id
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        end = tokenizer.convert_tokens_to_ids("<|end|>")
    engine = Engine(build("qwen2"), tokenizer, template=TEMPLATE, store=MemoryStore())
    sample = Encoder(PromptRenderer(TEMPLATE, tokenizer), tokenizer).qa(SAMPLE)
    for asked, span in zip(SAMPLE.questions, sample.spans, strict=True):
        ids = engine.tokenize(asked.question, TEXTS)
        assert (sample.prefix, sample.chunks, span.prompt) == (ids.prefix, ids.chunks, ids.query)
        written = tokenizer.decode(span.target[:-1])
        assert written == (asked.answer if chat else f" {asked.answer}")
        assert span.target[-1] == end
