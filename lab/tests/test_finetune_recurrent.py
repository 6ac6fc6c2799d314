"""Models with recurrent layers learn from stitched chunks: forward, gradients, whole runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reader_file import reader_data
from test_finetune_learner import SAMPLE, TEXTS, encoder, ensure_the_engines, error, make_learner
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, Reuse
from kvcache_rag.cli import main
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.prompt.template import FILE_NAME
from kvcache_rag_lab.finetune.learner import Learner, answer_loss
from kvcache_rag_lab.finetune.sources import Encoded, QAPair, QASample, TargetSpan

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 1e-3
if not HYBRIDS:
    pytest.skip("this transformers keeps no states as 5.23", allow_module_level=True)

# Of each recurrence; without rotary positions; without attention; without a kernel that is known.
KINDS = ("qwen3_5", "bamba", "granitemoehybrid", "mamba2", "lfm2", "jamba")
CASES = [(name, "reordered") for name in HYBRIDS] + [(name, "composite") for name in KINDS]


def loss_of(learner: Learner, sample: Encoded) -> torch.Tensor:
    batch = learner.batch([sample])
    return answer_loss(learner.logits(batch), batch)


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_training_logits_are_the_engines(family: str, scheme: Any) -> None:
    learner = make_learner(family, scheme)
    if scheme == "composite" and learner.adapter.measured.by_place:
        with pytest.raises(UnsupportedModelError, match="cannot overlap"):
            learner.forward.ensure_possible()
        return
    learner.forward.ensure_possible()
    ensure_the_engines(learner, family, scheme)


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "lfm2", "mamba"])
def test_gradients_are_those_of_the_stitched_loss(family: str) -> None:
    """Through the composition, too: the first chunk reaches the loss through states and keys."""
    learner = make_learner(family)
    sample = encoder(learner).qa(SAMPLE)
    torch.autograd.backward(loss_of(learner, sample))
    silent = [n for n, one in learner.trained.items() if one.grad is None or not one.grad.any()]
    assert silent == []
    inner = [n for n in learner.trained if n.rsplit(".", 1)[-1] in ("A_log", "dt_bias")]
    inner += [n for n in learner.trained if "conv" in n and n.endswith("weight")]
    with torch.no_grad():
        for name in inner:
            parameter, step = learner.trained[name], 5e-4
            assert parameter.grad is not None
            # Along the gradient the loss grows by its length.
            length = float(parameter.grad.norm())
            towards = parameter.grad * (step * float(parameter.norm()) / length)
            ends = []
            for sign in (1, -2):
                parameter.add_(towards, alpha=sign)
                ends.append(float(loss_of(learner, sample)))
            parameter.add_(towards)
            slope = (ends[0] - ends[1]) / (2 * float(towards.norm()))
            assert slope == pytest.approx(length, rel=0.03, abs=3e-3), name


@pytest.mark.parametrize("family", KINDS)
def test_a_batch_of_several_samples_is_one_by_one(family: str) -> None:
    learner = make_learner(family)
    encode = encoder(learner)
    bare = Encoded((), ((9, 8, 7), (7, 7, 8, 9)), (TargetSpan((5, 6), (7,)),))
    text = Encoded((), (), (TargetSpan((5,), (6, 7, 8)),))
    samples = [encode.qa(SAMPLE), encode.qa(QASample(TEXTS[:1], (QAPair("Why?", "so"),)))]
    samples += [bare, text]
    with learner.measuring():
        batch = learner.batch(samples)
        together = learner.logits(batch)
        for row, sample in enumerate(samples):
            alone = learner.batch([sample])
            assert torch.equal(batch.labels[row, -alone.kept :], alone.labels[0])
            assert torch.equal(together[row, -alone.kept :], learner.logits(alone)[0])
            assert (batch.segments[row, : -alone.kept] == -1).all()
    assert batch.tokens == sum(learner.batch([sample]).tokens for sample in samples)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "lfm2", "jamba"])
def test_without_a_prefix_gradients_get_through(family: str) -> None:
    learner = make_learner(family)
    bare = Encoded((), ((9, 8), (7, 7, 8), (9, 8)), (TargetSpan((5, 6), (7,)),))
    torch.autograd.backward(loss_of(learner, bare))
    assert all(one.grad is None or one.grad.isfinite().all() for one in learner.trained.values())
    single = Encoded((5,), ((9,),), bare.spans)
    with pytest.raises(InvalidInputError, match="document of a single token"):
        learner.batch([single])


@pytest.mark.parametrize("family", ["qwen2", "bamba"])
def test_bfloat16_computes_close_to_float32(family: str) -> None:
    exact, rounded = make_learner(family), make_learner(family, precision="bf16")
    sample = encoder(exact).qa(SAMPLE)
    reference = exact.logits(exact.batch([sample])).detach()[0]
    batch = rounded.batch([sample])
    if family == "qwen2":
        assert batch.ids.shape[1] % 64 == batch.kept % 64 == 0, "many shapes cost memory"
    found = rounded.logits(batch)
    torch.autograd.backward(found.mean())
    assert 1e-4 < error(found.detach()[0, -len(reference) :], reference) < 0.5


# ------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    build("granitemoehybrid").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    template = {"system": "Read.\n", "chunk_start": "<d>", "chunk_end": "</d>"}
    (folder / FILE_NAME).write_text(json.dumps(template))
    return folder


def command(small: Path, out: Path, *more: str) -> list[str]:
    data = ("--data", str(reader_data().path), "--batch-tokens", "700", "--holdout", "2")
    options = ("--steps", "4", "--rate", "1e-3", "--device", "cpu", "--quiet")
    return ["finetune", str(small), "--out", str(out), *data, *options, *more]


def test_the_command_trains_a_model(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert main(command(small, out, "--lora", "4", "--block-share", "0.5")) == 0
    report = json.loads((out / "report.json").read_text())
    before, after = report["measures"]["block"]["loss"]
    assert after < before
    engine = Engine.from_pretrained(out, device="cpu")
    assert engine.policy == Reuse(), "it was not told that it was trained for blocks"
    assert engine.generate("x?", ["a b", "c d"], max_new_tokens=1).metrics.reused_tokens == 0
    assert engine.generate("x?", ["a b", "c d"], max_new_tokens=1).metrics.reused_tokens > 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--gradient-checkpointing", "gradient_checkpointing"),
        ("--positions composite", "reordered"),
    ],
)
def test_what_recurrent_layers_do_not_take_is_refused_by_name(
    small: Path, tmp_path: Path, more: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(small, tmp_path / "model", *more.split())) == 2
    said = capsys.readouterr().err
    assert "granitemoehybrid: " in said
    assert named in said
