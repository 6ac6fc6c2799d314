"""Find retrieved texts again in a prompt that a framework pasted them into.

A prompt is read line by line.  Only a whole known text on its own lines is found; a quotation
within a sentence, a cut text, or one that only looks alike is not a chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_rag.forks import new_lock

if TYPE_CHECKING:
    from kvcache_rag.integration.references import Reference

FEWEST_BYTES: Final = 24
"""In UTF-8.  A shorter text is left where it is: computing it costs next to nothing.

Counting characters would underrate scripts that write a word with one of them fivefold.
"""

_BEGINNING: Final = FEWEST_BYTES // 4  # characters, of which the longest take four bytes

# Known texts of one beginning that are tried on a line. Each step is to a shorter one, so only many
# that begin alike need more, and a line of which none is found stays a text.
_TRIES: Final = 64


def is_short(text: str) -> bool:
    """Whether a text is too short to identify and to be worth reusing."""
    return len(text) < FEWEST_BYTES and len(text.encode("utf-8", "surrogatepass")) < FEWEST_BYTES


@dataclass(frozen=True)
class FoundText:
    """A known text within another one.

    Attributes:
        start: Index of its first character.
        end: Index after its last character.
        text: The known text, white space at its ends included.
        reference: Where its KV is, if known.
    """

    start: int
    end: int
    text: str
    reference: Reference | None = None


class KnownTexts:
    """Texts of retrieved chunks, to find in prompts.

    Thread-safe.  White space at the ends of a text does not count, since frameworks strip it.
    """

    def __init__(self, limit: int = 2**27) -> None:
        """Hold at most `limit` characters of texts in total; the least recently noted go first."""
        self._limit, self._characters = limit, 0
        self._known: OrderedDict[str, tuple[str, Reference | None]] = OrderedDict()
        # By their first characters; those of one beginning sorted, because all nodes of a folder
        # may begin with its path.
        self._by_beginning: dict[str, list[str]] = {}
        self._longest = 0  # of those that there ever were
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, text: str, reference: Reference | None = None) -> None:
        """Remember a text; `reference` replaces an earlier one, None does not."""
        core = text.strip()
        if is_short(core):
            return
        with self._lock:
            known = self._known.get(core)
            if known is None:
                insort(self._by_beginning.setdefault(core[:_BEGINNING], []), core)
            self._longest = max(self._longest, len(core))
            self._characters += len(text) - (0 if known is None else len(known[0]))
            self._known[core] = (text, reference or (known[1] if known else None))
            self._known.move_to_end(core)
            while self._characters > self._limit:
                self._forget(*self._known.popitem(last=False))

    def _forget(self, core: str, known: tuple[str, Reference | None]) -> None:
        beginning = core[:_BEGINNING]
        alike = self._by_beginning[beginning]
        del alike[bisect_left(alike, core)]
        if not alike:
            del self._by_beginning[beginning]
        self._characters -= len(known[0])

    def find(self, text: str) -> list[FoundText]:
        """Known texts in `text`, in order; of several that begin on the same line the longest."""
        found: list[FoundText] = []
        start = 0
        with self._lock:
            while start < len(text):
                one = self._at(text, start)
                if one is not None:
                    found.append(one)
                    start = one.end
                start = text.find("\n", start) + 1 or len(text)
        return found

    def filling(self, text: str, most: int) -> list[FoundText]:
        """Known texts that fill a text but for white space between them.

        None if they do not, or if there are more than `most`, each of which takes time.
        """
        found: list[FoundText] = []
        start = 0
        with self._lock:
            while start < len(text):
                behind = text.find("\n", start) + 1 or len(text)
                if not text[start:behind].strip():
                    start = behind
                    continue
                one = self._at(text, start)
                if one is None or len(found) == most:
                    return []
                found.append(one)
                start = text.find("\n", one.end) + 1 or len(text)
        return found

    def _at(self, text: str, line: int) -> FoundText | None:
        """The longest known text that begins with the line at index `line`."""
        start = line
        while text[start : start + 1] in (" ", "\t"):
            start += 1
        alike = self._by_beginning.get(text[start : start + _BEGINNING])
        if alike is None:
            return None
        # Whatever is a beginning of `rest` sorts at or before it, the longest last.
        rest = text[start : start + self._longest + 1]
        last, tries = bisect_right(alike, rest), _TRIES
        while last and tries:
            tries -= 1
            core = alike[last - 1]
            if rest.startswith(core):
                end = start + len(core)
                if _ends_line(text, end):
                    whole, reference = self._known[core]
                    return FoundText(start, end, whole, reference)
                rest = core[:-1]
            else:
                rest = _common(core, rest)
            if len(rest) < _BEGINNING:
                return None
            last = bisect_right(alike, rest, hi=last - 1)
        return None


def _ends_line(text: str, end: int) -> bool:
    behind = text.find("\n", end)
    return not text[end : behind if behind >= 0 else None].strip()


def _common(one: str, other: str) -> str:
    """The beginning that two texts share, by halves: the slices are compared by C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]
