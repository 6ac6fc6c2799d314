"""Translate LlamaIndex's messages and options into transformers' form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from llama_index.core.base.llms.types import MessageRole

from kvcache_rag.errors import arguments_of, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from llama_index.core.base.llms.types import ChatMessage


_ROLES: Final = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
}

_OF_RETRIEVERS: Final = (
    "alpha",
    "doc_ids",
    "filters",
    "hybrid_top_k",
    "node_ids",
    "sparse_top_k",
    "vector_store_kwargs",
    "vector_store_query_mode",
)


def refuse_others(
    options: Mapping[str, Any], kind: type, *makers: Callable[..., Any], known: Iterable[str] = ()
) -> None:
    """Refuse options that nobody takes to whom they are handed on.

    Args:
        options: Of a method that makes an engine.
        kind: The engine.
        makers: These methods, one calling the next, and what the last of them makes.
        known: What is taken besides their arguments.

    Raises:
        InvalidInputError: If one is unknown.
    """
    taken = {*arguments_of(*makers), *_OF_RETRIEVERS, *known}
    refuse_unknown(options, taken, f"argument of {kind.__name__}")


def turn(message: ChatMessage) -> dict[str, str]:
    """A message as chat templates read it; what is not text in it is left out."""
    role = _ROLES.get(message.role, message.role.value)
    return {"role": role, "content": message.content or ""}


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as settings are written down: of what is no JSON, such as a dtype, the name."""
    kinds = (str, int, float, bool, list, dict, type(None))
    return {key: one if isinstance(one, kinds) else str(one) for key, one in options.items()}


def of_retriever(options: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of `index.as_retriever` out of those of an engine, as LlamaIndex does."""
    return {name: options.pop(name) for name in _OF_RETRIEVERS if name in options}


def ending_with(stopping_ids: Sequence[int], model: Any) -> list[int]:
    """Ids that end an answer: those asked for and the model's own."""
    own = model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [own]
    return sorted({*stopping_ids, *(token for token in listed if token is not None)})
