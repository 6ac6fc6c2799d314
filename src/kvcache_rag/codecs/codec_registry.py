"""Codecs by the names that commands use."""

from __future__ import annotations

from kvcache_rag.codecs.base import Codec, Native
from kvcache_rag.codecs.int4 import Int4
from kvcache_rag.codecs.int8 import Int8
from kvcache_rag.errors import InvalidInputError

CODECS: dict[str, type[Codec]] = {"native": Native, "int8": Int8, "int4": Int4}


def by_name(name: str) -> Codec:
    """The codec with a short name such as "int8", or a name in files such as "int8-kc-vt".

    Raises:
        InvalidInputError: If no codec has that name.
    """
    for short, codec in CODECS.items():
        if name in (short, codec.name):
            return codec()
    raise InvalidInputError(f"there is no codec {name!r}; use one of {', '.join(CODECS)}")


def codec_of(given: Codec | str | None) -> Codec:
    """The codec that a store is given, itself or by its name; `Native()` without one.

    Raises:
        InvalidInputError: If it is none.
    """
    if given is None:
        return Native()
    if isinstance(given, str):
        return by_name(given)
    if not isinstance(given, Codec):
        raise InvalidInputError(f'codec must be such as Int8() or "int8", not {given!r:.80}')
    return given
