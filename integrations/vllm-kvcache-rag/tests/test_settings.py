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
from vllm_kvcache_rag.transfer.grants import ENVIRONMENT

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
    place = str(tmp_path)
    plain = ConnectorSettings(kv_dir=place, kv_codec="native", kv_max_bytes=1 << 20)
    assert isinstance(plain.open(), DiskStore)
    assert isinstance(ConnectorSettings(kv_dir=place, memory_bytes=1 << 20).open(), TieredStore)
    assert isinstance(ConnectorSettings(kv_dir="memory://kv").open(), RemoteStore)


def test_without_a_key_it_is_said_what_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(InvalidInputError, match="share a key: name its file"):
        ConnectorSettings(kv_dir="kv").grant_key()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "names the folder or URL"),
        ({"kv_dir": 3}, "kv_dir cannot be used: must be a path, not a int"),
        ({"kv_dir": "kv", "kv_dri": 1}, "kv_dri is no setting of .*did you mean kv_dir"),
        ({"kv_dir": "kv", "kv_codec": "int8"}, "cannot be stored as 'int8'.*before rotation"),
    ],
)
def test_what_cannot_be_used_is_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ConnectorSettings(**extra)


class FullAttentionSpec:
    """vLLM's of a cache that keeps all tokens."""


class SlidingWindowSpec(FullAttentionSpec):
    """Of one that gives pages back."""


def engine(**changes: Any) -> tuple[Any, Any]:
    """What vLLM says of itself, as far as it is looked at."""
    told = {"model": "M", "use_mla": False, "is_hybrid": False, "is_attention_free": False}
    told |= {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "cache_dtype": "auto"}
    told |= {"kv_load_failure_policy": "recompute"}
    group = SimpleNamespace(kv_cache_spec=changes.pop("spec", FullAttentionSpec)())
    groups = changes.pop("groups", 1)
    every = SimpleNamespace(**{**told, **changes})
    parts = ("parallel_config", "model_config", "cache_config", "kv_transfer_config")
    config = SimpleNamespace(**dict.fromkeys(parts, every))
    return config, SimpleNamespace(kv_cache_groups=[group] * groups)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"is_hybrid": True, "groups": 2}, "recurrent layers"),
        ({"is_attention_free": True}, "recurrent layers"),
        ({"groups": 2}, "2 groups of layers with caches of their own"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"cache_dtype": "fp8"}, "a cache of fp8"),
        ({"spec": SlidingWindowSpec}, "a cache that does not keep all tokens .SlidingWindowSpec"),
    ],
)
def test_an_engine_that_cannot_be_stitched_is_refused(changes: dict[str, Any], words: str) -> None:
    check_engine(*engine())
    with pytest.raises(UnsupportedModelError, match=f"for M: it has {words}"):
        check_engine(*engine(**changes))


def test_an_engine_that_fails_what_cannot_be_loaded_is_refused() -> None:
    """vLLM's default: a damaged chunk would fail its request."""
    with pytest.raises(InvalidInputError, match='write "kv_load_failure_policy": "recompute" into'):
        check_engine(*engine(kv_load_failure_policy="fail"))
