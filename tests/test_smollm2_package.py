"""The adapter's package: what `training.smollm2.publish` writes, and the wheel that it makes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import torch
from reader_file import reader_data
from safetensors.torch import load_file, save_file

from kvcache_rag import Engine, InvalidInputError, PromptTemplate, Reuse
from kvcache_rag.models.adapters import BASE, CONFIG, TRAINING_FILE, WEIGHTS, AdapterBase
from kvcache_rag.models.kept import file_digest
from kvcache_rag.models.model_names import PACKAGED, PackagedModel
from kvcache_rag.models.pretrained import load
from kvcache_rag.prompt.template import FILE_NAME
from kvcache_rag_lab.finetune import FinetuneConfig, finetune
from training.smollm2 import publish as publishing
from training.smollm2.publish import PLACE, TRAINING, publish

pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")

from gguf_files import write_gguf

pytestmark = [
    # peft asks transformers by a name that transformers is about to drop,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # and looks for the vocabulary of the model that an adapter was made for.
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

PROJECT = Path(__file__).resolve().parent.parent / "integrations" / "kvcache-rag-smollm2"
FACTS = {"command": "python -m training.blocks smollm2", "device": "two cores", "hours": 1.5}
FILES = {CONFIG, WEIGHTS, BASE, FILE_NAME, TRAINING, TRAINING_FILE}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Let `smollm2` be a small random model of an installed package of ours."""
    folder = tmp_path_factory.mktemp("site")
    path = write_gguf(folder / "model.gguf")
    info = folder / "random_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: random-model\nVersion: 1.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.syspath_prepend(str(folder))
        known = PackagedModel("random-model", "1.0", path.name, file_digest(path))
        patch.setitem(PACKAGED, "smollm2", known)
        yield path


@pytest.fixture(scope="module")
def trained(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that fine-tuning writes."""
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    config = FinetuneConfig(
        "smollm2", folder, reader_data(), steps=2, batch_tokens=700, holdout=2, rate=1e-2, lora=4,
        keep_adapter=True, precision="bf16", device="cpu",
    )  # fmt: skip
    finetune(config)
    return folder


@pytest.fixture
def block(trained: Path, tmp_path: Path) -> Path:
    return publish(trained, tmp_path / "package", FACTS)


# ---------------------------------------------------------------------- what is written
def test_the_weights_that_load_are_those_that_were_evaluated_rounded(
    trained: Path, block: Path
) -> None:
    raw, rounded = load_file(trained / WEIGHTS), load_file(block / WEIGHTS)
    assert {value.dtype for value in raw.values()} == {torch.float32}
    assert rounded.keys() == raw.keys()
    for name, value in rounded.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, raw[name].bfloat16())
    # A base in bfloat16 rounds an adapter when it is put in: the same model, the same chunks,
    unrounded, published = (
        Engine.from_pretrained("smollm2", adapter=folder, dtype="bfloat16")
        for folder in (trained, block)
    )
    assert published.spec == unrounded.spec
    assert published.policy == unrounded.policy == Reuse()
    # while in float32 the rounded weights are computed with, and are what is known by that name.
    wide = Engine.from_pretrained("smollm2", adapter=block, dtype="float32")
    held = dict(wide.model.named_parameters())
    before, _, _ = load("smollm2", dtype=torch.float32, device="cpu", options={})
    plain = dict(before.named_parameters())
    for name, down in rounded.items():
        if ".lora_A." in name:
            up = rounded[name.replace(".lora_A.", ".lora_B.")]
            place = name.removeprefix("base_model.model.").replace(".lora_A", "")
            added = 2 * (up.double() @ down.double())  # alpha is twice the rank
            torch.testing.assert_close(held[place], (plain[place] + added).float())
            assert not torch.equal(held[place], plain[place])
    assert wide.spec != Engine.from_pretrained("smollm2", adapter=trained, dtype="float32").spec


def test_the_folder_says_its_base_and_its_words_and_no_path(
    trained: Path, block: Path, tmp_path: Path
) -> None:
    assert {path.name for path in block.iterdir()} == FILES
    assert AdapterBase.read(block) == AdapterBase("smollm2", PACKAGED["smollm2"].sha256)
    assert json.loads((block / CONFIG).read_text())["base_model_name_or_path"] == "smollm2"
    assert Engine.from_pretrained(block).template == PromptTemplate()
    for path in [*block.iterdir(), tmp_path / "package" / "README.md"]:
        held = path.read_bytes()
        for folder in (trained.parent, tmp_path, Path.home()):
            assert str(folder).encode() not in held, path
    assert [path.stat().st_mode & 0o777 for path in (block, block / WEIGHTS)] == [0o755, 0o644]


def test_pickle_another_base_spoilt_weights_and_large_files_are_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = Path(shutil.copytree(trained, tmp_path / "changed")), tmp_path / "out"

    def refused(words: str) -> None:
        with pytest.raises(InvalidInputError, match=words):
            publish(folder, out, FACTS)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "LIMIT", 1000)
        refused("lower rank")
    weights = load_file(folder / WEIGHTS)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] / 0}, folder / WEIGHTS)
    refused(f"infinite weights, such as {name}")
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    refused("pickle is not published")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "other"}))
    refused("is an adapter for 'other', not for 'smollm2'")
    assert not (out / PLACE).exists()


# ---------------------------------------------------------------------- the package
def test_the_entry_point_leads_to_what_is_published() -> None:
    text = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'block = "{".".join(PLACE.parts)}"' in text


def test_the_wheel_holds_the_adapter_and_its_licence_and_loads_by_its_name(
    smollm2: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling", reason="what builds the wheel is not installed")
    project = tmp_path / "project"
    generated = shutil.ignore_patterns(PLACE.name, "README.md", "__pycache__")
    shutil.copytree(PROJECT, project, ignore=generated)
    publish(trained, project, FACTS)
    build = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=project, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    site = tmp_path / "installed"
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    inside = {f"{PLACE.as_posix()}/{name}" for name in FILES}
    assert names == {f"{PLACE.parts[0]}/__init__.py", *inside}
    (info,) = site.glob("*.dist-info")
    metadata = message_from_bytes((info / "METADATA").read_bytes())
    assert metadata["License-Expression"] == "CC-BY-SA-4.0"
    assert "1606.05250" in str(metadata.get_payload())
    licence, notice = (info / "licenses" / name for name in ("LICENSE", "NOTICE"))
    assert licence.read_text().startswith("Attribution-ShareAlike 4.0 International\n")
    assert all(word in notice.read_text() for word in ("Rajpurkar", "Wikipedia", "Apache"))
    # As it is found where it is installed.
    for module in [name for name in sys.modules if name.split(".")[0] == PLACE.parts[0]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(str(site))
    engine, known = (
        Engine.from_pretrained("smollm2", adapter=name, dtype="bfloat16")
        for name in ("block", trained)
    )
    assert engine.spec == known.spec
    sys.modules.pop(PLACE.parts[0])  # not by monkeypatch, which would put it back for later tests
