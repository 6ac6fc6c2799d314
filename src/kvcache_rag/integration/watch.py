"""Notice metadata that changes while its text does not.

If a model reads a date or a score with a document, every value makes another chunk, so that nothing
is ever reused, silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cachetools import LRUCache

from kvcache_rag.forks import new_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REMEMBERED: Final = 4096  # rows, and as many texts

# As many forms of one text in one document are no accident: two rows may well share a text, such as
# the head of two pages.
_TOO_MANY: Final = 3


class Shown(NamedTuple):
    """What a chunk is made of.

    Attributes:
        text: The text itself.
        metadata: What else the model reads with it.
        document: The document it was cut from, which outlives its rows; "" for none.
    """

    text: str
    metadata: Mapping[str, Any]
    document: str = ""


class _Seen(NamedTuple):
    written: int  # hash of all that the model reads
    text: int
    metadata: Mapping[str, Any]


class MetadataWatch:
    """Reports once for each metadata field that it changes.

    Thread-safe.  Rows seen long ago are forgotten, which only means fewer reports.
    """

    def __init__(self) -> None:
        self._rows: LRUCache[str, _Seen] = LRUCache(_REMEMBERED)
        self._forms: LRUCache[tuple[str, int], dict[int, Mapping[str, Any]]] = LRUCache(_REMEMBERED)
        self._told: set[str] = set()
        self._lock = new_lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or elsewhere, has seen nothing yet."""
        return type(self), ()

    def changed(self, id_: str, written: str, shown: Callable[[], Shown]) -> list[str]:
        """Fields that changed since a text was last read and have not been reported yet.

        Args:
            id_: Id of the row.
            written: Its text as the model reads it, metadata included.
            shown: Returns what that is made of; called only if the text is new.
        """
        number = hash(written)
        with self._lock:
            seen = self._rows.get(id_)
            if seen is not None and seen.written == number:
                return []
            text, metadata, document = shown()
            now = self._rows[id_] = _Seen(number, hash(text), dict(metadata))
            before = None
            if seen is not None:
                before = seen.metadata if seen.text == now.text else None
            elif document:
                before = self._earlier_form(document, now)
            if before is None:
                return []
            fresh = sorted(_differing(before, metadata) - self._told)
            self._told.update(fresh)
            return fresh

    def _earlier_form(self, document: str, now: _Seen) -> Mapping[str, Any] | None:
        """The last form of a text that rows come and go with; None while it may be accident."""
        forms = self._forms.setdefault((document, now.text), {})
        last = next(reversed(forms.values()), None)
        forms[now.written] = now.metadata
        return last if len(forms) >= _TOO_MANY else None


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    nothing = object()
    return {name for name in {*before, *now} if before.get(name, nothing) != now.get(name, nothing)}
