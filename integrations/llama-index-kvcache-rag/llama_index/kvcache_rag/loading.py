"""Make an engine from the arguments of LlamaIndex's `HuggingFaceLLM`."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import Engine, InvalidInputError, PromptTemplate
from kvcache_rag.integration import open_engine

if TYPE_CHECKING:
    from llama_index.kvcache_rag.llm import KVCacheLLM

# Without effect beside `engine=`, and taken all the same, as `HuggingFaceLLM` takes them beside a
# loaded model; a `context_window` is what LlamaIndex is told.
_HARMLESS: Final = ("context_window", "device_map", "model_kwargs", "tokenizer_kwargs")


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
        template=template,
        **{name: getattr(llm, name) for name in _settings(llm)},
    )


def refuse_beside_engine(llm: KVCacheLLM, **given: Any) -> None:
    """Refuse what only a new engine could use, of settings and of `given`.

    Raises:
        InvalidInputError: Naming it.
    """
    settings = {name: getattr(llm, name) for name in _settings(llm) if name not in _HARMLESS}
    if settings["weight_format"] == "auto":  # nothing was said
        del settings["weight_format"]
    clash = [name for name, value in {**settings, **given}.items() if value]
    if clash:
        raise InvalidInputError(
            f"with engine=, {' and '.join(clash)} belong to the engine; leave them out"
        )


def _settings(llm: KVCacheLLM) -> list[str]:
    """The fields of an LLM that `open_engine` takes by the same name."""
    return [name for name in signature(open_engine).parameters if name in type(llm).model_fields]
