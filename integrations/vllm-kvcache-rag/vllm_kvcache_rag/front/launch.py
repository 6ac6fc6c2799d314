"""Make a backend over vLLM servers from settings."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError, RemoteServerError
from kvcache_rag.models.pretrained import bundled_template, is_trained, load_tokenizer, width_of
from kvcache_rag.policies import policy_by_name
from kvcache_rag.policies.default import default_policy
from kvcache_rag.verdict import Gate
from vllm_kvcache_rag.front.backend import VLLMBackend
from vllm_kvcache_rag.front.client import EngineClient, EngineDescription
from vllm_kvcache_rag.front.prompts import Prompts
from vllm_kvcache_rag.transfer.grants import GrantKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_server.settings import ServerSettings

# Seconds within which one of the servers has to be there: they load weights, and may be started
# together with this one.
_PATIENCE: Final = 600.0

_AGAIN: Final = 1.0


def vllm_backend(settings: ServerSettings) -> VLLMBackend:
    """The tokenizer of a model, and the servers that compute it.

    Raises:
        InvalidInputError: If the servers cannot be reached, or serve models of other sizes.
    """
    key = GrantKey.from_file(settings.backend_key)
    options = {} if settings.revision is None else {"revision": settings.revision}
    tokenizer = load_tokenizer(settings.model, options)
    described = asyncio.run(_described(settings.base_url))
    window = min(settings.context_window or described.window, described.window)
    template = settings.prompt_template(bundled_template(settings.model))
    policy = policy_by_name(settings.policy) if settings.policy else None
    if policy is None:
        trained = is_trained(settings.model, options)
        policy = default_policy(trained=trained, width=width_of(settings.model, options))
    return VLLMBackend(
        [EngineClient(url) for url in settings.base_url],
        Prompts(tokenizer, template, window),
        key,
        model=described.model,
        name=settings.name,
        policy=policy,
        gate=None if settings.gate is None else Gate(settings.gate),
        max_waiting=settings.max_waiting,
    )


async def _described(urls: Sequence[str]) -> EngineDescription:
    """What the servers serve, of those that answer; one has to."""
    engines = [EngineClient(url) for url in urls]
    until = time.monotonic() + _PATIENCE
    try:
        while True:
            asked = [engine.describe() for engine in engines]
            replies = await asyncio.gather(*asked, return_exceptions=True)
            found = [reply for reply in replies if isinstance(reply, EngineDescription)]
            wrong = [reply for reply in replies if isinstance(reply, BaseException)]
            for error in wrong:
                if not isinstance(error, RemoteServerError):
                    raise error
            if len({one.model for one in found}) > 1:
                names = sorted({one.model for one in found})
                raise InvalidInputError(
                    f"the servers serve {' and '.join(names)}; name servers of one model"
                )
            if found:
                return min(found, key=lambda one: one.window)
            if time.monotonic() > until:
                raise InvalidInputError(
                    f"no server of vLLM answers: {wrong[0]}; start it, or check --base-url"
                )
            await asyncio.sleep(_AGAIN)
    finally:
        for engine in engines:
            await engine.close()
