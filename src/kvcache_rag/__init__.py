"""Prefill every chunk once, keep its KV cache, and answer questions with little more prefilling.

    from kvcache_rag import DiskStore, Engine

    engine = Engine.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", store=DiskStore("kv/"))
    engine.add(texts)
    answer = engine.generate(question, chunks=texts)

This package has what most apps need; the rest is in `kvcache_rag.auxiliary`, `.codecs`, `.errors`,
`.generation`, `.kv`, `.models`, `.policies`, `.prompt`, `.stores` and `.verdict`.  Names are loaded
on first use, so importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.engine import Engine as Engine
    from kvcache_rag.errors import InvalidInputError as InvalidInputError
    from kvcache_rag.errors import KVCacheRagError as KVCacheRagError
    from kvcache_rag.metrics import Answer as Answer
    from kvcache_rag.metrics import Metrics as Metrics
    from kvcache_rag.policies import Ape as Ape
    from kvcache_rag.policies import BestFew as BestFew
    from kvcache_rag.policies import BestLast as BestLast
    from kvcache_rag.policies import BestRead as BestRead
    from kvcache_rag.policies import CacheBlend as CacheBlend
    from kvcache_rag.policies import CacheClip as CacheClip
    from kvcache_rag.policies import Combination as Combination
    from kvcache_rag.policies import FullRecompute as FullRecompute
    from kvcache_rag.policies import LegoLink as LegoLink
    from kvcache_rag.policies import ProphetKV as ProphetKV
    from kvcache_rag.policies import Reuse as Reuse
    from kvcache_rag.prompt.template import Message as Message
    from kvcache_rag.prompt.template import PromptTemplate as PromptTemplate
    from kvcache_rag.stores import DiskStore as DiskStore
    from kvcache_rag.stores import MemoryStore as MemoryStore
    from kvcache_rag.stores import RemoteStore as RemoteStore
    from kvcache_rag.stores import TieredStore as TieredStore
else:
    from kvcache_rag.exports import lazy_names

    # What 0.1 had here, and where it is.
    _MOVED = {
        "auxiliary": "Auxiliary",
        "codecs": "Codec Int4 Int8 Native",
        "errors": "ChunkNotFoundError ContextTooLongError CorruptChunkError"
        " FingerprintMismatchError MissingExtraError RemoteServerError UnsupportedModelError"
        " UntrustedChunkError",
        "generation": "AnswerStream AsyncAnswerStream Explained StoredChunk cancellable in_thread",
        "kv": "ChunkKV ChunkKey",
        "models": "WeightFormat pack_weights unpack_weights",
        "policies": "ReusePolicy Scorer policy_by_name",
        "prompt": "PromptIds",
        "stores": "ByteStore ChunkStore Entry StoreStats StoredChunks",
        "verdict": "Gate Verdict",
    }
    __getattr__, __dir__ = lazy_names(__name__, _MOVED)

__version__ = "0.2.0"
