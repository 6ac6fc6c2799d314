"""The reader's tokenizer, network and packaged model agree with transformers; training runs."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvcache_rag_lab.reader import KINDS, make_corpus, make_example, model_path
from kvcache_rag_lab.reader.generator import READING
from kvcache_rag_lab.reader.language import INSTRUCTION
from kvcache_rag_lab.scoring.statistics import Share, wilson
from training.reader.batches import EncodedExample, encode, pack, read
from training.reader.check import as_json, as_table, check, load_reader
from training.reader.check import main as check_main
from training.reader.data import training_batch
from training.reader.loop import Trainer
from training.reader.network import Network, NetworkConfig
from training.reader.scoring import prefix_ids
from training.reader.settings import TrainConfig
from training.reader.tokenizer import WordEncoder, build_tokenizer
from training.reader.train import main as train_main
from training.reader.train import train
from training.reader.wiring import wire

if TYPE_CHECKING:
    from pathlib import Path

SMALL = NetworkConfig(width=32, layers=3, heads=4, feed_forward=64)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> WordEncoder:
    return WordEncoder(tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


@pytest.mark.parametrize(
    "text",
    ["Velora Tamuk", "12345", "not found", "A; B", "A, B", "Quixley", "x", string.ascii_letters],
)
def test_answers_survive_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_every_printable_character_has_a_token(tokenizer: Any) -> None:
    printable = map(chr, range(33, 127))
    assert all(tokenizer.unk_token_id not in ids_of(tokenizer, code) for code in printable)
    assert tokenizer.unk_token_id in ids_of(tokenizer, "日本")
    assert ids_of(tokenizer, "") == []


def test_white_space_makes_no_difference(tokenizer: Any) -> None:
    plain = ids_of(tokenizer, "<doc>Velora was born in Lispan. It rains.")
    assert ids_of(tokenizer, "<doc> Velora  was born\nin Lispan.\n\tIt rains. \n") == plain


def test_pieces_encode_like_the_whole(tokenizer: Any, encoder: WordEncoder) -> None:
    corpus = make_corpus(1, documents=12, questions=12, unanswerable=2)
    texts = [*corpus.documents, *(question.text for question in corpus.questions)]
    for text in texts:
        assert encoder.encode(text) == ids_of(tokenizer, text)
    whole = "<bos>" + INSTRUCTION + "".join(f"<doc>{text}" for text in texts) + "<q>Who?<a>"
    pieces = ["<bos>" + INSTRUCTION, *(f"<doc>{text}" for text in texts), "<q>Who?<a>"]
    assert ids_of(tokenizer, whole) == [i for piece in pieces for i in ids_of(tokenizer, piece)]


def test_packaged_tokenizer_is_the_one_the_code_builds(tokenizer: Any) -> None:
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_chat_template(tokenizer: Any) -> None:
    def render(*messages: tuple[str, str], prompt: bool = True) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt
        )
        return text

    system = ("system", INSTRUCTION)
    assert render(system, ("user", "Q?")) == f"<bos>{INSTRUCTION}<q>Q?<a>"
    assert render(("user", "Q?")) == "<bos><q>Q?<a>"
    turns = render(system, ("user", "Q?"), ("assistant", "A"), ("user", "R?"), prompt=False)
    assert turns == f"<bos>{INSTRUCTION}<q>Q?<a>A<eos><q>R?"


def small_examples(encoder: WordEncoder) -> list[EncodedExample]:
    return [encode(make_example(seed, documents=3, questions=3), encoder) for seed in range(3)]


def as_transformers(network: Network) -> Any:
    twin = LlamaForCausalLM(network.config.to_transformers())
    twin.load_state_dict(network.to_transformers_state(), strict=False)
    twin.tie_weights()
    return twin.eval()


@torch.no_grad()
def test_network_equals_transformers_with_full_prefill(encoder: WordEncoder) -> None:
    network, prefix = Network(SMALL), prefix_ids(encoder)
    wire(network)
    twin = as_transformers(network)
    examples = small_examples(encoder)
    batch = pack(examples, prefix, block=False)
    asked = network.logits(read(network, batch)[0])
    for row, example in enumerate(examples):
        for index, question in enumerate(example.questions):
            ids = sum(example.chunks, list(prefix)) + question.prompt + question.answer
            expected = twin(torch.tensor([ids])).logits[0]
            ours = asked[row][batch.segments[row] == index]
            torch.testing.assert_close(ours, expected[-len(ours) :], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_network_equals_transformers_with_stitched_chunks(encoder: WordEncoder) -> None:
    """Every chunk has its own copy of the prefix; the question sees the first copy only."""
    network, prefix = Network(SMALL), prefix_ids(encoder)
    wire(network)
    twin = as_transformers(network)
    examples = small_examples(encoder)
    batch = pack(examples, prefix, block=True)
    asked = network.logits(read(network, batch)[0])
    for row, example in enumerate(examples):
        question = example.questions[0]
        ids, positions, owner = list(prefix), list(range(len(prefix))), [0] * len(prefix)
        kept = [True] * len(prefix)
        start = len(prefix)
        for number, chunk in enumerate(example.chunks, 1):
            ids += prefix + chunk
            positions += range(start - len(prefix), start + len(chunk))
            owner += [number] * (len(prefix) + len(chunk))
            kept += [False] * len(prefix) + [True] * len(chunk)
            start += len(chunk)
        tokens = question.prompt + question.answer
        query = len(example.chunks) + 1
        ids, owner, kept = ids + tokens, owner + [query] * len(tokens), kept + [True] * len(tokens)
        positions += range(start, start + len(tokens))
        who, seen = torch.tensor(owner), torch.tensor(kept)
        allowed = (who[:, None] == who) | ((who == query)[:, None] & seen)
        allowed &= torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
        expected = twin(
            torch.tensor([ids]),
            attention_mask=bias[None, None],
            position_ids=torch.tensor([positions]),
        ).logits[0]
        ours = asked[row][batch.segments[row] == 0]
        torch.testing.assert_close(ours, expected[-len(ours) :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block", [False, True])
def test_padding_of_a_batch_changes_nothing(encoder: WordEncoder, block: bool) -> None:
    network, prefix = Network(SMALL), prefix_ids(encoder)
    examples = small_examples(encoder)
    together = pack(examples, prefix, block=block)
    with torch.no_grad():
        batched = read(network, together)[0]
        for row, example in enumerate(examples):
            alone = read(network, pack([example], prefix, block=block))[0][0]
            torch.testing.assert_close(batched[row, : len(alone)], alone, atol=1e-4, rtol=1e-4)


def test_training_batches_depend_on_their_name_alone(encoder: WordEncoder) -> None:
    def draw(name: str) -> torch.Tensor:
        prefix = prefix_ids(encoder)
        batch = training_batch(name, READING, (6, 4), encoder, prefix, questions=6, block=False)
        return batch.question_ids

    assert torch.equal(draw("0/0/7"), draw("0/0/7"))
    assert draw("0/0/7").shape != draw("0/1/7").shape or not torch.equal(
        draw("0/0/7"), draw("0/1/7")
    )


def test_weights_go_to_transformers_and_back() -> None:
    network = Network(SMALL)
    state = network.to_transformers_state()
    again = Network.from_transformers_state(SMALL, state)
    pairs = zip(again.parameters(), network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    state["model.layers.1.self_attn.o_proj.bias"] = torch.ones(SMALL.width)
    with pytest.raises(ValueError, match="layer 1 has a bias"):
        Network.from_transformers_state(SMALL, state)
    with pytest.raises(ValueError, match="three layers"):
        wire(Network(replace(SMALL, layers=2)))


def test_packaged_model_is_small_and_complete() -> None:
    weights = model_path() / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert json.loads((model_path() / "prompt_template.json").read_text()) == {
        "system": INSTRUCTION,
        "chunk_start": "<doc>",
        "chunk_end": "",
        "question": "{question}",
    }
    card = (model_path() / "README.md").read_text()
    assert "license: mit" in card
    assert "Limits" in card


@torch.inference_mode()
def test_packaged_model_answers_through_generate(tokenizer: Any, model: Any) -> None:
    right = 0
    for seed in range(20):
        kind = ("single", "single", "same_relation", "unanswerable")[seed % 4]
        example = make_example(7_000 + seed, kind=kind, questions=1)
        question = example.questions[0]
        ids = ids_of(tokenizer, "<bos>" + INSTRUCTION)
        for document in example.documents:
            ids += ids_of(tokenizer, f"<doc>{document}")
        ids += ids_of(tokenizer, f"<q>{question.text}<a>")
        prompt = torch.tensor([ids])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24)
        text = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        right += text == question.answer
    assert right >= 16


def test_check_reports_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    network, encoder = load_reader(model_path())
    report = check(network, encoder, questions=12, seed=3)
    assert set(KINDS) <= set(report)
    assert report["single"]["stitched"].successes >= 8
    assert as_table(report).count("\n") == len(report) + 2
    assert json.loads(as_json(report))["single"]["full"][1] >= 12
    assert check_main([str(model_path()), "--n", "2", "--documents", "2"]) == 0
    assert "same_relation" in capsys.readouterr().out


def test_wilson_interval() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(90, 100)
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)
    assert str(Share(90, 100)) == "90.0 % (82.6-94.5, n=100)"


def test_training_writes_a_model_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    config = TrainConfig(
        workers=1,
        steps=3,
        block_steps=2,
        name_steps=2,
        link_steps=2,
        average_every=1,
        checkpoint_every=1,
        questions=2,
        network=SMALL,
    )
    facts = train(config, tmp_path / "whole", tmp_path / "work", check_questions=0)
    assert facts["steps"] == 9
    (tmp_path / "work" / "worker0-000009.pt").unlink()
    train(config, tmp_path / "resumed", tmp_path / "work", check_questions=4)
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "resumed")
    )
    state = second.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in first.state_dict().items())
    ids = ids_of(AutoTokenizer.from_pretrained(tmp_path / "whole"), "<bos>Who?")
    assert ids == ids_of(AutoTokenizer.from_pretrained(model_path()), "<bos>Who?")
    assert "None measured" in (tmp_path / "whole" / "README.md").read_text()
    assert "| single |" in (tmp_path / "resumed" / "README.md").read_text()
    with pytest.raises(ValueError, match="other settings"):
        train(replace(config, seed=1), tmp_path / "whole", tmp_path / "work")


def test_one_command_trains_and_prints_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.reader.train.TrainConfig", partial(TrainConfig, network=SMALL))
    out = tmp_path / "reader"
    settings = "--steps 1 --block-steps 1 --name-steps 1 --link-steps 1 --workers 1"
    assert train_main(["--out", str(out), *settings.split(), "--check", "0"]) == 0
    assert f"reader.train --out DIR {settings}\n" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["num_hidden_layers"] == SMALL.layers
    assert (out / "model.safetensors").is_file()


def test_workers_average_their_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(TrainConfig(workers=2, network=SMALL), 0, tmp_path)
    trainer.progress.accuracy = 0.5
    before = [parameter.clone() for parameter in trainer.network.parameters()]
    other = iter([1.0])

    def all_reduce(values: torch.Tensor) -> None:
        values += values + next(other)  # the other worker's values are larger by one

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    trainer._average()
    assert trainer.progress.accuracy == 1.0
    for old, new in zip(before, trainer.network.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.5)


def test_learning_rate_warms_up_decays_and_restarts_lower() -> None:
    config = TrainConfig(steps=1000, block_steps=100, name_steps=200, link_steps=400)
    assert config.rate(0) == pytest.approx(1 / config.warm_up)
    assert config.rate(500) == 1.0
    assert config.rate(775) == pytest.approx(0.5)
    assert config.rate(999) == pytest.approx(0.05, abs=0.01)
    assert config.rate(1000) == config.block_rate
    assert config.rate(1099) < 0.02
    assert config.rate(1100) == config.name_rate
    assert config.rate(1200) == pytest.approx(config.name_rate / 2)
    assert config.rate(1299) == pytest.approx(0.05 * config.name_rate)
    assert config.rate(1300) == pytest.approx(config.link_rate / config.warm_up)
    assert config.rate(1400) == config.link_rate
    assert config.rate(1580) == pytest.approx(config.link_rate / 2)
    assert config.rate(config.total_steps - 1) == pytest.approx(0.05 * config.link_rate)
