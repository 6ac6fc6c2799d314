"""What adapters train, and the checkpoint that another machine goes on from."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from test_finetune import settings
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, PromptTemplate, Reuse
from kvcache_rag.models.adapters import WEIGHTS, trains_blocks
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag_lab.finetune import FinetuneConfig, finetune
from kvcache_rag_lab.finetune.adapters import lora_modules, packet_tokens, with_packet
from kvcache_rag_lab.finetune.learner import Learner
from kvcache_rag_lab.finetune.loop import RESUMED_WARM_UP, Trainer
from kvcache_rag_lab.finetune.run import _Run
from kvcache_rag_lab.finetune.sources import Encoder, QAPair, QASample

if TYPE_CHECKING:
    from kvcache_rag_lab.finetune.packing import Portion

CONTROLS = ("<|box|>", "<|quad|>", "<|reserved_1|>", "<|chat|>", "<|file|>", "<|fim|>")
CHAT = "{% for m in messages %}<|chat|>{{ m.content }}{% endfor %}<|chat|>"
SAMPLE = QASample(("dada fe hcab", "ab hhg fedc"), (QAPair("Who?", "fe"),))


def control_tokenizer() -> Any:
    """Bytes, and control tokens of which a chat uses one."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokens = [AddedToken(text, special=True, normalized=False) for text in CONTROLS]
    tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module", params=["qwen2", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk whose vocabulary has control tokens that no chat uses."""
    folder = tmp_path_factory.mktemp(request.param)
    network = build("qwen2" if request.param == "tied" else request.param)
    if request.param == "tied":  # as Qwen2.5-0.5B and SmolLM2 are
        network.config.tie_word_embeddings = True
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(network.config)
    network.save_pretrained(folder)
    control_tokenizer().save_pretrained(folder)
    return folder


def learner(model: Path, **changes: Any) -> Learner:
    return Learner.load(settings(model, Path("unused"), **changes))


def encoded(of: Learner) -> Any:
    return Encoder(PromptRenderer(of.template, of.tokenizer), of.tokenizer).qa(SAMPLE)


def test_adapters_of_attention_are_on_its_four_projections_alone(model: Path) -> None:
    attention, every = (
        {name.split(".lora_")[0].rpartition(".")[2] for name in learner(model, **changes).trained}
        for changes in ({"lora": 4, "lora_modules": "attention"}, {"lora": 4})
    )
    assert attention == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert every - attention == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("name", ["gpt_neox", "phi3", "deepseek_v3"])
def test_projections_of_other_names_are_said(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"does not have self_attn with.*all-linear"):
        lora_modules(build(name), "attention")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_packet_trains_its_vectors_alone_around_each_chunk(model: Path, precision: str) -> None:
    of = learner(model, packet=2, precision=precision)
    (trained,) = of.trained.values()
    assert trained.shape == (4, of.adapter.config.hidden_size)
    assert trained.dtype == torch.float32
    ids = list(packet_tokens(of.tokenizer, PromptTemplate(), 2).values())
    sample = encoded(of)
    for chunk in sample.chunks:
        assert [*chunk[:2], *chunk[-2:]] == ids
        assert not set(ids) & {*chunk[2:-2]}
    assert not set(ids) & {*sample.prefix, *sample.spans[0].prompt}
    batch = of.batch([sample])
    torch.autograd.backward(of.logits(batch).sum())
    assert trained.grad is not None
    assert bool((trained.grad.abs().sum(-1) > 0).all()), "a vector that nothing is learned by"


def test_a_packet_takes_reserved_tokens_first_and_none_that_is_used() -> None:
    tokenizer = control_tokenizer()
    tokenizer.chat_template = CHAT
    template = PromptTemplate(chunk_end="<|file|>")
    found = packet_tokens(tokenizer, template, 2)
    assert [*found] == ["<|reserved_1|>", "<|box|>", "<|quad|>", "<|fim|>"]
    wrapped = with_packet(template, [*found]).wrap("text")
    assert wrapped == "<|reserved_1|><|box|>Document: text<|file|><|quad|><|fim|>"
    with pytest.raises(InvalidInputError, match=r"needs 6 control tokens.*has 4"):
        packet_tokens(tokenizer, template, 3)
    with pytest.raises(InvalidInputError, match="has 0; choose a smaller packet"):
        packet_tokens(byte_tokenizer(), template, 1)


@pytest.mark.parametrize("keep", [False, True])
def test_a_packet_is_answered_with_as_it_was_trained(
    model: Path, tmp_path: Path, keep: bool
) -> None:
    out = tmp_path / "packet"
    finetune(settings(model, out, packet=2, rate=0.1, keep_adapter=keep))
    base, tuned = (Engine.from_pretrained(place, device="cpu") for place in (model, out))
    assert tuned.template.chunk_start == f"<|reserved_1|><|box|>{base.template.chunk_start}"
    asked = (SAMPLE.questions[0].question, SAMPLE.documents)
    found = tuned.logits(*asked, policy=Reuse())
    if keep:
        named = Engine.from_pretrained(model, adapter=out, device="cpu")
        assert torch.equal(named.logits(*asked, policy=Reuse()), found)
        of = learner(model, packet=2)
        of.load_adapter_weights(
            {name: value.bfloat16() for name, value in load_file(out / WEIGHTS).items()}
        )
        sample = encoded(of)
        with of.measuring():
            batch = of.batch([sample])
            # The token behind the question, of those of the answer that follow.
            logits = of.logits(batch)[0, : len(sample.spans[0].prompt)]
        assert torch.allclose(logits, found, atol=0.05), "as far as bfloat16 rounds vectors"
    untrained = Engine.from_pretrained(model, template=tuned.template, device="cpu")
    assert (untrained.logits(*asked, policy=Reuse()) - found).abs().max() > 0.05


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packet": 2, "lora": 4}, "a packet is trained alone"),
        ({"packet": -1}, "packet must not be negative"),
        ({"lora": 4, "lora_modules": "heads"}, "lora_modules must be one of"),
        ({"checkpoint": Path("c")}, "checkpoint holds an adapter alone"),
        ({"resume": True}, "name its folder"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        settings("tiny", Path("unused"), **changes)


def test_weights_of_another_adapter_are_not_taken_over(model: Path) -> None:
    small, large = learner(model, lora=2), learner(model, lora=4)
    with pytest.raises(InvalidInputError, match="not those of this adapter"):
        large.load_adapter_weights(small.adapter_weights())


def train(config: FinetuneConfig, steps: int) -> list[tuple[float, Portion]]:
    """So many steps as on a machine that then goes away; the rate and data of each pass."""
    seen: list[tuple[float, Portion]] = []
    done: list[float] = []
    real, lesson = Trainer._step, _Run._lesson

    def step(self: Trainer) -> dict[str, Any]:
        if len(done) == steps:
            raise InterruptedError
        done.append(self.rate())
        return real(self)

    def learn(self: _Run, portion: Portion) -> Any:
        seen.append((done[-1], portion))
        return lesson(self, portion)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        patch.setattr(_Run, "_lesson", learn)
        with suppress(InterruptedError):
            finetune(config)
    return seen


@pytest.mark.parametrize("model", ["tied"], indirect=True)
def test_another_machine_goes_on_from_the_travelling_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    total, stop = 16, 3
    config = settings(
        model, tmp_path / "here", steps=total, save_every=stop, keep_adapter=True, packet=1
    )
    whole = train(config, total)
    travelling = tmp_path / "travelling"
    first = dataclasses.replace(config, out=tmp_path / "first", checkpoint=travelling)
    train(first, stop + 1)  # the last step is lost with the machine
    saved = torch.load(first.work_folder / "checkpoint.pt", weights_only=True)["weights"]
    rounded = load_file(travelling / WEIGHTS)
    assert {value.dtype for value in rounded.values()} == {torch.bfloat16}

    taken: dict[str, torch.Tensor] = {}
    real = Trainer.take_up

    def take_up(self: Trainer, carried: Any) -> None:
        real(self, carried)
        taken.update({name: value.detach().clone() for name, value in self._trained.items()})

    # Its own copy of the model, elsewhere.
    shutil.copytree(model, tmp_path / "copy")
    other = dataclasses.replace(
        first, model=str(tmp_path / "copy"), out=tmp_path / "there", resume=True, precision="bf16"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_up", take_up)
        rest = train(other, total)
    assert taken.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(taken[name], value.bfloat16().float())
    per_step = config.accumulate
    assert [portion for _, portion in rest] == [portion for _, portion in whole[stop * per_step :]]
    rates = [rate for rate, _ in rest][::per_step]
    warm = [min(1.0, (number + 1) / RESUMED_WARM_UP) for number in range(len(rates))]
    expected = [config.rate_at(stop + number) * factor for number, factor in enumerate(warm)]
    assert rates == pytest.approx(expected)
    assert rates[RESUMED_WARM_UP] == config.rate_at(stop + RESUMED_WARM_UP)
    lines = (other.out / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, total + 1)]


@pytest.mark.parametrize("model", ["tied"], indirect=True)
def test_a_run_that_was_taken_up_goes_on_bit_for_bit_in_its_own_folder(
    model: Path, tmp_path: Path
) -> None:
    config = settings(
        *(model, tmp_path / "a"), lora=4, steps=8, save_every=2, keep_adapter=True,
        checkpoint=tmp_path / "travelling",
    )  # fmt: skip
    train(config, 2)
    shutil.copytree(tmp_path / "travelling", tmp_path / "copy")
    straight = dataclasses.replace(config, out=tmp_path / "b", resume=True)
    finetune(straight)
    stopped = dataclasses.replace(
        config, out=tmp_path / "c", resume=True, checkpoint=tmp_path / "copy"
    )
    train(stopped, 3)
    finetune(stopped)
    left, right = (load_file(one.out / WEIGHTS) for one in (straight, stopped))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("model", ["tied"], indirect=True)
def test_a_travelling_checkpoint_is_an_adapter_and_is_not_overwritten_unasked(
    model: Path, tmp_path: Path
) -> None:
    travelling = tmp_path / "travelling"
    config = settings(
        *(model, tmp_path / "a"), lora=4, save_every=1, rate=1e-2, checkpoint=travelling
    )
    train(config, 2)
    assert trains_blocks(travelling)
    base = Engine.from_pretrained(model, device="cpu").logits("x?", ["ab", "cd"])
    tuned = Engine.from_pretrained(model, adapter=travelling, device="cpu")
    assert (tuned.logits("x?", ["ab", "cd"]) - base).abs().max() > 1e-4
    anew = dataclasses.replace(config, out=tmp_path / "b")
    with pytest.raises(InvalidInputError, match="checkpoint of step 2; say resume"):
        finetune(anew)
    for changes, name in (({"seed": 5}, "data digest|seed"), ({"steps": 9}, "steps")):
        with pytest.raises(InvalidInputError, match=f"another .*({name})"):
            finetune(dataclasses.replace(anew, resume=True, **changes))
    (travelling / WEIGHTS).write_bytes(b"half")
    with pytest.raises(InvalidInputError, match="no checkpoint that can be read"):
        finetune(dataclasses.replace(anew, resume=True))
