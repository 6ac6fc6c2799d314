"""Detect documents pasted into a message, of which nothing can be reused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_rag.forks import new_lock
from kvcache_rag.integration import is_short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_rag import Engine

PASTED_TOKENS: Final = 100
"""A message of system or user with no more tokens is none that documents were pasted into."""

# Documents by which others are told; a short one may well stand in a question.
_DOCUMENTS: Final = 256


class PastedTexts:
    """Tells messages that documents were pasted into.

    Once documents were handed over as they should be, one of them has to stand in the message; till
    then every long message counts, because nothing else is known.  Thread-safe.
    """

    def __init__(self) -> None:
        self._documents: dict[str, None] = {}
        self._lock = new_lock()

    def note(self, documents: Iterable[str]) -> None:
        """Know documents that were handed over; the oldest are forgotten."""
        with self._lock:
            for document in documents:
                if not is_short(text := document.strip()):
                    self._documents.pop(text, None)
                    self._documents[text] = None
            while len(self._documents) > _DOCUMENTS:
                del self._documents[next(iter(self._documents))]

    def tokens(self, message: str, engine: Engine) -> int:
        """How many tokens a message has that documents stand in; 0 if there seem to be none."""
        # No token is less than a byte, so most questions need not be tokenised.
        if len(message.encode("utf-8", "surrogatepass")) <= PASTED_TOKENS:
            return 0
        with self._lock:
            known = list(self._documents)
        if known and not any(document in message for document in known):
            return 0
        count = len(engine.brought_ids(message))
        return count if count > PASTED_TOKENS else 0
