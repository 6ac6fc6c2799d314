"""Make an engine from the arguments of LlamaIndex's `HuggingFaceLLM`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcache_rag import (
    DiskStore,
    Engine,
    InvalidInputError,
    MemoryStore,
    PromptTemplate,
    TieredStore,
)

if TYPE_CHECKING:
    from kvcache_rag import ChunkStore
    from llama_index.kvcache_rag.llm import KVCacheLLM


def load_engine(
    llm: KVCacheLLM, model: Any, tokenizer: Any, template: PromptTemplate | None
) -> Engine:
    """Load what `llm` describes.

    Args:
        llm: The settings.
        model: A loaded model, None to load `llm.model_name`.
        tokenizer: Its tokenizer; None for the model's own or `llm.tokenizer_name`.
        template: How prompts are written; None for the model's own or the default.

    Raises:
        InvalidInputError: If it is not said which model, or it cannot be loaded.
    """
    common: dict[str, Any] = {
        "store": store_in(llm.kv_dir, llm.kv_max_bytes),
        "context_window": llm.context_window,
    }
    if model is None:
        if not llm.model_name:
            raise InvalidInputError(
                "KVCacheLLM needs model_name=, model= and tokenizer=, or engine="
            )
        engine = Engine.from_pretrained(
            llm.model_name, template=template, **_placing(llm), **common
        )
        other = tokenizer or _other_tokenizer(llm)
        if other is None and not llm.system_prompt:
            return engine
        model, tokenizer, template = engine.model, other or engine.tokenizer, engine.template
    elif tokenizer is None:
        raise InvalidInputError("KVCacheLLM with model= needs its tokenizer= too")
    if llm.system_prompt:
        # A system prompt stands before the chunks, so it is part of what they are computed behind.
        template = replace(template or PromptTemplate(), system=llm.system_prompt)
    return Engine(model, tokenizer, template=template, **common)


def refuse_beside_engine(llm: KVCacheLLM, **given: Any) -> None:
    """Refuse what only a new engine could use, of settings and of `given`.

    Raises:
        InvalidInputError: Naming it.
    """
    names = ("kv_dir", "kv_max_bytes", "system_prompt")
    given = {**{name: getattr(llm, name) for name in names}, **given}
    clash = [name for name, value in given.items() if value]
    if clash:
        raise InvalidInputError(
            f"with engine=, {' and '.join(clash)} belong to the engine; leave them out"
        )


def store_in(kv_dir: str | None, max_bytes: int | None = None) -> ChunkStore:
    """Memory in front of a folder of at most `max_bytes`; without a folder, memory alone."""
    if kv_dir is None:
        return MemoryStore()
    return TieredStore(MemoryStore(), DiskStore(kv_dir, max_bytes=max_bytes))


def _placing(llm: KVCacheLLM) -> dict[str, Any]:
    model_kwargs = dict(llm.model_kwargs)
    placing: dict[str, Any] = {"dtype": model_kwargs.pop("dtype", None) or "auto"}
    if llm.device_map is not None and not isinstance(llm.device_map, str):
        model_kwargs["device_map"] = llm.device_map
    elif llm.device_map not in (None, "auto"):
        placing["device"] = llm.device_map
    return {**placing, "model_kwargs": model_kwargs}


def _other_tokenizer(llm: KVCacheLLM) -> Any:
    if llm.tokenizer_name is None and not llm.tokenizer_kwargs:
        return None
    from transformers import AutoTokenizer

    name = llm.tokenizer_name or llm.model_name
    try:
        return AutoTokenizer.from_pretrained(name, **llm.tokenizer_kwargs)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInputError(f"cannot load the tokenizer {name!r}: {reason}") from error
