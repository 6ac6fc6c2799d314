"""Make an engine from the settings of an application."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcache_rag.engine import Engine
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.pretrained import TINY, load_tokenizer, resolve
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag.stores import DiskStore, MemoryStore, TieredStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.generation.context import RotationMode
    from kvcache_rag.stores import ChunkStore


def open_engine(
    model: Any,
    tokenizer: Any = None,
    *,
    kv_dir: str | os.PathLike[str] | None = None,
    kv_max_bytes: int | None = None,
    system_prompt: str | None = None,
    template: PromptTemplate | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
    context_window: int | None = None,
    gate: str | os.PathLike[str] | None = None,
    rotation: RotationMode | None = None,
) -> Engine:
    """Load what the settings describe.

    Args:
        model: Hub id, folder or "tiny"; or a loaded transformers model.
        tokenizer: A loaded one or a name; None for the model's own.
        kv_dir: Folder of the chunks' KV; None to keep it in memory only.
        kv_max_bytes: Limit of that folder.
        system_prompt: Instruction before the chunks, instead of the template's.
        template: How prompts are written; None for the one the model brings, else the default.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        model_kwargs: Further arguments of the model's `from_pretrained`, such as `dtype`.
        tokenizer_kwargs: Further arguments of the tokenizer's `from_pretrained`.
        context_window: Lower it to keep prompts short; None for the model's own.
        gate: File that `kvcache-rag verify` wrote (see `Engine`).
        rotation: Whether chunks are copied, or attended to where they lie; None for "auto".

    Raises:
        InvalidInputError: If model or tokenizer cannot be loaded, or a loaded model comes without
            its tokenizer.
        FingerprintMismatchError: If the gate is about another model, instruction or template.
    """
    common: dict[str, Any] = {
        "context_window": context_window,
        "gate": gate,
        "rotation": rotation or "auto",
    }
    named = isinstance(model, (str, os.PathLike))
    if tokenizer is None and tokenizer_kwargs and named:
        tokenizer = os.fspath(model)
    if isinstance(tokenizer, str):
        path = resolve(tokenizer) if tokenizer == TINY else tokenizer
        tokenizer = load_tokenizer(path, dict(tokenizer_kwargs or {}))
    store = store_in(kv_dir, kv_max_bytes)
    if named:
        placing = _placing(device_map, dict(model_kwargs or {}))
        if tokenizer is None and not system_prompt:
            placing.update(common)
            return Engine.from_pretrained(model, template=template, store=store, **placing)
        # Without the gate, which is about the template that follows.
        engine = Engine.from_pretrained(model, template=template, store=store, **placing)
        model, template = engine.model, engine.template
        tokenizer = tokenizer or engine.tokenizer
    elif tokenizer is None:
        raise InvalidInputError("a loaded model needs its tokenizer= too")
    if system_prompt:
        # It stands before the chunks, so it is part of what they are computed behind.
        template = replace(template or PromptTemplate(), system=system_prompt)
    return Engine(model, tokenizer, template=template, store=store, **common)


def store_in(kv_dir: str | os.PathLike[str] | None, max_bytes: int | None = None) -> ChunkStore:
    """Memory in front of a folder of at most `max_bytes`; without a folder, memory alone."""
    if kv_dir is None:
        return MemoryStore()
    return TieredStore(MemoryStore(), DiskStore(kv_dir, max_bytes=max_bytes))


def _placing(
    device_map: str | Mapping[str, Any] | None, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    placing: dict[str, Any] = {"dtype": model_kwargs.pop("dtype", None) or "auto"}
    if device_map is not None and not isinstance(device_map, str):
        model_kwargs["device_map"] = device_map
    elif device_map not in (None, "auto"):
        placing["device"] = device_map
    return {**placing, "model_kwargs": model_kwargs}
