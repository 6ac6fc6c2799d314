"""The public names of the core, by the module that has them, and what each is."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

TOP: Final = (
    *("Answer", "Ape", "BestFew", "BestLast", "BestRead", "CacheBlend", "CacheClip", "Combination"),
    *("DiskStore", "Engine", "FullRecompute", "InvalidInputError", "KVCacheRagError"),
    *("LegoLink", "MemoryStore", "Message", "Metrics", "PromptTemplate", "ProphetKV"),
    *("RemoteStore", "Reuse", "TieredStore"),
)
"""What most apps need."""
ELSEWHERE: Final = {
    "auxiliary": ("Auxiliary",),
    "codecs": ("Codec", "Int4", "Int8", "Native"),
    "errors": (
        *("ChunkNotFoundError", "ContextTooLongError", "CorruptChunkError"),
        *("FingerprintMismatchError", "MissingExtraError", "RemoteServerError"),
        *("UnsupportedModelError", "UntrustedChunkError"),
    ),
    "generation": (
        *("AnswerStream", "AsyncAnswerStream", "Explained", "StoredChunk"),
        *("cancellable", "in_thread"),
    ),
    "kv": ("ChunkKV", "ChunkKey"),
    "models": ("WeightFormat", "pack_weights", "unpack_weights"),
    "policies": ("ReusePolicy", "Scorer", "policy_by_name"),
    "prompt": ("PromptIds",),
    "stores": ("ByteStore", "ChunkStore", "Entry", "StoreStats", "StoredChunks"),
    "verdict": ("Gate", "Verdict"),
}
"""What 0.1 had beside them."""
HOMES: Final = {name: f"kvcache_rag.{home}" for home, names in ELSEWHERE.items() for name in names}


def public(name: str) -> Any:
    """What a public name is."""
    return getattr(import_module(HOMES.get(name, "kvcache_rag")), name)
