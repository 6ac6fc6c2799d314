"""What a connector is told, without vLLM."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import InvalidInputError, MissingExtraError, UnsupportedModelError
from kvcache_rag.stores import DiskStore, RemoteStore, TieredStore
from vllm_kvcache_rag.settings import ConnectorSettings, check_engine, distribution

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_is_said_what_to_install() -> None:
    wanted = (
        r"^vLLM is not installed: pip install 'vllm-kvcache-rag\[cuda\]', or \[cpu\] without a GPU$"
    )
    with pytest.raises(MissingExtraError, match=wanted):
        import_module("vllm_kvcache_rag.connector")
    with pytest.raises(MissingExtraError, match=wanted):
        distribution()


def test_a_folder_with_memory_before_it(tmp_path: Path) -> None:
    plain = ConnectorSettings.of({"store": str(tmp_path), "codec": "native"})
    assert isinstance(plain.open_store(), DiskStore)
    tiered = ConnectorSettings.of({"store": str(tmp_path), "memory_bytes": 1 << 20})
    assert isinstance(tiered.open_store(), TieredStore)
    assert isinstance(ConnectorSettings.of({"store": "memory://kv"}).open_store(), RemoteStore)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "names the folder or URL"),
        ({"store": 3}, "names the folder or URL"),
        ({"store": "kv", "stor": 1}, "has no 'stor'; it takes store, store_bytes"),
        ({"store": "kv", "codec": "int8"}, "cannot be stored as 'int8'.*before rotation"),
    ],
)
def test_what_cannot_be_used_is_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ConnectorSettings.of(extra)


def engine(**changes: Any) -> tuple[Any, Any]:
    """What vLLM says of itself, as far as it is looked at."""
    parallel = SimpleNamespace(pipeline_parallel_size=changes.get("pipeline", 1))
    parallel.decode_context_parallel_size = changes.get("context", 1)
    model = SimpleNamespace(model="M", use_mla=changes.get("mla", False))
    cache = SimpleNamespace(cache_dtype=changes.get("dtype", "auto"))
    config = SimpleNamespace(parallel_config=parallel, model_config=model, cache_config=cache)
    return config, SimpleNamespace(kv_cache_groups=[None] * changes.get("groups", 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla": True}, "latent attention"),
        ({"groups": 2}, "2 groups of layers"),
        ({"pipeline": 2}, "pipeline parallelism"),
        ({"context": 2}, "context parallelism"),
        ({"dtype": "fp8"}, "a cache of fp8"),
    ],
)
def test_an_engine_that_cannot_be_stitched_is_refused(changes: dict[str, Any], words: str) -> None:
    check_engine(*engine())
    with pytest.raises(UnsupportedModelError, match=f"for M: it has {words}"):
        check_engine(*engine(**changes))
