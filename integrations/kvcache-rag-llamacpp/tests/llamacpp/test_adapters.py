"""A PEFT adapter beside weights in llama.cpp is the adapter in transformers' weights."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import QUESTION, TEXTS, error
from llamacpp.asking import opened, rounding
from safetensors.torch import load_file, save_file

from kvcache_rag import BestFew, FullRecompute, InvalidInputError, MemoryStore, Reuse
from kvcache_rag.engine import like
from kvcache_rag.errors import KVCacheRagError
from kvcache_rag.models.adapters import CONFIG, WEIGHTS, write_training
from kvcache_rag.models.pretrained import load

if TYPE_CHECKING:
    from pathlib import Path

    from llamacpp.conftest import Files

peft = pytest.importorskip("peft", reason="pip install 'kvcache-rag[finetune]'")

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(path: Path, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random adapter of all linear layers for a file, large enough to be seen."""
    model, _, _ = load(path, dtype="float32", device="cpu", options={}, tokenizer=object())
    rank = {"r": 4, "lora_alpha": 6, "target_modules": list(MODULES), **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers is about to rename
        adapted = peft.get_peft_model(model, peft.LoraConfig(**rank))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 24}},
        {"rank_pattern": {"v_proj": 2}},
        {"target_modules": ["k_proj"]},
    ],
    ids=["all", "root of the rank", "a factor of its own", "a rank of its own", "keys alone"],
)
def test_law_an_adapter_is_that_of_transformers(
    family: str, changes: dict[str, Any], files: Files, tmp_path: Path
) -> None:
    path = files(family)
    folder = write_adapter(path, tmp_path / "adapter", **changes)
    ours, theirs = (
        opened(path, adapter=folder, backend=backend) for backend in ("llama.cpp", "transformers")
    )
    plain = opened(path)
    for policy in (FullRecompute(), Reuse()):
        found, wanted, without = (
            engine.logits(QUESTION, TEXTS, policy=policy) for engine in (ours, theirs, plain)
        )
        assert error(found, wanted) < rounding(family)
        assert error(without, wanted) > 0.1


@pytest.mark.parametrize("policy", [Reuse(), FullRecompute(), BestFew()], ids=repr)
def test_law_an_adapter_for_questions_is_that_of_transformers(
    family: str, policy: Any, files: Files, tmp_path: Path
) -> None:
    path = files(family)
    folder = write_adapter(path, tmp_path / "adapter")
    everywhere = opened(path, adapter=folder)
    write_training(folder, on_question=True)
    ours, plain = opened(path, adapter=folder), opened(path)
    assert ours.spec == plain.spec, "its chunks are those of the file"
    theirs = opened(path, adapter=folder, backend="transformers")
    found, wanted = (one.logits(QUESTION, TEXTS, policy=policy) for one in (ours, theirs))
    assert error(found, wanted) < rounding(family)
    for other in (everywhere, plain):
        assert error(other.logits(QUESTION, TEXTS, policy=policy), found) > 0.1
    answer = ours.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1)
    assert answer.token_ids == (int(found[-1].argmax()),)
    assert torch.equal(ours.logits(QUESTION), plain.logits(QUESTION))
    said = [one.generate(QUESTION, max_new_tokens=6).token_ids for one in (ours, plain)]
    assert said[0] == said[1]


def test_what_a_callback_computes_is_the_files_own(files: Files, tmp_path: Path) -> None:
    path = files("llama")
    folder = write_adapter(path, tmp_path / "adapter")
    write_training(folder, on_question=True)
    ours, plain = opened(path, adapter=folder), opened(path)
    other = like(ours, store=MemoryStore())
    keys: list[Any] = []

    def callback(_ids: Any, scores: Any) -> Any:
        if not keys:
            keys.extend(other.add([TEXTS[0]]))
        return scores

    with suppress(KVCacheRagError):  # it needed the cells of the answer
        ours.generate(QUESTION, TEXTS[1:], max_new_tokens=3, logits_processor=[callback])
    assert keys == plain.add([TEXTS[0]])
    layout = plain._adapter.measured.chunk_layout
    found, wanted = (one.store.get(keys[0], layout) for one in (other, plain))
    assert found is not None
    assert wanted is not None
    for group in range(len(layout.groups)):
        assert error(found.chunk.keys(group), wanted.chunk.keys(group)) < 1e-3
        assert error(found.chunk.values(group), wanted.chunk.values(group)) < 1e-3
    assert torch.equal(ours.logits(QUESTION), plain.logits(QUESTION))


def test_chunks_of_an_adapter_are_its_own(files: Files, tmp_path: Path) -> None:
    path = files("llama")
    first, second = (write_adapter(path, tmp_path / str(seed), seed=seed) for seed in range(2))
    engines = [opened(path), *(opened(path, adapter=one) for one in (first, second, first))]
    assert len({engine.spec for engine in engines}) == 3
    assert engines[1].spec == engines[3].spec


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "it is of kind IA3"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "all"}, "takes adapters of low rank"),
    ],
)
def test_what_is_more_than_low_rank_is_refused(
    changes: dict[str, Any], said: str, files: Files, tmp_path: Path
) -> None:
    path = files("llama")
    folder = write_adapter(path, tmp_path / "adapter")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))
    with pytest.raises(InvalidInputError, match=said):
        opened(path, adapter=folder)


def test_what_does_not_fit_is_refused(files: Files, tmp_path: Path) -> None:
    folder = write_adapter(files("llama"), tmp_path / "adapter")
    weights = load_file(folder / WEIGHTS)
    name = next(iter(weights))
    other = name.replace("layers.0", "layers.99")
    save_file({**weights, other: weights[name].clone()}, folder / WEIGHTS)
    with pytest.raises(InvalidInputError, match=r"layers.99"):
        opened(files("llama"), adapter=folder)
    save_file({one: weights[one][..., :2].contiguous() for one in weights}, folder / WEIGHTS)
    with pytest.raises(InvalidInputError, match="no finite ones of one rank"):
        opened(files("llama"), adapter=folder)
    first = {one: weights[one][:, :2] if "lora_A" in one else weights[one] for one in weights}
    save_file({one: value.contiguous() for one, value in first.items()}, folder / WEIGHTS)
    with pytest.raises(InvalidInputError, match="does not fit the model"):
        opened(files("llama"), adapter=folder)
