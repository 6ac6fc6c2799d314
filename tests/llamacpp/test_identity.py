"""Whose chunks are found: those of the same file, of the same kind of cache, the same version."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from laws import QUESTION, TEXTS
from llamacpp.asking import opened
from llamacpp.ggufs import LENGTH

from kvcache_rag import DiskStore, Engine, PromptTemplate, Reuse
from kvcache_rag.errors import FingerprintMismatchError
from kvcache_rag_llamacpp import model as llamacpp

if TYPE_CHECKING:
    from pathlib import Path

    from llamacpp.conftest import Files


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def misses(engine: Engine) -> int:
    found: int = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1).metrics.misses
    return found


@pytest.fixture
def first(files: Files, store: DiskStore) -> Engine:
    """Whose chunks are in the store."""
    engine = opened(files("phi3"), store=store)
    engine.add(TEXTS)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"model_kwargs": {"flash_attn": True}},
        {"context_window": LENGTH},
        {"template": PromptTemplate(system="Look here.\n", chunk_start="<d>", chunk_end="</d>")},
        {"namespace": "other"},
        {"backend": "transformers"},
    ],
    ids=str,
)
def test_what_was_computed_otherwise_is_not_found(
    first: Engine, files: Files, store: DiskStore, options: dict[str, Any]
) -> None:
    """Law: other caches, other attention, other frequencies have other addresses."""
    other = opened(files("phi3"), store=store, **options)
    assert other.keys(TEXTS) != first.keys(TEXTS)
    assert (other.spec == first.spec) is ("namespace" in options)
    assert misses(other) == len(TEXTS)
    assert misses(first) == 0
    if "namespace" not in options:
        key = first.keys(TEXTS)[0]
        with pytest.raises(FingerprintMismatchError):
            other.reference(key.digest, key.spec, key.tokens)


def test_what_another_version_computed_is_not_found(
    first: Engine, files: Files, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llamacpp, "installed_version", lambda: "0.3.37 (b99999)")
    assert misses(opened(files("phi3"), store=store)) == len(TEXTS)


def test_what_other_weights_gave_is_not_found(
    first: Engine, files: Files, store: DiskStore
) -> None:
    assert misses(opened(files("phi3@1"), store=store)) == len(TEXTS)


def test_of_another_file_nothing_is_found(
    first: Engine, files: Files, store: DiskStore, tmp_path: Path
) -> None:
    """Law: one byte of its bytes is enough, wherever it is; its name and place are nothing."""
    path = tmp_path / "elsewhere.gguf"
    shutil.copy(files("phi3"), path)
    assert misses(opened(path, store=store)) == 0
    path.write_bytes(path.read_bytes().replace(b"random", b"Random"))
    assert misses(opened(path, store=store)) == len(TEXTS)


@pytest.mark.parametrize(
    "options",
    [{}, {"model_kwargs": {"n_threads": 2}}, {"context_window": 400}, {"policy": Reuse()}],
    ids=str,
)
def test_the_same_is_found(
    first: Engine, files: Files, store: DiskStore, options: dict[str, Any]
) -> None:
    other = opened(files("phi3"), store=store, **options)
    assert other.keys(TEXTS) == first.keys(TEXTS)
    assert misses(other) == 0


def test_another_side_of_longropes_length_needs_a_model_of_its_own(files: Files) -> None:
    """Law: contexts have one set of frequencies, so engines of one model agree on it."""
    engine = opened(files("phi3"))
    with pytest.raises(ValueError, match="load the file once more"):
        Engine(engine.model, engine.tokenizer, context_window=LENGTH)
    same = Engine(engine.model, engine.tokenizer, template=engine.template, context_window=300)
    assert same.spec == engine.spec
