"""Policies by the names under which commands and evaluations know them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.ape import Ape
from kvcache_rag.policies.auto import auto
from kvcache_rag.policies.base import MOST_PARTS, Union
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.cacheclip import CacheClip
from kvcache_rag.policies.fixed import Combination, FullRecompute, Reuse
from kvcache_rag.policies.legolink import LegoLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.policies.base import ReusePolicy, Scorer

_FORMS = {
    "full": "full",
    "reordered": "reordered",
    "reuse": "reuse",
    "composite": "composite",
    "legolink": "legolink[:TOKENS]",
    "cacheblend": "cacheblend[:RATIO]",
    "cacheclip": "cacheclip[:RATIO[,THRESHOLD or mean]]",
    "ape": "ape[:TEMPERATURE,SCALE]",
    "combination": "combination",
    "auto": "auto:SECONDS[,POLICY]",
}
POLICY_NAMES = tuple(_FORMS)
"""The names that `policy_by_name` knows."""


def policy_by_name(text: str, auxiliary: Scorer | None = None) -> ReusePolicy:
    """A policy written down, such as "cacheblend:0.2".

    Args:
        text: "full", "reordered" or "reuse", "composite", "legolink:TOKENS", "cacheblend:RATIO",
            "cacheclip:RATIO,THRESHOLD" ("mean" for no threshold), "ape:TEMPERATURE,SCALE",
            "combination", "auto:SECONDS,POLICY"; what stands behind a name may be left out (not the
            seconds).  Several, joined by "|", are their union.
        auxiliary: Scores chunks for "cacheclip"; None for the engine's own.

    Raises:
        InvalidInputError: If there is no such policy, or its numbers cannot be used.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f'a policy\'s name is a text such as "cacheblend", not {text!r}')
    if text.count("|") >= MOST_PARTS:
        raise InvalidInputError(f"at most {MOST_PARTS} policies can be joined; name fewer")
    parts = [_one(part.strip(), auxiliary) for part in text.split("|")]
    return parts[0] if len(parts) == 1 else Union(*parts)


def _one(text: str, auxiliary: Scorer | None) -> ReusePolicy:
    name, colon, rest = (part.strip() for part in text.lower().partition(":"))
    if name not in _FORMS:
        close = difflib.get_close_matches(name, POLICY_NAMES, 1)
        hint = f"did you mean {close[0]}? It" if close else "it"
        raise InvalidInputError(
            f"there is no policy {name!r}; {hint} is one of {', '.join(_FORMS.values())}"
        )
    values = [value.strip() for value in rest.split(",")] if rest else []
    if colon and not rest:
        raise InvalidInputError(
            f"nothing stands behind the colon of {text!r}; write {_FORMS[name]}"
        )
    if name == "auto":
        return _auto(values, auxiliary)
    if name == "cacheclip":
        return _cacheclip(values, auxiliary)
    kinds: dict[str, tuple[Callable[..., ReusePolicy], tuple[type, ...]]] = {
        "full": (FullRecompute, ()),
        "reordered": (Reuse, ()),
        "reuse": (Reuse, ()),
        "composite": (lambda: Reuse(positions="composite"), ()),
        "legolink": (LegoLink, (int,)),
        "cacheblend": (CacheBlend, (float,)),
        "ape": (Ape, (float, float)),
        "combination": (Combination, ()),
    }
    make, types = kinds[name]
    if len(values) not in (0, len(types)):
        raise _other_values(name, values)
    return make(*(_number(value, kind, name) for value, kind in zip(values, types, strict=False)))


def _other_values(name: str, values: list[str]) -> InvalidInputError:
    return InvalidInputError(f"{name} does not take {','.join(values)}; write {_FORMS[name]}")


def _cacheclip(values: list[str], auxiliary: Scorer | None) -> ReusePolicy:
    if len(values) > 2:
        raise _other_values("cacheclip", values)
    options: dict[str, Any] = {"auxiliary": auxiliary}
    if values:
        options["ratio"] = _number(values[0], float, "cacheclip")
    if len(values) == 2:
        is_mean = values[1] == "mean"
        options["threshold"] = None if is_mean else _number(values[1], int, "cacheclip")
    return CacheClip(**options)


def _auto(values: list[str], auxiliary: Scorer | None) -> ReusePolicy:
    if not values:
        raise InvalidInputError(f"auto needs a time budget: {_FORMS['auto']}")
    seconds = _number(values[0], float, "auto")
    inner = ",".join(values[1:])
    return auto(seconds, _one(inner, auxiliary) if inner else None)


def _number(value: str, kind: type, name: str) -> float:
    try:
        number: float = kind(value)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise InvalidInputError(
            f"{value!r} is not {what}, which {name} takes: {_FORMS[name]}"
        ) from error
    return number
