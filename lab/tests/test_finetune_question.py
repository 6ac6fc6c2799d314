"""An adapter that acts on questions alone is trained as it will answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_finetune import rows, settings, write_rows
from test_finetune_learner import SAMPLE, TEXTS, TOLERANCE, encoder, error
from zoo import build, byte_tokenizer

from kvcache_rag import BestFew, Engine, FullRecompute, InvalidInputError, PromptTemplate, Reuse
from kvcache_rag.cli import main
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.adapters import trained_on_questions, trains_blocks
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag_lab.evaluation.runner import weights_digest
from kvcache_rag_lab.finetune import finetune
from kvcache_rag_lab.finetune.forward import DividedForward, MaskedForward
from kvcache_rag_lab.finetune.learner import Learner, answer_loss, distillation_loss
from kvcache_rag_lab.finetune.packing import IGNORED, Feed, divide
from kvcache_rag_lab.finetune.sources import (
    Encoded,
    Encoder,
    PlainSample,
    QAPair,
    QASample,
    open_data,
)
from kvcache_rag_lab.finetune.teacher import SPOKEN

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATED = {"lora": 4, "keep_adapter": True, "lora_tokens": "question", "plain_share": None}


@pytest.fixture(scope="module", params=["qwen2", "gemma3", "mistral window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build(request.param).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def learner(model: Path, **changes: Any) -> Learner:
    found = Learner.load(settings(model, Path("unused"), **{**ACTIVATED, **changes}))
    torch.manual_seed(1)
    for name, parameter in found.trained.items():
        if "lora_B" in name:  # else it does nothing yet
            torch.nn.init.normal_(parameter, std=0.3)
    return found


def gradients(of: Learner, logits: Tensor, batch: Any) -> dict[str, Tensor]:
    torch.autograd.backward(answer_loss(logits, batch))
    found = {
        name: value.grad.clone() for name, value in of.trained.items() if value.grad is not None
    }
    of.adapter.model.zero_grad()
    return found


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
@pytest.mark.parametrize("joined", [False, True])
def test_two_passes_are_one_in_which_the_adapter_heeds_questions_alone(
    model: Path, scheme: Any, joined: bool
) -> None:
    of = learner(model, positions=scheme)
    sample = encoder(of).qa(SAMPLE)
    sample = sample.joined if joined else sample
    found = of.batch([sample])
    logits = of.logits(found)
    # The specification: one masked pass, and the adapter's part of every layer times 0 or 1.
    plain = MaskedForward(of.adapter, scheme, torch.float32)
    batch = plain.batch([sample])
    acts = torch.zeros(batch.ids.shape[1])
    acts[-batch.kept :] = 1
    learned = batch.labels[0] != IGNORED
    assert torch.equal(found.labels[0], batch.labels[0][learned])
    assert torch.equal(found.segments[0], batch.segments[0][learned])
    hooks = [
        module.register_forward_hook(lambda _m, _i, given: given * acts[None, :, None])
        for name, module in of.adapter.model.named_modules()
        if name.endswith("lora_B.default")
    ]
    expected = plain.logits(batch)
    wanted = gradients(of, expected, batch)
    for hook in hooks:
        hook.remove()
    assert error(logits[0].detach(), expected[0, learned].detach()) < TOLERANCE
    everywhere = plain.logits(batch).detach()
    assert error(everywhere, expected.detach()) > 10 * TOLERANCE, "it could act on chunks, too"
    mine = gradients(of, logits, found)
    assert mine.keys() == wanted.keys() == of.trained.keys()
    for name, grad in wanted.items():
        assert error(mine[name], grad) < TOLERANCE, name


def test_padding_of_context_and_questions_changes_nothing(model: Path) -> None:
    of = learner(model)
    samples = [encoder(of).qa(SAMPLE), encoder(of).qa(QASample(TEXTS[:1], (QAPair("Why?", "so"),)))]
    with of.measuring():
        together = of.logits(of.batch(samples))
        for row, sample in enumerate(samples):
            alone = of.logits(of.batch([sample]))[0]
            assert error(together[row][-len(alone) :], alone) < TOLERANCE
            padded = divide(sample, "reordered", 64)
            assert padded.context % 64 == padded.asked % 64 == 0
            forward = of.forward
            assert isinstance(forward, DividedForward)
            assert error(forward._row(padded)[-len(alone) :], alone) < TOLERANCE
    (bare,) = of.forward.batch([Encoded((), (), samples[1].spans)]).rows  # type: ignore[attr-defined]
    assert bare.context == 0
    assert forward._row(bare).shape[0] == len(bare.labels)


def test_a_run_measures_what_it_changes_and_says_where_it_acts(tmp_path: Path, model: Path) -> None:
    config = settings(model, tmp_path / "out", **ACTIVATED)
    report = finetune(config)
    assert report.before.keys() == report.after.keys() == {"full", "block"}
    assert len(report.verdict) == 1
    assert trained_on_questions(config.out)
    assert not trained_on_questions(model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": 0, "keep_adapter": False}, "set lora to their rank"),
        ({"keep_adapter": False}, "set keep_adapter"),
        ({"plain_share": 0.3}, "set plain_share to 0"),
        ({"gradient_checkpointing": True}, "leave out gradient_checkpointing"),
        ({"objective": "distillation", "block_share": 0.0}, "its control is the model itself"),
    ],
)
def test_what_cannot_act_on_questions_alone_is_refused(changes: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        settings(Path("m"), Path("unused"), **{**ACTIVATED, **changes})


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    build("bamba").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match='set lora_tokens to "all"'):
        learner(tmp_path)


def test_the_command_trains_what_an_engine_answers_with(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "qa.jsonl", rows())
    out = tmp_path / "out"
    words = ["finetune", str(model), "--data", str(data), "--out", str(out), "--rate", "1e-2"]
    recipe = ["--lora", "4", "--lora-tokens", "question", "--steps", "4", "--device", "cpu"]
    assert main([*words, *recipe, "--holdout", "2", "--quiet"]) == 0
    assert "document questions, stitched" in capsys.readouterr().out
    plain = Engine.from_pretrained(model)
    for adapted in (Engine.from_pretrained(out), Engine.from_pretrained(model, adapter=out)):
        assert adapted.policy == Reuse()
        assert adapted.spec == plain.spec
        documents = ["Ada has 3.", "Bob has 4."]
        found, wanted = (one.logits("What?", documents, policy=Reuse()) for one in (adapted, plain))
        assert error(found, wanted) > TOLERANCE


@pytest.mark.parametrize("changes", [{}, {"lora_tokens": "all", "plain_share": 0.0}])
def test_the_teacher_is_the_model_itself_over_the_whole_context(model: Path, changes: Any) -> None:
    of = learner(model, objective="distillation", **changes)
    samples = [encoder(of).qa(SAMPLE), encoder(of).qa(QASample(TEXTS[:1], (QAPair("Why?", "so"),)))]
    lesson = of.lesson(samples)
    spans = [span for sample in lesson.samples for span in sample.spans]
    plain = Engine(of.peft, of.tokenizer, template=of.template, policy=FullRecompute())
    asked = [(one, sample) for sample in (SAMPLE,) for one in sample.questions]
    with of.measuring(), of.peft.disable_adapter():
        for (question, context), span in zip(asked, spans, strict=False):
            said = plain.generate(question.question, context.documents, max_new_tokens=SPOKEN)
            assert span.target == said.token_ids
        full = of.batch([sample.joined for sample in lesson.samples])
        wanted = of.logits(full)[full.labels != IGNORED]
        stitched = of.batch(lesson.samples)
        unlike = of.logits(stitched)[stitched.labels != IGNORED]
    assert len(lesson.logits) == sum(len(span.target) for span in spans)
    assert error(lesson.logits, wanted) < TOLERANCE
    assert error(unlike, wanted) > 10 * TOLERANCE
    with of.measuring():
        own = of.logits(stitched)
        found = float(distillation_loss(own, lesson.logits, stitched))
        by_torch = torch.nn.functional.kl_div(
            own[stitched.labels != IGNORED].log_softmax(-1),
            wanted.log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
    assert found == pytest.approx(float(by_torch), rel=1e-3)
    torch.autograd.backward(distillation_loss(of.logits(stitched), lesson.logits, stitched))
    assert all(value.grad is not None for value in of.trained.values())


def test_the_control_acts_where_its_adapter_does_and_says_so(tmp_path: Path, model: Path) -> None:
    finetune(settings(model, tmp_path / "control", **ACTIVATED, block_share=0.0))
    assert trained_on_questions(tmp_path / "control")
    assert not trains_blocks(tmp_path / "control")
    control, plain = (
        Engine.from_pretrained(model, adapter=one) for one in (tmp_path / "control", "none")
    )
    assert control.spec == plain.spec
    assert control.policy == BestFew(), "zoo models say that they were trained for blocks"
    assert weights_digest(control) != weights_digest(plain), "answers are not of one model"


def test_the_teacher_answers_where_activations_are_computed_twice(model: Path) -> None:
    options = {"objective": "distillation", "lora_tokens": "all", "plain_share": 0.0}
    twice, once = (learner(model, **options, gradient_checkpointing=one) for one in (True, False))
    twice.adapter.model.train()
    sample = encoder(once).qa(SAMPLE)
    wanted = once.lesson([sample])
    found = twice.lesson([sample])
    assert found.samples == wanted.samples
    assert error(found.logits, wanted.logits) < TOLERANCE
    assert twice.adapter.model.training


def test_distilled_texts_stay_what_the_model_made_of_them(model: Path) -> None:
    of = learner(model, objective="distillation", lora_tokens="all", plain_share=0.5)
    text = encoder(of).plain(PlainSample("Ada has 3 and Bob has 4."), 64)
    assert text is not None
    batch = of.batch([text])
    wanted = of.untouched_logits(batch)
    assert len(wanted) == int((batch.labels != IGNORED).sum())
    with of.measuring(), of.peft.disable_adapter():
        own = of.logits(batch)[batch.labels != IGNORED]
    assert error(wanted, own) < TOLERANCE
    # Of an adapter that changes nothing there is nothing to learn, unlike from the texts.
    for name, value in of.trained.items():
        if ".lora_B." in name:
            torch.nn.init.zeros_(value)
    with of.measuring():
        logits = of.logits(batch)
        assert float(distillation_loss(logits, wanted, batch)) == pytest.approx(0, abs=1e-6)
        assert float(answer_loss(logits, batch)) > 0.1


@pytest.mark.parametrize("model", ["qwen2", "mistral window"], indirect=True)  # others say nothing
def test_distillation_brings_stitched_chunks_nearer_to_full_prefill(
    tmp_path: Path, model: Path
) -> None:
    of = Learner.load(settings(model, tmp_path, **ACTIVATED, objective="distillation"))
    sample = encoder(of).qa(SAMPLE)
    lesson = of.lesson([sample])
    batch, teacher = of.batch(lesson.samples), lesson.logits
    optimizer = torch.optim.Adam(of.trained.values(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = distillation_loss(of.logits(batch), teacher, batch)
        losses.append(float(loss.detach()))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    report = finetune(settings(model, tmp_path / "out", **ACTIVATED, objective="distillation"))
    assert report.before["full"].loss == pytest.approx(0, abs=1e-5), "it is its own teacher"
    assert report.before["full"].exact_match == 1
    assert report.before["block"].loss > 1e-3


def test_instructions_take_turns(model: Path, tmp_path: Path) -> None:
    said = ("Read.", "Look here:")
    config = settings(model, tmp_path / "out", **ACTIVATED, instructions=said)
    data = open_data(config.data, None, seed=0, holdout=2)
    tokenizer = byte_tokenizer()
    encoders = [
        Encoder(PromptRenderer(PromptTemplate(system=one), tokenizer), tokenizer) for one in said
    ]
    feed = Feed(config, data, encoders, 10_000)
    found = [sample.prefix for _ in range(6) for sample in feed.next().samples]
    assert found[:4] == [encoders[number % 2].renderer.prefix_ids for number in range(4)]
    assert found[0] != found[1]
    assert finetune(config).steps == config.steps
