"""The private attributes that tests look at: each behind one function, which says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.stores import object_names

if TYPE_CHECKING:
    from kvcache_rag import Engine, MemoryStore, RemoteStore
    from kvcache_rag.generation.runner import Runner
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.stores.base import ChunkLayout
    from kvcache_rag.stores.remote import Objects
    from kvcache_rag.stores.transport import Transport
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.scheduler import Scheduler
    from kvcache_rag_server.worker import Engines
    from langchain_kvcache_rag import KVCacheChroma


# An engine.
def adapter(engine: Engine) -> TransformersModel:
    """The model with what was measured of it."""
    return engine._adapter


def chunk_layout(engine: Engine) -> ChunkLayout:
    """Shapes of its chunks."""
    return adapter(engine).measured.chunk_layout


def runner(engine: Engine) -> Runner:
    """What answers one question after the other."""
    return engine._bound.runner


def renderer(engine: Engine) -> PromptRenderer:
    """What makes tokens of texts."""
    return engine._bound.renderer


def remembered_ids(renderer: PromptRenderer) -> Any:
    """Of texts, by namespace."""
    return renderer._ids


def prefiller(engine: Engine) -> Any:
    """What computes chunks; a `Prefiller`, or None where keys cannot move."""
    return engine._bound.prefiller


def lock(engine: Engine) -> Any:
    """What whoever uses the model holds."""
    return engine._lock


# A server.
def engines(backend: LocalBackend) -> Engines:
    """The engines of its tenants."""
    return backend._engines


def scheduler(backend: LocalBackend) -> Scheduler:
    """Its queue."""
    return backend._scheduler


# Stores.
def transport(store: RemoteStore) -> Transport:
    """Where its calls go."""
    return store._transport


def objects(store: RemoteStore) -> Objects:
    """The place under it."""
    return store.place


def remote_root(store: RemoteStore) -> Path:
    """The folder of one on a folder."""
    return Path(transport(store).root)


def remote_path(store: RemoteStore, key: ChunkKey) -> Path:
    """The file of a chunk of one on a folder."""
    return Path(objects(store).path(object_names.chunk_name(key)))


def namespace_folder(root: Path | str, namespace: str) -> str:
    """Folder of a tenant."""
    return f"{root}/{object_names.namespace_digest(namespace)}"


def chunks(store: MemoryStore) -> Any:
    """What it holds: by key."""
    return store._chunks


# LangChain's vector store.
def collection(store: KVCacheChroma) -> Any:
    """Chroma's collection under it, with our wrapper around it."""
    return store._collection


def client(store: Any) -> Any:
    """Chroma's client of a store or of a collection."""
    return store._client


# transformers.
def attention(config: Any) -> str:
    """The name of the attention that a model computes with."""
    name: str = config._attn_implementation
    return name
