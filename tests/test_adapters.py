"""Adapters by the names of installed packages, what they bring along, and the base they are for."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, PromptTemplate
from kvcache_rag.cli import main
from kvcache_rag.integration import lasting_adapter, open_engine
from kvcache_rag.models import adapters, pretrained
from kvcache_rag.models.adapters import (
    BASE,
    GROUP,
    AdapterBase,
    adapter_folder,
    merged,
    trained_for_blocks,
    with_adapter,
    write_training,
)
from kvcache_rag.models.gguf import quantised_dtype
from kvcache_rag.models.kept import cache_folder, file_digest
from kvcache_rag.models.model_names import PACKAGED, chosen_adapter
from kvcache_rag.models.pretrained import bundled_template, load
from kvcache_rag.prompt.template import FILE_NAME
from kvcache_rag.settings import EngineSettings
from kvcache_rag_server import startup
from kvcache_rag_server.corpus.worker import BuildSettings
from kvcache_rag_server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")

from gguf_files import write_gguf

pytestmark = [
    # peft asks transformers by a name that transformers is about to drop,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # and looks for the vocabulary of the model that an adapter was made for.
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

TEMPLATE = {"system": "Read.\n", "chunk_start": "<d>", "chunk_end": "</d>"}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder and a working directory of its own for every test; nothing was warned of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(adapters, "_WARNED", set())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build("qwen2").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_adapter(folder: Path, model: Any, base: Path | str = "", *, seed: int = 0) -> Path:
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("saved") / "adapter", build("qwen2"), base)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a package that names an adapter on `sys.path`; gives the folder of the adapter."""

    def install(
        name: str, adapter: Path | None, owner: str = "an-owner", *, inner: str = ""
    ) -> Path:
        package = f"{owner}_{tmp_path.name}".replace("-", "_")
        site = tmp_path / "site" / owner
        folder = site.joinpath(package, inner)
        folder.mkdir(parents=True)
        # Data are found without running the code beside them.
        code = "" if inner else "raise RuntimeError('was imported')"
        (site / package / "__init__.py").write_text(code)
        if adapter is not None:
            shutil.copytree(adapter, folder, dirs_exist_ok=True)
        info = site / f"{owner.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1.0\n")
        module = f"{package}.{inner}" if inner else package
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(str(site))
        return folder

    return install


def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "entry_points", lambda **_: EntryPoints(()))


# ---------------------------------------------------------------------- names
def test_an_installed_adapter_is_meant_by_its_name_wherever_one_is_taken(
    base: Path, saved: Path, install: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    install("novel", saved)
    plain, adapted = Engine.from_pretrained(base), Engine.from_pretrained(base, adapter=saved)
    assert plain.spec != adapted.spec
    for engine in (
        Engine.from_pretrained(base, adapter="novel"),
        EngineSettings(model=str(base), adapter="novel").open_engine(),
        startup.open_engine(ServerSettings(model=str(base), adapter="novel")),
        BuildSettings(model=str(base), kv_dir="kv", adapter="novel").open(),
    ):
        assert engine.spec == adapted.spec
    # Into a model that was brought it is put beside the weights, which are not ours to write.
    brought = open_engine(plain.model, plain.tokenizer, adapter="novel")
    beside = with_adapter(load(base, dtype="auto", device="cpu", options={})[0], saved, "base")
    assert brought.spec == Engine(beside, plain.tokenizer).spec
    assert main(["models", "check", str(base), "--adapter", "novel"]) == 0
    assert "supported" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_where_it_is_loaded_to_the_same_weights_each_time(
    base: Path, saved: Path, dtype: torch.dtype
) -> None:
    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.arange(3, 40)[None]).logits.float()

    wide, _, _ = load(base, dtype=torch.float32, device="cpu", options={})
    before = logits(wide)
    exact = logits(with_adapter(wide, saved, "base"))
    plain, _, _ = load(base, dtype=dtype, device="cpu", options={})

    def error(model: Any) -> float:
        return float((logits(model) - exact).abs().max() / exact.std())

    beside = error(with_adapter(plain, saved, "base"))
    assert float((before - exact).abs().max() / exact.std()) > 3 * beside
    for folder, adapter in ((base, saved), (saved, None)):
        engine, again = (
            Engine.from_pretrained(folder, adapter=adapter, dtype=dtype) for _ in range(2)
        )
        model: Any = engine.model
        assert not any("lora" in name for name, _ in model.named_parameters())
        assert all(weight.requires_grad for weight in model.parameters())
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        assert error(model) < max(1e-5, 2 * beside)  # in low precision as far from exact as beside
        assert engine.spec == again.spec
        assert engine.spec != Engine.from_pretrained(base, dtype=dtype).spec


def test_what_cannot_be_merged_stays_beside_the_weights(base: Path, saved: Path) -> None:
    adapted = with_adapter(load(base, dtype="auto", device="cpu", options={})[0], saved, "base")
    adapted.config.quantization_config = {"quant_method": "of somebody"}
    assert adapters.merged(adapted) is adapted
    del adapted.config.quantization_config

    class Refusing(torch.nn.Linear):
        config, device = adapted.config, adapted.device

        def merge_and_unload(self) -> Any:
            raise NotImplementedError("as some adapters do")

    refusing = Refusing(2, 2)
    assert adapters.merged(refusing) is refusing


def test_a_name_stands_before_a_folder_which_a_path_means(
    base: Path, saved: Path, install: Callable[..., Path]
) -> None:
    installed = install("novel", saved)
    other = write_adapter(Path("novel"), build("qwen2"), base, seed=1)
    assert adapter_folder("novel") == installed
    assert adapter_folder("./novel") == adapter_folder(other) == Path("novel")
    spec = Engine.from_pretrained(base, adapter="./novel").spec
    assert spec == Engine.from_pretrained(base, adapter=Path("novel")).spec
    assert spec != Engine.from_pretrained(base, adapter="novel").spec


def test_a_missing_package_is_told_with_the_exact_command(
    base: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_installed(monkeypatch)
    sentence = (
        "^the adapter 'block' comes with a package that is not installed: "
        "pip install kvcache-rag-smollm2"
    )
    with pytest.raises(InvalidInputError, match=f"{sentence}$"):
        Engine.from_pretrained(base, adapter="block")
    shutil.copytree(saved, "block")  # which it may mean is not guessed
    with pytest.raises(InvalidInputError, match=rf"{sentence} \(the folder is \./block\)$"):
        Engine.from_pretrained(base, adapter="block")
    assert Engine.from_pretrained(base, adapter="./block").spec


def test_smollm2_has_its_adapter_by_itself_where_that_is_installed(
    saved: Path, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", replace(PACKAGED["smollm2"], adapter="novel"))
    with monkeypatch.context() as patch:
        nothing_installed(patch)
        assert chosen_adapter("smollm2", None) is None
        assert chosen_adapter("smollm2", "novel") == "novel"  # whose absence is told
    install("novel", saved)
    assert chosen_adapter("smollm2", None) == "novel"
    assert chosen_adapter("smollm2", "none") is None
    assert chosen_adapter("smollm2", "mine") == "mine"
    assert chosen_adapter("smollm2", Path("none")) == Path("none")  # a folder
    assert chosen_adapter("other", None) is None
    assert lasting_adapter("none") == "none"


def test_a_name_that_nothing_has_is_told_with_those_that_there_are(
    base: Path, saved: Path, install: Callable[..., Path]
) -> None:
    install("novel", saved)
    with pytest.raises(InvalidInputError, match=r"no adapter 'bloc'.* names block, novel$"):
        Engine.from_pretrained(base, adapter="bloc")


def test_two_packages_that_claim_a_name_are_both_named(
    base: Path, saved: Path, install: Callable[..., Path]
) -> None:
    install("novel", saved, "first-owner")
    install("novel", saved, "second-owner")
    with pytest.raises(InvalidInputError, match="first-owner and second-owner; uninstall all but"):
        Engine.from_pretrained(base, adapter="novel")


@pytest.mark.parametrize("inner", ["", "first"])
def test_a_package_without_its_adapter_is_told(
    base: Path, install: Callable[..., Path], inner: str
) -> None:
    folder = install("novel", None, inner=inner)
    for place in (folder, folder.parent):  # without the files, then without their folder
        with pytest.raises(InvalidInputError, match=r"missing from its .*--force-reinstall an-own"):
            Engine.from_pretrained(base, adapter="novel")
        shutil.rmtree(place)


def test_a_name_lasts_in_other_folders_and_a_folder_by_its_whole_path(
    saved: Path, install: Callable[..., Path]
) -> None:
    install("novel", saved)
    here = Path.cwd()
    assert [lasting_adapter(name) for name in ("novel", "block")] == ["novel", "block"]
    assert lasting_adapter("./novel") == lasting_adapter(Path("novel")) == str(here / "novel")
    assert lasting_adapter("mine") == str(here / "mine")
    assert lasting_adapter("~/mine") == os.path.expanduser("~/mine")


# ---------------------------------------------------------------------- what it brings along
def test_the_template_of_an_adapter_is_used_as_a_models_own(
    base: Path, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(saved, folder)
    assert Engine.from_pretrained(base, adapter=folder).template == PromptTemplate()
    (folder / FILE_NAME).write_text(json.dumps(TEMPLATE))
    brought, own = PromptTemplate(**TEMPLATE), PromptTemplate(system="Mine.\n")
    loaded, tokenizer, _ = load(base, dtype="auto", device="cpu", options={})
    for engine in (
        Engine.from_pretrained(base, adapter=folder),
        Engine.from_pretrained(folder),
        open_engine(loaded, tokenizer, adapter=folder),
    ):
        assert engine.template == brought
        assert engine.prefix_text.startswith("Read.")
    assert Engine.from_pretrained(base, adapter=folder, template=own).template == own
    # Who writes prompts before a model is loaded: retrieval of a server, rows of a collection.
    assert bundled_template(base, folder) == brought
    assert bundled_template(base) is None


def test_an_adapter_without_a_template_leaves_its_models(saved: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    build("qwen2").save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    (model / FILE_NAME).write_text(json.dumps(TEMPLATE))
    brought = PromptTemplate(**TEMPLATE)
    assert Engine.from_pretrained(model, adapter=saved).template == brought
    alone = write_adapter(tmp_path / "alone", build("qwen2"), model)
    assert Engine.from_pretrained(alone).template == brought


# ---------------------------------------------------------------------- the base it is for
def test_an_adapter_of_a_gguf_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    inner, _, _ = load(path, dtype="auto", device="cpu", options={})
    folder = write_adapter(tmp_path / "adapter", inner, path)
    adapted = Engine.from_pretrained(path, adapter=folder)
    assert adapted.spec == Engine.from_pretrained(folder).spec
    assert adapted.spec != Engine.from_pretrained(path).spec
    assert {p.dtype for p in adapted.model.parameters()} == {quantised_dtype()}


def test_a_gguf_model_with_an_adapter_is_merged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    inner, _, _ = load(path, dtype="auto", device="cpu", options={})
    plain = {name: value.clone() for name, value in inner.state_dict().items()}
    folder = write_adapter(tmp_path / "adapter", inner, path)
    write_training(folder)
    wanted = merged(with_adapter(inner, folder, str(path)))

    def loaded() -> Engine:
        return Engine.from_pretrained(path, adapter=folder)

    first = loaded()
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "with_adapter", None)  # which would need PEFT
        second = loaded()
    for engine in (first, second):
        found = engine.model.state_dict()
        assert found.keys() == wanted.state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.state_dict().items())
        assert trained_for_blocks(engine.model)
        assert engine.model.config._name_or_path == str(path)
        assert all(one.requires_grad for one in engine.model.parameters())
    assert second.spec == first.spec
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert second.tokenizer.chat_template == first.tokenizer.chat_template

    # Another adapter, another dtype, no adapter: each their own.
    alone, _, _ = load(path, dtype="auto", device="cpu", options={})
    assert all(torch.equal(alone.state_dict()[name], value) for name, value in plain.items())
    other = write_adapter(tmp_path / "other", alone, path, seed=1)
    assert Engine.from_pretrained(path, adapter=other).spec != first.spec
    assert not trained_for_blocks(Engine.from_pretrained(path, adapter=other).model)
    half = Engine.from_pretrained(path, adapter=folder, dtype="float16")
    assert {one.dtype for one in half.model.parameters()} == {torch.float16}

    # One that was changed is made anew.
    for kept in cache_folder().glob("*-merged"):
        (kept / "model.safetensors").write_bytes(b"x")
    assert loaded().spec == first.spec


def other_model(layers: int = 2, hidden: int = 64) -> Any:
    config = LlamaConfig(
        vocab_size=300, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "other", [lambda: other_model(hidden=32), lambda: other_model(layers=9), lambda: build("gpt2")]
)
def test_an_adapter_of_another_model_is_told_in_one_sentence(
    base: Path, tmp_path: Path, other: Any
) -> None:
    model = other()
    targets = ["c_attn"] if model.config.model_type == "gpt2" else ["q_proj", "v_proj"]
    settings = LoraConfig(r=4, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])
    get_peft_model(model, settings).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(InvalidInputError, match="does not fit the model"):
        Engine.from_pretrained(base, adapter=tmp_path / "adapter")


def test_an_adapter_that_is_refused_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", other_model(layers=9))
    model = other_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidInputError, match="does not fit the model"):
        adapters.with_adapter(model, folder, "other")
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not hasattr(model, "peft_config")


def test_a_folder_without_an_adapter_and_one_whose_model_is_gone(
    base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="holds no PEFT adapter"):
        Engine.from_pretrained(base, adapter=tmp_path)
    lost = write_adapter(tmp_path / "lost", build("qwen2"), "/no/such/model")
    with pytest.raises(InvalidInputError, match=r"adapter for '/no/such/model'.*adapter="):
        Engine.from_pretrained(lost)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.name == adapters.__name__]
    return [message for message in found if "was trained on" in message]


def test_another_base_of_the_same_shapes_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own, other = (write_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (0, 1))
    model, tokenizer, _ = load(own, dtype="auto", device="cpu", options={})
    folder = write_adapter(tmp_path / "adapter", model, own)
    (folder / BASE).write_text(json.dumps({"model": "mine", "sha256": file_digest(own)}))
    for dtype in ("auto", "float32"):
        Engine.from_pretrained(own, adapter=folder, dtype=dtype)
    Engine.from_pretrained(folder)
    Engine.from_pretrained(tmp_path, gguf_file="0.gguf", adapter=folder)
    again, _, _ = load(own, dtype="auto", device="cpu", options={})
    open_engine(again, tokenizer, adapter=folder)
    assert warnings_of(caplog) == []
    for _ in range(2):
        Engine.from_pretrained(other, adapter=folder)
    (said,) = warnings_of(caplog)
    assert f"was trained on mine (SHA-256 {file_digest(own)[:12]}...), which {other} is not" in said


def test_a_base_of_no_file_warns_and_no_digest_does_not(
    base: Path, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(saved, folder)
    Engine.from_pretrained(base, adapter=folder)
    assert warnings_of(caplog) == []
    (folder / BASE).write_text(json.dumps({"model": "mine", "sha256": "0" * 64}))
    Engine.from_pretrained(base, adapter=folder)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 3, "sha256": ""}', '{"model": "x"}'])
def test_a_base_that_cannot_be_read_is_told(saved: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(saved, folder)
    assert AdapterBase.read(folder) is None
    (folder / BASE).write_text(text)
    with pytest.raises(InvalidInputError, match=r"base\.json is not of the form"):
        AdapterBase.read(folder)
