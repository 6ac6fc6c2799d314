"""What a body is made of: too deep, too many values, or neither.

Law, for limits so small that inputs reach them: what Python's parser accepts is refused where it
has more values or levels than are allowed, and passes where it has fewer; what it refuses is no
JSON for the server either, and so is what is not UTF-8.  Nothing else than these three happens.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from kvcache_rag_server import bodies

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST, DEEPEST = 24, 5


class _Pairs(list[tuple[str, Any]]):
    """An object with every name that stands in it, repeated ones too."""


def seeds() -> list[bytes]:
    """Bodies with texts full of brackets, with escapes, and with a byte order mark."""
    text = json.dumps({"a": ['[{"', "\\", 1.5e3, None, True, {"b": "\u20ac\n"}], "c": {}, "d": []})
    return [
        text.encode(),
        text.encode("utf-8-sig"),
        b'{"x":[[],[],[],[]]}',
        b"[[[[[]]]]]",
        b'"[[[[[[[[[[[["',
        b"[" + b",".join(b"0" for _ in range(MOST - 1)) + b"]",
    ]


@contextmanager
def _small_limits() -> Iterator[None]:
    before = {name: getattr(bodies, name) for name in ("MOST_VALUES", "DEEPEST")}
    vars(bodies).update(MOST_VALUES=MOST, DEEPEST=DEEPEST)
    try:
        yield
    finally:
        vars(bodies).update(before)


_BODIES = bodies.Bodies(1 << 20)


def passes(raw: bytes) -> bool | None:
    """Whether the server goes on with a body; None if it is no JSON to it."""
    try:
        _BODIES.parse(raw).send(None)  # one that is small is read here
    except StopIteration:
        return True
    except HTTPException as error:
        if error.status_code != 400:
            raise
        return False
    except ValueError:
        return None
    raise AssertionError("the body was waited for")


def _is_utf_8(raw: bytes) -> bool:
    return json.detect_encoding(raw) in ("utf-8", "utf-8-sig")


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
    if not _is_utf_8(data):
        assert passed is False, "another encoding passed, in which quotes may be halves"
        return False
    depth, brackets, kept, values = _counts(value)
    if depth > DEEPEST or kept > MOST:
        assert passed is False, (depth, kept)
    if brackets <= DEEPEST and values <= MOST:
        assert passed is True, (brackets, values)
    return passed is True


def _counts(value: Any) -> tuple[int, int, int, int]:
    """Levels without and with empty ones; values, repeated names once and each time."""
    depth = brackets = 0
    kept = values = 1
    pending = [(value, 0, True)]
    while pending:
        value, level, is_kept = pending.pop()
        depth = max(depth, level)
        if not isinstance(value, list):
            continue
        brackets = max(brackets, level + 1)
        if isinstance(value, _Pairs):
            last = {name: index for index, (name, _) in enumerate(value)}  # what a dict keeps
            items = [(item, last[name] == index) for index, (name, item) in enumerate(value)]
            values += 2 * len(value)
            kept += 2 * len(last) * is_kept
        else:
            items = [(item, True) for item in value]
            values += len(value)
            kept += len(value) * is_kept
        pending.extend((item, level + 1, is_kept and stays) for item, stays in items)
    return depth, brackets, kept, values
