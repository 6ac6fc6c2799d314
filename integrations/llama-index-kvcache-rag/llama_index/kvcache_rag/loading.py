"""Make an engine from the arguments of LlamaIndex's `HuggingFaceLLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_rag import Engine, InvalidInputError, PromptTemplate
from kvcache_rag.integration import open_engine

if TYPE_CHECKING:
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
    if model is None and not llm.model_name:
        raise InvalidInputError("KVCacheLLM needs model_name=, model= and tokenizer=, or engine=")
    if model is not None and tokenizer is None:
        raise InvalidInputError("KVCacheLLM with model= needs its tokenizer= too")
    return open_engine(
        llm.model_name if model is None else model,
        tokenizer or llm.tokenizer_name,
        kv_dir=llm.kv_dir,
        kv_max_bytes=llm.kv_max_bytes,
        system_prompt=llm.system_prompt,
        template=template,
        device_map=llm.device_map,
        model_kwargs=llm.model_kwargs,
        tokenizer_kwargs=llm.tokenizer_kwargs,
        context_window=llm.context_window,
        gate=llm.gate,
        rotation=llm.rotation,
    )


def refuse_beside_engine(llm: KVCacheLLM, **given: Any) -> None:
    """Refuse what only a new engine could use, of settings and of `given`.

    Raises:
        InvalidInputError: Naming it.
    """
    names = ("kv_dir", "kv_max_bytes", "system_prompt", "gate", "rotation")
    given = {**{name: getattr(llm, name) for name in names}, **given}
    clash = [name for name, value in given.items() if value]
    if clash:
        raise InvalidInputError(
            f"with engine=, {' and '.join(clash)} belong to the engine; leave them out"
        )
