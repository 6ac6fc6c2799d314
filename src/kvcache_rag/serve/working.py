"""Make a `Work` of a checked body: what chat and completions read alike."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.serve.documents import texts
from kvcache_rag.serve.errors import ApiError
from kvcache_rag.serve.work import Work

if TYPE_CHECKING:
    from kvcache_rag.serve.context import AppContext, Caller
    from kvcache_rag.serve.schema import Asking

# Below it, sampling only ever finds the likeliest token, and logits divided by it overflow.
_COLDEST: Final = 1e-4


def new_id(kind: str) -> str:
    """A name for a request and its answer, such as "chatcmpl-…"."""
    return f"{kind}-{uuid.uuid4().hex}"


def check_model(context: AppContext, asked: str) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404, as OpenAI says it.
    """
    served = context.settings.name
    if asked != served:
        raise ApiError(
            404,
            f"the model {asked[:100]!r} does not exist here; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


def work_of(
    context: AppContext, caller: Caller, body: Asking, *, kind: str, tokens: int, **asked: Any
) -> Work:
    """The request of a caller.

    Args:
        context: The server's.
        caller: Who asks.
        body: Checked by its schema.
        kind: Of its id.
        tokens: Of the answer, at most.
        asked: Fields of `Work` that only this API knows.

    Raises:
        ApiError: If the model is not served, or values do not go together.
    """
    check_model(context, body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400,
            "stream_options is for streams only; leave it out or set stream to true",
            param="stream_options",
        )
    default = context.settings.policy
    policy = default or None if body.kvcache is None else body.kvcache.text(default)
    return Work(
        id=new_id(kind),
        chunks=texts(body.documents or ()),
        namespace=caller.namespace,
        policy=policy,
        max_new_tokens=tokens,
        stop=body.stops,
        options=sampling(body),
        streaming=bool(body.stream),
        **asked,
    )


def sampling(body: Asking) -> dict[str, Any]:
    """Arguments of `generate()`: greedy, unless a temperature says otherwise.

    A `top_p` or `top_k` without one samples at temperature 1, OpenAI's default.
    """
    temperature = body.temperature
    narrowed = body.top_k is not None or (body.top_p is not None and body.top_p < 1)
    if temperature is None:
        temperature = 1.0 if narrowed else 0.0
    if temperature < _COLDEST:
        return {}
    given = {"top_p": body.top_p, "top_k": body.top_k, "seed": body.seed}
    # The model's own generation config may narrow; OpenAI's clients expect what they say.
    options: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    return {**options, **{name: value for name, value in given.items() if value is not None}}
