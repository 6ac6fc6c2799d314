"""Prefill every chunk once, keep its KV cache, and prefill little more when a question comes.

    from kvcache_rag import DiskStore, Engine

    engine = Engine.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", store=DiskStore("kv/"))
    engine.add(texts)
    answer = engine.generate(question, chunks=texts)

Names are loaded when they are first used, so importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag.auxiliary import Auxiliary as Auxiliary
    from kvcache_rag.codecs import Codec as Codec
    from kvcache_rag.codecs import Int4 as Int4
    from kvcache_rag.codecs import Int8 as Int8
    from kvcache_rag.codecs import Native as Native
    from kvcache_rag.engine import Engine as Engine
    from kvcache_rag.errors import ChunkNotFoundError as ChunkNotFoundError
    from kvcache_rag.errors import ContextTooLongError as ContextTooLongError
    from kvcache_rag.errors import CorruptChunkError as CorruptChunkError
    from kvcache_rag.errors import FingerprintMismatchError as FingerprintMismatchError
    from kvcache_rag.errors import InvalidInputError as InvalidInputError
    from kvcache_rag.errors import KVCacheRagError as KVCacheRagError
    from kvcache_rag.errors import MissingExtraError as MissingExtraError
    from kvcache_rag.errors import RemoteServerError as RemoteServerError
    from kvcache_rag.errors import UnsupportedModelError as UnsupportedModelError
    from kvcache_rag.errors import UntrustedChunkError as UntrustedChunkError
    from kvcache_rag.generation.explain import Explained as Explained
    from kvcache_rag.generation.request import StoredChunk as StoredChunk
    from kvcache_rag.generation.stream import AnswerStream as AnswerStream
    from kvcache_rag.generation.stream import AsyncAnswerStream as AsyncAnswerStream
    from kvcache_rag.generation.stream import cancellable as cancellable
    from kvcache_rag.generation.stream import in_thread as in_thread
    from kvcache_rag.kv.chunk import ChunkKey as ChunkKey
    from kvcache_rag.kv.chunk import ChunkKV as ChunkKV
    from kvcache_rag.metrics import Answer as Answer
    from kvcache_rag.metrics import Metrics as Metrics
    from kvcache_rag.models.linears import WeightFormat as WeightFormat
    from kvcache_rag.models.linears import pack_weights as pack_weights
    from kvcache_rag.models.linears import unpack_weights as unpack_weights
    from kvcache_rag.policies import Ape as Ape
    from kvcache_rag.policies import BestLast as BestLast
    from kvcache_rag.policies import CacheBlend as CacheBlend
    from kvcache_rag.policies import CacheClip as CacheClip
    from kvcache_rag.policies import Combination as Combination
    from kvcache_rag.policies import FullRecompute as FullRecompute
    from kvcache_rag.policies import LegoLink as LegoLink
    from kvcache_rag.policies import ProphetKV as ProphetKV
    from kvcache_rag.policies import Reuse as Reuse
    from kvcache_rag.policies import ReusePolicy as ReusePolicy
    from kvcache_rag.policies import Scorer as Scorer
    from kvcache_rag.policies import policy_by_name as policy_by_name
    from kvcache_rag.prompt.renderer import PromptIds as PromptIds
    from kvcache_rag.prompt.template import Message as Message
    from kvcache_rag.prompt.template import PromptTemplate as PromptTemplate
    from kvcache_rag.stores import ByteStore as ByteStore
    from kvcache_rag.stores import ChunkStore as ChunkStore
    from kvcache_rag.stores import DiskStore as DiskStore
    from kvcache_rag.stores import Entry as Entry
    from kvcache_rag.stores import MemoryStore as MemoryStore
    from kvcache_rag.stores import RemoteStore as RemoteStore
    from kvcache_rag.stores import StoredChunks as StoredChunks
    from kvcache_rag.stores import StoreStats as StoreStats
    from kvcache_rag.stores import TieredStore as TieredStore
    from kvcache_rag.verdict import Gate as Gate
    from kvcache_rag.verdict import Verdict as Verdict
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)

__version__ = "0.1.0"
