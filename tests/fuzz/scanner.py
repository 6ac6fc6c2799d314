"""What a body is made of: too deep, too many values, or neither.

Law, for limits so small that inputs reach them, and blocks of a few bytes: a body that Python's
parser reads is refused if and only if it is not in UTF-8, or has more values or levels than are
allowed; what the parser refuses is no JSON for the server either.  Nothing else happens.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from kvcache_rag.serve import bodies

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL = {"MOST_VALUES": 24, "DEEPEST": 5, "BLOCK": 7}
_ROOM = bodies.Bodies(1 << 20)


class _Pairs(list[tuple[str, Any]]):
    """An object with every name that stands in it, repeated ones too."""


def seeds() -> list[bytes]:
    """Bodies with texts full of brackets, with escapes, and just within the limits."""
    text = json.dumps({"a": ['[{"', "\\", 1.5e3, None, True, {"b": "\u20ac\n"}], "c": {}, "d": []})
    return [
        text.encode(),
        text.encode("utf-8-sig"),
        b'{"x":[[],[],[],[]]}',
        b"[[[[[[]]]]]]",
        b'"[[[[[[[[[[[["',
        b"[" + b",".join(b"0" for _ in range(_SMALL["MOST_VALUES"] - 1)) + b"]",
    ]


@contextmanager
def _small_limits() -> Iterator[None]:
    before = {name: getattr(bodies, name) for name in _SMALL}
    vars(bodies).update(_SMALL)
    try:
        yield
    finally:
        vars(bodies).update(before)


async def _nothing() -> Any:
    raise AssertionError("the body was there already")


def passes(raw: bytes) -> bool | None:
    """Whether the server goes on with a body; None if it is no JSON to it."""
    scope = {"type": "http", "headers": []}
    bodies.share(scope, _ROOM)
    request = bodies.CheckedRequest(scope, _nothing)
    request._body = raw
    try:
        request.json().send(None)
    except StopIteration:
        return True
    except HTTPException as error:
        if error.status_code != 400:
            raise
        return False
    except ValueError:
        return None
    raise AssertionError("the body was waited for")


def check(data: bytes) -> bool:
    """Whether the body passes."""
    with _small_limits():
        passed = passes(data)
    try:
        value = json.loads(data, object_pairs_hook=_Pairs)
    except RecursionError:
        assert passed is False
        return False
    except ValueError:
        assert passed is not True, "what is no JSON passed"
        return False
    depth, count = _structure(value)
    is_utf_8 = json.detect_encoding(data) in ("utf-8", "utf-8-sig")
    is_small = count <= _SMALL["MOST_VALUES"] and depth <= _SMALL["DEEPEST"] + 1
    assert passed is (is_utf_8 and is_small), (count, depth)
    return passed


def _structure(value: Any) -> tuple[int, int]:
    """Levels of lists and objects; values and names, what is empty counting as one more."""
    depth, count = 0, 1
    pending = [(value, 0)]
    while pending:
        value, level = pending.pop()
        if not isinstance(value, list):
            continue
        depth = max(depth, level + 1)
        is_object = isinstance(value, _Pairs)
        count += max(len(value) * (2 if is_object else 1), 1)
        items = [item for _, item in value] if is_object else value
        pending.extend((item, level + 1) for item in items)
    return depth, count
