"""Prefill every chunk once, keep its KV cache, and answer by prefilling only the question.

    from kvcache_rag import DiskStore, Engine

    engine = Engine.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", store=DiskStore("kv/"))
    engine.add(texts)
    answer = engine.generate(question, chunks=texts)

Names are loaded when they are first used, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache_rag.auxiliary import Auxiliary
    from kvcache_rag.codecs import Codec, Int4, Int8, Native
    from kvcache_rag.engine import Engine
    from kvcache_rag.errors import (
        ChunkNotFoundError,
        ContextTooLongError,
        CorruptChunkError,
        FingerprintMismatchError,
        InvalidInputError,
        KVCacheRagError,
        MissingExtraError,
        UnsupportedModelError,
    )
    from kvcache_rag.generation.explain import Explained
    from kvcache_rag.generation.request import StoredChunk
    from kvcache_rag.generation.stream import (
        AnswerStream,
        AsyncAnswerStream,
        cancellable,
        in_thread,
    )
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.metrics import Answer, Metrics
    from kvcache_rag.policies import (
        Ape,
        CacheBlend,
        CacheClip,
        Combination,
        FullRecompute,
        LegoLink,
        Reuse,
        ReusePolicy,
        Scorer,
        Union,
        auto,
        policy_by_name,
    )
    from kvcache_rag.prefetch import Prefetch, Prefetcher
    from kvcache_rag.prompt.renderer import PromptIds
    from kvcache_rag.prompt.template import Message, PromptTemplate
    from kvcache_rag.stores import (
        ChunkStore,
        DiskStore,
        MemoryStore,
        RemoteStore,
        StoreStats,
        TieredStore,
    )
    from kvcache_rag.verdict import Gate, Verdict

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnswerStream",
    "Ape",
    "AsyncAnswerStream",
    "Auxiliary",
    "CacheBlend",
    "CacheClip",
    "ChunkKV",
    "ChunkKey",
    "ChunkNotFoundError",
    "ChunkStore",
    "Codec",
    "Combination",
    "ContextTooLongError",
    "CorruptChunkError",
    "DiskStore",
    "Engine",
    "Explained",
    "FingerprintMismatchError",
    "FullRecompute",
    "Gate",
    "Int4",
    "Int8",
    "InvalidInputError",
    "KVCacheRagError",
    "LegoLink",
    "MemoryStore",
    "Message",
    "Metrics",
    "MissingExtraError",
    "Native",
    "Prefetch",
    "Prefetcher",
    "PromptIds",
    "PromptTemplate",
    "RemoteStore",
    "Reuse",
    "ReusePolicy",
    "Scorer",
    "StoreStats",
    "StoredChunk",
    "TieredStore",
    "Union",
    "UnsupportedModelError",
    "Verdict",
    "auto",
    "cancellable",
    "in_thread",
    "policy_by_name",
]

_HOMES = {
    "auxiliary": ("Auxiliary",),
    "codecs": ("Codec", "Int4", "Int8", "Native"),
    "engine": ("Engine",),
    "errors": (
        "ChunkNotFoundError",
        "ContextTooLongError",
        "CorruptChunkError",
        "FingerprintMismatchError",
        "InvalidInputError",
        "KVCacheRagError",
        "MissingExtraError",
        "UnsupportedModelError",
    ),
    "generation.explain": ("Explained",),
    "generation.request": ("StoredChunk",),
    "generation.stream": ("AnswerStream", "AsyncAnswerStream", "cancellable", "in_thread"),
    "kv.chunk": ("ChunkKV", "ChunkKey"),
    "metrics": ("Answer", "Metrics"),
    "policies": (
        "Ape",
        "CacheBlend",
        "CacheClip",
        "Combination",
        "FullRecompute",
        "LegoLink",
        "Reuse",
        "ReusePolicy",
        "Scorer",
        "Union",
        "auto",
        "policy_by_name",
    ),
    "prefetch": ("Prefetch", "Prefetcher"),
    "prompt.renderer": ("PromptIds",),
    "prompt.template": ("Message", "PromptTemplate"),
    "stores": (
        "ChunkStore",
        "DiskStore",
        "MemoryStore",
        "RemoteStore",
        "StoreStats",
        "TieredStore",
    ),
    "verdict": ("Gate", "Verdict"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvcache_rag' has no attribute {name!r}")
    return getattr(import_module(f"kvcache_rag.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
