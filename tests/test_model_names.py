"""A name of a model means one thing, and no hub is asked for what cannot be its."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

from kvcache_rag import Engine
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models import model_names
from kvcache_rag.models.model_names import check_there, offline_options, resolve
from kvcache_rag.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub, which does not answer, is asked for."""
    found: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_names, "_answers", lambda name, _: found.append(name))
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2", "^there is no model 'smolm2'; did you mean 'smollm2'\\?$"),
        ("tinny", "^there is no model 'tinny'; did you mean 'tiny'\\?$"),
        ("gpt2", "no folder here, and none of the names tiny, smollm2; one of .* as OWNER/NAME$"),
        ("", "^there is no model ''"),
        ("./none", "^there is no model folder ./none; check the path$"),
        ("none.gguf", "^there is no GGUF file none.gguf; check the path$"),
    ],
)
def test_no_hub_is_asked_for_what_is_no_name_of_its(name: str, says: str, asked: list[str]) -> None:
    for way in (resolve, check_there, Engine.from_pretrained):
        with pytest.raises(InvalidInputError, match=says):
            way(name)
    with pytest.raises(InvalidInputError, match=says.replace("model", "tokenizer")):
        load_tokenizer(name, {})
    assert asked == []


def test_a_folder_needs_no_sign_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    check_there("gpt2")
    assert resolve("gpt2") == "gpt2"
    assert asked == []


def test_a_hub_that_does_not_answer_is_one_sentence(asked: list[str]) -> None:
    says = "^cannot load the (model|tokenizer) 'org/none': it is not on this machine, and https://"
    for way in (check_there, Engine.from_pretrained, lambda name: load_tokenizer(name, {})):
        with pytest.raises(InvalidInputError, match=f"{says}.* cannot be reached$"):
            way("org/none")
    assert set(asked) == {"org/none"}


def test_without_the_hub_what_is_here_is_loaded_as_it_is(tmp_path: Path, asked: list[str]) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    here = {"cache_dir": str(tmp_path)}
    assert offline_options("org/name", here) == {"local_files_only": True}
    with pytest.raises(InvalidInputError, match="not on this machine"):
        offline_options("org/name", {**here, "revision": "v2"})
    assert offline_options("org/name", {**here, "local_files_only": True}) == {}
    assert asked == ["org/name"] * 2


def test_a_hub_that_answers_is_left_to_who_loads(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(model_names, "_answers", lambda *_: True)
    assert offline_options("org/none", {}) == {}
    check_there("org/none")
