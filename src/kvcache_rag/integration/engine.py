"""The engine of an application: a local one from settings, or a server's."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, cast

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.settings import said_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.engine import Engine
    from kvcache_rag.policies.base import ReusePolicy, Scorer

REMOTE: Final = "kvcache_rag.remote_engines"
"""The entry point group for a server's client."""


def open_engine(
    model: Any,
    tokenizer: Any = None,
    *,
    device_map: str | Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    auxiliary: Scorer | str | os.PathLike[str] | None = None,
    policy: ReusePolicy | None = None,
    **settings: Any,
) -> Engine:
    """Load the engine that the settings describe.

    Args:
        model: A name, as in `LocalSettings`, or a loaded transformers or PEFT model.
        tokenizer: A loaded tokenizer or its name; None for the model's own.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        model_kwargs: See `LocalSettings`.
        auxiliary: See `LocalSettings`; or a scorer.
        policy: See `LocalSettings.open_engine`.
        settings: Fields of `LocalSettings`; None means not set.

    Raises:
        InvalidInputError: If a setting cannot be used, a model or tokenizer cannot be loaded, or a
            loaded model comes without its tokenizer.
        FingerprintMismatchError: If the gate is about another model, instruction or template.
    """
    from kvcache_rag.models.pretrained import DEVICE_PLANS
    from kvcache_rag.settings import LocalSettings

    further = dict(model_kwargs or {})
    given = {name: value for name, value in settings.items() if value is not None}
    if not given.get("system_prompt"):
        given.pop("system_prompt", None)
    if (dtype := further.pop("dtype", None)) is not None:
        given["dtype"] = dtype
    if isinstance(device_map, str) and device_map not in DEVICE_PLANS:
        given["device"] = device_map
    elif device_map not in (None, "auto"):
        further["device_map"] = device_map
    loaded: dict[str, Any] = {}
    for name, value in (("model", model), ("tokenizer", tokenizer), ("auxiliary", auxiliary)):
        if value is not None:
            is_named = isinstance(value, (str, os.PathLike))
            (given if is_named else loaded)[name] = value
    return LocalSettings(model_kwargs=further, **given).open(**loaded, policy=policy)


def remote_engine(base_url: str, **options: Any) -> Engine:
    """A client of a server that integrations use like an engine.

    It has the methods of `Engine` that they call, with the same arguments; the others need a loaded
    model.

    Args:
        base_url: URL of a `kvcache-rag serve`.
        options: Further arguments of the client.

    Raises:
        InvalidInputError: If it is not a URL.
        MissingExtraError: If kvcache-rag-server is not installed.
    """
    try:
        client = next(iter(entry_points(group=REMOTE))).load()
    except (StopIteration, ImportError) as error:
        raise MissingExtraError("kvcache-rag-server", "server") from error
    return cast("Engine", client(base_url, **options))


def refuse_beside_engine(given: Mapping[str, Any]) -> None:
    """Refuse options that only a new engine could use.

    Raises:
        InvalidInputError: If one is set; names it.
    """
    clash = [*said_options(given)]
    if clash:
        raise InvalidInputError(
            f"with engine=, {' and '.join(clash)} belong to the engine; leave them out"
        )


def refuse_beside_server(given: Mapping[str, Any], weight_format: str) -> None:
    """Refuse options that change answers, which a server has itself.

    Options for where keys and values are kept or computed, and weights without rounding, are
    accepted with `base_url=` but have no effect, so that an app can switch by it alone.

    Raises:
        InvalidInputError: If one is set; names it.
    """
    clash = [*said_options(given)] + ["weight_format"] * (weight_format in ("int8", "int4"))
    if clash:
        raise InvalidInputError(
            f"with base_url=, {' and '.join(clash)} {'are' if len(clash) > 1 else 'is'} the "
            "server's to say; leave it out"
        )
