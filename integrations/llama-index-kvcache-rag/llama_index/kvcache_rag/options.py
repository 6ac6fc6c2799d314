"""LlamaIndex's way of saying things to a model in transformers' way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Final

from llama_index.core.base.llms.types import MessageRole
from llama_index.core.bridge.pydantic import BeforeValidator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llama_index.core.base.llms.types import ChatMessage

PathText = Annotated[str, BeforeValidator(os.fspath)]
"""A path as text, given as either."""

_ROLES: Final = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
}


def turn(message: ChatMessage) -> dict[str, str]:
    """A message as chat templates read it; what is not text in it is left out."""
    role = _ROLES.get(message.role, message.role.value)
    return {"role": role, "content": message.content or ""}


def generation_options(
    given: Mapping[str, Any], eos_token_id: list[int] | None = None
) -> dict[str, Any]:
    """Keyword arguments of generation from those of a call.

    Args:
        given: A `temperature` above 0 samples and 0 does not, unless `do_sample` says otherwise.
        eos_token_id: Ends an answer, unless the call says otherwise.
    """
    options = dict(given)
    temperature = options.get("temperature")
    if temperature is not None:
        # Without do_sample, transformers would ignore the temperature with a warning.
        options.setdefault("do_sample", temperature > 0)
    if not options.get("do_sample", True):
        options.pop("temperature", None)
    if eos_token_id is not None:
        options.setdefault("eos_token_id", eos_token_id)
    return options


def ending_with(stopping_ids: Sequence[int], own: int | list[int] | None) -> list[int]:
    """Ids that end an answer: those asked for and the model's own."""
    listed = own if isinstance(own, list) else [own]
    return sorted({*stopping_ids, *(token for token in listed if token is not None)})
