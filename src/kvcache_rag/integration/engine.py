"""The engine of an application: a local one by its settings, or a server's."""

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
"""The group of entry points by which a package brings a server's client."""


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
    """Load what the settings describe.

    Args:
        model: By name, as for `LocalSettings`; or a loaded transformers or PEFT model.
        tokenizer: A loaded one or a name; None for the model's own.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        model_kwargs: As for `LocalSettings`.
        auxiliary: As for `LocalSettings`; or a scorer.
        policy: As for `LocalSettings.open_engine`.
        settings: Of `LocalSettings`; None says nothing.

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
    """What answers at a server, as integrations use an engine.

    It has the methods of `Engine` that they call, with the same arguments; the others are for who
    loads a model.

    Args:
        base_url: Of a `kvcache-rag serve`.
        options: Of that client.

    Raises:
        InvalidInputError: If it is no URL.
        MissingExtraError: If kvcache-rag-server is not installed.
    """
    try:
        client = next(iter(entry_points(group=REMOTE))).load()
    except (StopIteration, ImportError) as error:
        raise MissingExtraError("kvcache-rag-server", "server") from error
    return cast("Engine", client(base_url, **options))


def refuse_beside_engine(given: Mapping[str, Any]) -> None:
    """Refuse what only a new engine could use.

    Raises:
        InvalidInputError: If something is said; naming it.
    """
    clash = [*said_options(given)]
    if clash:
        raise InvalidInputError(
            f"with engine=, {' and '.join(clash)} belong to the engine; leave them out"
        )


def refuse_beside_server(given: Mapping[str, Any], weight_format: str) -> None:
    """Refuse what changes answers, where a server has its own.

    Where keys and values lie, and on which device they are computed, is taken beside `base_url=`
    and means nothing, so that an app can move by it alone; so are weights that round nothing.

    Raises:
        InvalidInputError: If something is said; naming it.
    """
    clash = [*said_options(given)] + ["weight_format"] * (weight_format in ("int8", "int4"))
    if clash:
        raise InvalidInputError(
            f"with base_url=, {' and '.join(clash)} {'are' if len(clash) > 1 else 'is'} the "
            "server's to say; leave it out"
        )
