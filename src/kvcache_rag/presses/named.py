"""Presses by the names under which commands know them, such as "knorm:0.5"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.presses.expected_attention import ExpectedAttention
from kvcache_rag.presses.knorm import Knorm
from kvcache_rag.presses.snapkv import SnapKV

if TYPE_CHECKING:
    from kvcache_rag.presses.base import Press

PRESSES: dict[str, type[Press]] = {
    press.name: press for press in (Knorm, ExpectedAttention, SnapKV)
}


def press_by_name(name: str) -> Press:
    """The press of a name and the share that it keeps, such as "knorm:0.5".

    Raises:
        InvalidInputError: If there is none of that name, or the share is no number above 0 and at
            most 1.
    """
    kind, _, share = name.partition(":")
    if kind not in PRESSES:
        raise InvalidInputError(f"there is no press {kind!r}; use one of {', '.join(PRESSES)}")
    try:
        keep = float(share)
    except ValueError:
        raise InvalidInputError(
            f"the press {name!r} does not say which share of the tokens it keeps; write {kind}:0.5"
        ) from None
    return PRESSES[kind](keep)
