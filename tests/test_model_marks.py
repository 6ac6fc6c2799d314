"""A model is recognised in every form of its weights, and gets the adapter made for it."""

from __future__ import annotations

import json
import logging
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from gguf_files import write_gguf
from laws import error
from test_adapters import alone, install  # noqa: F401  # fixtures
from zoo import build

from kvcache_rag import Engine, Reuse
from kvcache_rag.models import adapters
from kvcache_rag.models.adapters import BASE, AdapterBase, fitting_adapter, write_training
from kvcache_rag.models.kept import file_digest
from kvcache_rag.models.model_marks import ModelMark, mark_of
from kvcache_rag.models.model_names import chosen_adapter
from kvcache_rag.models.pretrained import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

peft = pytest.importorskip("peft")
pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in some forms, and another one of equal sizes."""
    place = tmp_path_factory.mktemp("forms")
    found = {
        "q8": write_gguf(place / "q8.gguf"),
        "float": write_gguf(place / "float.gguf", quantised=False),
        "other": write_gguf(place / "other.gguf", seed=1),
    }
    for dtype in ("bfloat16", "float32", "float16"):
        model, tokenizer, _ = load(found["float"], dtype=dtype, device="cpu", options={})
        found[dtype] = place / dtype
        model.save_pretrained(found[dtype])
        tokenizer.save_pretrained(found[dtype])
    return found


def test_a_mark_is_the_same_in_every_form_and_another_models_is_not(
    forms: dict[str, Path],
) -> None:
    marks = {name: mark_of(path) for name, path in forms.items()}
    other = marks.pop("other")
    assert len({*marks.values()}) == 1
    assert None not in marks.values()
    assert other not in (None, *marks.values())
    for name in ("q8", "bfloat16"):
        for dtype in ("float32", "bfloat16"):
            model, _, _ = load(forms[name], dtype=dtype, device="cpu", options={})
            assert ModelMark.from_model(model) == marks["q8"]
    with torch.no_grad():
        next(v for k, v in model.named_parameters() if k.endswith("norm.weight"))[3] += 0.1
    assert ModelMark.from_model(model) != marks["q8"], "trained on"


def test_what_is_no_model_has_no_mark(tmp_path: Path, forms: dict[str, Path]) -> None:
    assert ModelMark.read(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(b"x" * 40)
    assert ModelMark.read(tmp_path) is None
    (tmp_path / "b.gguf").write_bytes(forms["q8"].read_bytes()[:1000])
    assert ModelMark.read(tmp_path / "b.gguf") is None
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    assert ModelMark.read(tmp_path / "gpt2") is None


@pytest.fixture
def adapter(forms: dict[str, Path], tmp_path: Path, install: Callable[..., Path]) -> Path:  # noqa: F811
    """An installed adapter that was trained over the Q8_0 file."""
    folder = tmp_path / "trained"
    model, _, _ = load(forms["q8"], dtype="float32", device="cpu", options={})
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    write_training(folder, on_question=True)
    mark = mark_of(forms["q8"])
    assert mark is not None
    said = {"model": "Owner/Mine", "sha256": file_digest(forms["q8"]), **vars(mark)}
    (folder / BASE).write_text(json.dumps(said))
    assert AdapterBase.read(folder) == AdapterBase("Owner/Mine", said["sha256"], mark)
    return install("mine-1b", folder)


def test_a_model_gets_its_adapter_by_itself_in_every_form(
    adapter: Path, forms: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for name, path in forms.items():
        taken, bare = (
            Engine.from_pretrained(path, dtype="float32", adapter=one) for one in (None, "none")
        )
        assert taken.spec == bare.spec, "chunks are the model's own"
        difference = error(*(one.logits("ab", ["cd" * 9]) for one in (taken, bare)))
        assert (difference > 0.01) == (name != "other")
        assert (taken.policy == Reuse()) == (name != "other")
    assert [one for one in caplog.records if one.name == adapters.__name__] == []
    Engine.from_pretrained(forms["other"], adapter="mine-1b")
    (said,) = [one.getMessage() for one in caplog.records if one.name == adapters.__name__]
    assert "was trained on Owner/Mine" in said


def test_of_the_hub_it_is_chosen_by_name(adapter: Path) -> None:
    for name, chosen in {
        "Owner/Mine": "mine-1b",
        "Owner/Mine-GGUF": "mine-1b",
        "Owner/Other": None,
        "tiny": None,
    }.items():
        assert chosen_adapter(name, None) == chosen
        assert chosen_adapter(name, "none") is None
        assert chosen_adapter(name, "x") == "x"
    shutil.rmtree(adapter)
    assert fitting_adapter("Owner/Mine", None) is None, "nobody asked for a damaged package"
