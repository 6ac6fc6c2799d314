"""An auxiliary model learns where to look: its training sees what `Auxiliary` sees."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reader_file import reader_data
from test_finetune_learner import TEMPLATE, TEXTS, encoder, make_learner
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, MemoryStore
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData, finetune
from kvcache_rag_lab.finetune.selection import (
    AttentionView,
    SelectionEncoder,
    Teacher,
    relevant_characters,
    selection_loss,
)
from kvcache_rag_lab.finetune.sources import Encoded, QAPair, QASample, TargetSpan

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = QASample(TEXTS, (QAPair("Who?", "fe", (1,)), QAPair("What is it?", "h", (0, 2))))


def by_token(found: Any) -> torch.Tensor:
    """What `Auxiliary` says of every token, wrappers included."""
    return torch.cat([chunk.weights for chunk in found])


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "cohere2", "gpt_neox", "gpt_oss"])
def test_the_attention_in_training_is_the_auxiliary_models(name: str) -> None:
    engine = Engine(build(name), byte_tokenizer(), template=TEMPLATE, store=MemoryStore())
    auxiliary = Auxiliary(engine)
    learner = make_learner(name)
    watched = AttentionView(learner)
    encode = SelectionEncoder(encoder(learner), learner.tokenizer, relevant_characters)
    short = QASample(TEXTS[:1], (QAPair("Why so?", "x", (0,)),))
    samples = [encode.qa(SAMPLE), encode.qa(short)]
    assert all(samples)
    together = watched.question_weights([one for one in samples if one])
    for sample, found in zip((SAMPLE, short), together, strict=True):
        for asked, weights in zip(sample.questions, found, strict=True):
            assert weights.requires_grad
            expected = by_token(auxiliary.attention(asked.question, sample.documents))
            assert torch.allclose(weights.detach(), expected, atol=1e-5, rtol=1e-3)
            assert expected.std() > 1e-5, "nothing to tell apart"


def test_the_loss_is_the_divergence_from_the_target() -> None:
    learner = make_learner("qwen2")
    watched = AttentionView(learner)
    bare = encoder(learner).qa(SAMPLE)
    prompt = bare.spans[0].prompt
    tokens = sum(map(len, bare.chunks))
    weights = watched.question_weights(
        [Encoded(bare.prefix, bare.chunks, (TargetSpan(prompt, ()),))]
    )
    found = (weights[0][0] / weights[0][0].sum()).tolist()

    def loss(target: list[float]) -> float:
        span = TargetSpan(prompt, (), tuple(target))
        row = Encoded(bare.prefix, bare.chunks, (span,))
        return float(selection_loss(watched, [row]).detach())

    assert loss([7 * one for one in found]) == pytest.approx(0, abs=1e-5)
    alone = [0.0] * tokens
    alone[5] = 2.0
    assert loss(alone) == pytest.approx(-math.log(found[5]), rel=1e-4)


def test_without_a_teacher_the_relevant_documents_are_the_target() -> None:
    learner = make_learner("qwen2")
    encode = SelectionEncoder(encoder(learner), learner.tokenizer, relevant_characters)
    sample = encode.qa(SAMPLE)
    assert sample is not None
    sizes = [len(chunk) for chunk in sample.chunks]
    parts = torch.split(torch.tensor(sample.spans[0].weights), sizes)
    assert [float(part.sum()) for part in parts] == [0, len(TEXTS[1]), 0]
    wrapper = len(TEMPLATE.chunk_start)
    assert parts[1].tolist()[:wrapper] == [0.0] * wrapper
    unknown = QASample(TEXTS, (QAPair("Who?", "fe"),))
    assert encode.qa(unknown) is None
    half = QASample(TEXTS, (*unknown.questions, SAMPLE.questions[0]))
    known = encode.qa(half)
    assert known is not None
    assert known.spans == sample.spans[:1]


def test_a_teachers_target_is_its_attention_under_full_prefill() -> None:
    teacher, learner = make_learner("llama"), make_learner("qwen2")
    target = Teacher(AttentionView(teacher), encoder(teacher))
    characters = target(SAMPLE)[1]
    assert characters is not None
    assert [len(one) for one in characters] == [len(text) for text in TEXTS]
    ids = encoder(teacher).qa(SAMPLE)
    model = build("llama")
    model.set_attn_implementation("eager")
    context = list(ids.joined.prefix)
    prompt = ids.spans[1].prompt
    output = model(torch.tensor([[*context, *prompt]]), output_attentions=True)
    weights = output.attentions[-1][0].mean(0)[len(context) :].mean(0)
    start = len(ids.prefix) + len(ids.chunks[0]) + len(TEMPLATE.chunk_start)
    expected = weights[start : start + len(TEXTS[1])].double()  # one token is one character
    assert torch.allclose(characters[1], expected, atol=1e-6)
    encode = SelectionEncoder(encoder(learner), learner.tokenizer, target)
    sample = encode.qa(SAMPLE)
    assert sample is not None
    assert sum(sample.spans[1].weights) == pytest.approx(float(torch.cat(list(characters)).sum()))


@pytest.mark.parametrize(("teacher", "lora"), [(None, 0), ("tiny", 4)])
def test_an_auxiliary_model_learns_to_look(tmp_path: Path, teacher: Any, lora: int) -> None:
    small = tmp_path / "small"
    build("qwen2").save_pretrained(small)
    byte_tokenizer().save_pretrained(small)
    config = FinetuneConfig(
        str(small),
        tmp_path / "out",
        reader_data(documents=3),
        objective="selection",
        teacher=teacher,
        lora=lora,
        steps=8,
        rate=1e-2 if lora else 1e-3,
        batch_tokens=1000,
        accumulate=1,
        holdout=4,
        device="cpu",
    )
    report = finetune(config)
    assert set(report.before) == {"plain", "selection"}
    assert report.change("selection").high < 0
    assert "divergence of attention from its target fell" in report.verdict[-1]
    auxiliary = Auxiliary.from_pretrained(tmp_path / "out")
    assert len(auxiliary.scores("Who?", ["a b c"])[0]) == 5


def test_settings_that_no_auxiliary_model_has_are_refused(tmp_path: Path) -> None:
    def make(**changes: Any) -> FinetuneConfig:
        return FinetuneConfig("tiny", tmp_path / "out", JsonlData(tmp_path / "qa.jsonl"), **changes)

    with pytest.raises(InvalidInputError, match="reordered chunks"):
        make(objective="selection", positions="composite")
    with pytest.raises(InvalidInputError, match="gradient_checkpointing"):
        make(objective="selection", gradient_checkpointing=True)
    with pytest.raises(InvalidInputError, match='objective="selection"'):
        make(teacher="tiny")
    with pytest.raises(InvalidInputError, match="rank"):
        make(keep_adapter=True)


def test_data_without_relevant_documents_is_said(tmp_path: Path) -> None:
    row = {"question": "q?", "answers": ["a"], "documents": ["d", "e"]}
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps({**row, "documents": [f"d{i}"]}) + "\n" for i in range(4)))
    config = FinetuneConfig(
        "tiny", tmp_path / "out", JsonlData(path), objective="selection", device="cpu"
    )
    with pytest.raises(InvalidInputError, match="mark no document as relevant"):
        finetune(config)
