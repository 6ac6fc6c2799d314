"""Inputs made of inputs: bytes edited, and JSON changed where it is a tree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 0.5, 2**31, 2**63, -(2**70), 1e308, float("nan"), float("inf")),
    *("", " ", "a" * 300, "\ud800", "\x00", "\u2028", "<|im_end|>", "text", "tiny", "user"),
    *([], {}, [[]], [None], {"": None}, {"text": "a"}, [{"type": "text", "text": "a"}]),
)
"""Values that are of the wrong kind nearly everywhere."""


def edited(data: bytes, tokens: Sequence[bytes], chance: random.Random, longest: int) -> bytes:
    """Some bytes replaced, removed, repeated, or words put in."""
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randint(0, len(raw))
        stop = min(len(raw), at + chance.choice((0, 0, 1, 2, 8, 64)))
        piece = chance.choice(
            (b"", chance.choice(tokens), chance.randbytes(chance.randint(1, 4)), raw[at:stop] * 2)
        )
        raw[at:stop] = piece
    return bytes(raw[:longest])


def replanted(data: bytes, chance: random.Random, longest: int) -> bytes | None:
    """JSON with one or two of its values replaced, removed or repeated; None if it is no JSON."""
    try:
        tree = json.loads(data)
        for _ in range(chance.randint(1, 2)):
            tree = _changed(tree, chance)
        raw = json.dumps(tree, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None
    return raw if len(raw) <= longest else None


def _changed(tree: Any, chance: random.Random) -> Any:
    places = _places(tree)
    if not places:
        return chance.choice(ODD)
    parent, name = chance.choice(places)
    way = chance.randrange(4)
    if way == 0:
        del parent[name]
    elif way == 1:
        parent[name] = _copy(chance.choice(ODD))
    elif way == 2:  # a value from elsewhere in the tree
        other, place = chance.choice(places)
        parent[name] = _copy(other[place])
    elif isinstance(parent, list):
        parent.append(_copy(parent[name]))
    else:
        parent[chance.choice(("", name.upper(), f"{name} ", "data", "text"))] = _copy(parent[name])
    return tree


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every list or object with each name or index in it."""
    found, pending = [], [tree]
    while pending:
        parent = pending.pop()
        if isinstance(parent, (dict, list)):
            names = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            found += [(parent, name) for name in names]
            pending += [parent[name] for name in names]
    return found


def mutated(data: bytes, tokens: Sequence[bytes], chance: random.Random, longest: int) -> bytes:
    """One of both ways; what stands before JSON, as in a header's frame, stays."""
    if chance.random() < 0.5:
        mark, rest = (data[:1], data[1:]) if data[:2] == b"j{" else (b"", data)
        tree = replanted(rest, chance, longest - len(mark))
        if tree is not None:
            return mark + tree
    return edited(data, tokens, chance, longest)
