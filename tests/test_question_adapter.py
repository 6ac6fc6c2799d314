"""An adapter that acts on question and answer alone: chunks are the untouched model's."""

from __future__ import annotations

import copy
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import build, byte_tokenizer

from kvcache_rag import (
    BestFew,
    CacheBlend,
    Combination,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.errors import FingerprintMismatchError, UnsupportedModelError
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.models.adapters import CONFIG, TRAINING_FILE, WEIGHTS, write_training
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.models.lora import read_lora
from kvcache_rag.models.pretrained import fitted
from kvcache_rag.models.question_adapter import acting, put_question_adapter, question_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

peft = pytest.importorskip("peft")
# peft asks transformers by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

TEMPLATE = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
TEXTS = ("dada fe hcab gah bdc", "ab hhg fedc abcd aabb hgf edcb gh fa bcade fg", "gfah bcd" * 6)
QUESTION = "What is it?"
TOLERANCE = 1e-3
FAMILIES = ("qwen2", "gemma3", "mistral window", "phi3")


def adapter_of(family: str, place: Path, seed: int = 1) -> Path:
    """A folder with an adapter that changes much."""
    model = build(family)
    targets = (
        ["qkv_proj", "o_proj"] if family == "phi3" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = place / f"{family}-{seed}"
    adapted.save_pretrained(folder)
    write_training(folder, on_question=True)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of(family, tmp_path_factory.mktemp("adapter"))


def engine(family: str, folder: Path | None, **options: Any) -> Engine:
    model = build(family)
    if folder is not None:
        put_question_adapter(model, folder, family)
    options = {"store": MemoryStore(), "template": TEMPLATE, **options}
    return Engine(model, byte_tokenizer(), **options)


def error(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).abs().max() / reference.std())


def by_mask(family: str, folder: Path, of: Engine, *, is_block: bool, acts: str) -> Tensor:
    """Logits of the question by one masked pass, in which PEFT's layers heed some tokens alone."""
    ids = of.tokenize(QUESTION, TEXTS)
    chunks = ids.chunks if is_block else ()
    prefix = (
        ids.prefix if is_block else (*ids.prefix, *(one for each in ids.chunks for one in each))
    )
    row = block_mask(prefix, chunks, ids.query, "reordered")
    adapted = peft.PeftModel.from_pretrained(build(family), str(folder)).eval()
    gate = torch.zeros(len(row.ids))
    gate[{"question": -len(ids.query), "all": 0, "none": len(row.ids)}[acts] :] = 1
    model = TransformersModel(adapted, packed_attention=False)
    for name, module in adapted.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda _m, _i, given: given * gate[None, :, None])
    mask = model.mask_argument(row.allowed, row.indices)
    with torch.no_grad():
        logits = model.graded(row.ids[None], None, row.positions, mask=mask)
    return logits[0, -len(ids.query) :].float()


@pytest.mark.parametrize("policy", [Reuse(), FullRecompute()])
def test_it_heeds_the_question_and_no_chunk(family: str, folder: Path, policy: Any) -> None:
    of = engine(family, folder)
    found = of.logits(QUESTION, TEXTS, policy=policy)
    is_block = not policy.is_full
    wanted = by_mask(family, folder, of, is_block=is_block, acts="question")
    assert error(found, wanted) < TOLERANCE
    for other in ("all", "none"):
        wrong = by_mask(family, folder, of, is_block=is_block, acts=other)
        assert error(wrong, wanted) > 10 * TOLERANCE, other


def test_chunks_are_those_of_the_model_without_it(family: str, folder: Path) -> None:
    store = MemoryStore()
    plain, adapted = engine(family, None, store=store), engine(family, folder, store=store)
    plain.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=3)
    assert adapted.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=3).metrics.misses == 0
    assert isinstance(adapted.policy, Reuse), "an adapter that was trained for blocks"


def test_without_documents_it_is_the_model_itself(family: str, folder: Path) -> None:
    plain, adapted = engine(family, None), engine(family, folder)
    options: dict[str, Any] = {"max_new_tokens": 8}
    assert adapted.generate(QUESTION, **options).text == plain.generate(QUESTION, **options).text
    assert adapted.complete("dada", **options).text == plain.complete("dada", **options).text
    assert torch.equal(adapted.logits(QUESTION), plain.logits(QUESTION))
    found, wanted = (one.logits(QUESTION, TEXTS, policy=Reuse()) for one in (adapted, plain))
    assert error(found, wanted) > TOLERANCE


def greedy(of: Engine, policy: Any, chunks: Any, tokens: int) -> list[int]:
    """What it says by logits alone, each time anew."""
    said: list[int] = []
    for _ in range(tokens):
        logits = of.logits(QUESTION, chunks, policy=policy, answer_ids=said)
        said.append(int(logits[-1].argmax()))
    return said


@pytest.mark.parametrize(
    "policy", [Reuse(), FullRecompute(), BestFew(), Combination(), Reuse(positions="composite")]
)
def test_an_answer_is_what_its_logits_say_also_streamed_sampled_and_in_a_batch(
    family: str, folder: Path, policy: Any
) -> None:
    of = engine(family, folder)
    wanted = greedy(of, policy, TEXTS, 5)
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 5, "min_new_tokens": 5}
    assert list(of.generate(QUESTION, TEXTS, **options).token_ids) == wanted
    stream = of.stream(QUESTION, TEXTS, **options)
    assert "".join(stream) == of.generate(QUESTION, TEXTS, **options).text
    by_library = of.generate(QUESTION, TEXTS, repetition_penalty=1.0001, **options)
    assert list(by_library.token_ids) == wanted, "generate() of transformers says something else"
    beams = of.generate(QUESTION, TEXTS, num_beams=2, **options)
    assert len(beams.token_ids) == 5
    asked = [(QUESTION, TEXTS), ("Why?", TEXTS[:2]), (QUESTION, ()), (QUESTION, TEXTS[::-1])]
    together = of.generate_batch(asked, **options)
    for (question, chunks), answer in zip(asked, together, strict=True):
        assert answer.token_ids == of.generate(question, chunks, **options).token_ids


def test_prompts_that_go_on_from_another_are_as_if_they_did_not(family: str, folder: Path) -> None:
    remembering, forgetful = engine(family, folder), engine(family, folder, prompt_memory=0)
    options: dict[str, Any] = {"max_new_tokens": 6}
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "fe hcab"}]
    # A question that begins as a document, in a prompt that has one document less.
    asked = [
        (QUESTION, TEXTS, ()),
        ("And then?", TEXTS, turns),
        (f"<d>{TEXTS[2]}</d>{QUESTION}", TEXTS[:2], ()),
        (QUESTION, TEXTS, ()),
        (QUESTION, (), ()),
    ]
    for policy in (Reuse(), FullRecompute()):
        for question, chunks, history in asked:
            found, wanted = (
                one.generate(question, chunks, history=history, policy=policy, **options)
                for one in (remembering, forgetful)
            )
            assert found.token_ids == wanted.token_ids


@pytest.fixture
def of(tmp_path: Path) -> Engine:
    return engine("qwen2", adapter_of("qwen2", tmp_path))


def test_it_acts_in_the_thread_that_answers_alone(of: Engine) -> None:
    adapter, seen = question_adapter(of.model), []
    ids = torch.arange(5)[None]
    assert adapter is not None

    def run() -> None:
        with torch.no_grad():
            seen.append(of.model(ids).logits)

    run()
    with acting(adapter):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        run()
        other = copy.deepcopy(of.model)
        with torch.no_grad():
            seen.append(other(ids).logits)
    assert torch.equal(seen[0], seen[1])
    assert error(seen[2], seen[0]) > TOLERANCE
    assert torch.equal(seen[3], seen[0]), "a copy of the model has an adapter of its own"
    assert question_adapter(other) is not adapter
    assert not [name for name, _ in of.model.named_parameters() if "adapter" in name]


def test_what_a_callback_computes_is_the_models_own(family: str, folder: Path) -> None:
    of, plain = engine(family, folder), engine(family, None)
    beside = engine(family, None, store=MemoryStore())
    other = Engine(of.model, byte_tokenizer(), store=MemoryStore(), template=TEMPLATE)
    keys: list[Any] = []
    said: list[Any] = []

    def callback(_ids: Tensor, scores: Tensor) -> Tensor:
        if not keys:
            keys.extend(of.add(["gaf dcb" * 3]))
            said.append(other.generate(QUESTION, [], max_new_tokens=4).token_ids)
        return scores

    answer = of.generate(QUESTION, TEXTS, max_new_tokens=4, logits_processor=[callback])
    alone = engine(family, folder).generate(QUESTION, TEXTS, max_new_tokens=4)
    assert answer.token_ids == alone.token_ids
    (expected,) = plain.add(["gaf dcb" * 3])
    assert keys == [expected]
    layout = of._adapter.measured.chunk_layout
    found, wanted = (one.store.get(expected, layout) for one in (of, plain))
    assert found is not None
    assert wanted is not None
    for group in range(len(layout.groups)):
        assert error(found.chunk.keys(group), wanted.chunk.keys(group)) < TOLERANCE
    assert said == [beside.generate(QUESTION, [], max_new_tokens=4).token_ids]


def test_tokens_of_chunks_are_not_computed_again_with_it(of: Engine) -> None:
    with pytest.raises(UnsupportedModelError, match=r"acts on questions alone.*adapter=\"none\""):
        of.generate(QUESTION, TEXTS, policy=CacheBlend(0.2))


def test_answers_of_an_app_are_named_by_it(of: Engine) -> None:
    from kvcache_rag.integration.cache_key import _state

    plain = Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE)
    assert _state(of)["weights"] == _state(plain)["weights"]
    assert _state(of)["adapter"] != _state(plain)["adapter"] == ""


def test_a_verdict_on_the_model_is_none_on_it_with_the_adapter(of: Engine) -> None:
    plain = Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE)
    assert of.spec == plain.spec
    with pytest.raises(FingerprintMismatchError, match="with adapter"):
        plain.identity.ensure_same(of.identity)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder, other = adapter_of("qwen2", tmp_path), adapter_of("qwen2", tmp_path, seed=2)
    model = build("qwen2")
    assert put_question_adapter(model, folder, "m") is put_question_adapter(model, folder, "m")
    with pytest.raises(InvalidInputError, match="another adapter for questions already"):
        put_question_adapter(model, other, "m")
    with pytest.raises(InvalidInputError, match=r"not fit the model 'm': it has no plain linear"):
        put_question_adapter(build("gpt2"), folder, "m")
    with pytest.raises(InvalidInputError, match=r"was cast to torch\.bfloat16 after its adapter"):
        Engine(model.bfloat16(), byte_tokenizer())


def _config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _weights(change: Any) -> Any:
    def changed(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return changed


def _one_rank_more(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    name = next(name for name in stored if "lora_A" in name)
    return {**stored, name: torch.cat([stored[name], stored[name][:1]])}


BROKEN: dict[str, tuple[Any, str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "it has no adapter_config"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no adapter_model"),
    "cut": (lambda folder: (folder / WEIGHTS).write_bytes(b"1" * 9), "cannot be read"),
    "ranks": (_weights(_one_rank_more), "no finite ones of one rank"),
    "flat": (_weights(lambda stored: {k: v.flatten() for k, v in stored.items()}), "of one rank"),
    "not a number": (_weights(lambda stored: {k: v / 0 for k, v in stored.items()}), "no finite"),
    "nothing": (_weights(lambda _stored: {}), "holds no matrices"),
    "alpha": (_config(lora_alpha="much"), "lora_alpha of an adapter is a number"),
    "unsaid": (lambda folder: (folder / TRAINING_FILE).write_text('{"acts_on": }'), "be read"),
    "misspelt": (
        lambda folder: (folder / TRAINING_FILE).write_text('{"acts_on": "questions"}'),
        r"acts on 'questions', which is not known",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_adapter_is_told_in_a_sentence(tmp_path: Path, name: str) -> None:
    change, words = BROKEN[name]
    build("qwen2").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    folder = adapter_of("qwen2", tmp_path)
    change(folder)
    with pytest.raises(InvalidInputError, match=words):
        Engine.from_pretrained(tmp_path / "model", adapter=folder)


def test_a_pattern_of_alphas_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    folder = adapter_of("qwen2", tmp_path)
    _config(alpha_pattern={r"layers\.0\.self_attn\.q_proj": 80, "proj": 1, "v_proj": 2})(folder)
    pairs = read_lora(folder, "these take", "do not")
    for path, pair in pairs.items():
        is_first = path.endswith("layers.0.self_attn.q_proj")
        assert pair.factor == (20 if is_first else 0.5 if path.endswith("v_proj") else 2), path


def test_an_adapter_in_a_loaded_model_cannot_be_taken_out(tmp_path: Path) -> None:
    model = put_question_adapter(build("qwen2"), adapter_of("qwen2", tmp_path), "m")
    with pytest.raises(InvalidInputError, match=r"load it again with adapter=\"none\""):
        fitted(model, "none", "auto", "transformers")
