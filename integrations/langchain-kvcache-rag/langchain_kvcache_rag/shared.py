"""What copies of one chat model share, so that none loads the model again."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from kvcache_rag.forks import new_lock, new_rlock
from kvcache_rag.integration import References
from langchain_kvcache_rag.pasted import PastedTexts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine


class Shared:
    """An engine, loaded once, with what was noted for it.

    Attributes:
        is_given: Whether the engine came from the caller and was not loaded here.
        references: Of texts that a vector store has prefilled.
        pasted: Tells documents that were pasted into a message.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        """Hold `engine`, or none yet."""
        self.is_given = engine is not None
        self.references = References()
        self.pasted = PastedTexts()
        self.guard = new_rlock()
        # Not the guard, which is held while a model is loaded: the event loop asks here too.
        self._choice = new_lock()
        self._engine = engine
        self._settings: str | None = None
        self._others: dict[str, Shared] = {}
        self._warned: set[str] = set()

    def for_settings(self, settings: str) -> Shared:
        """The one for the engine that `settings` describe.

        A copy with other settings lives for one call only where they come from a config, so
        what it loaded is kept for the next one.
        """
        if self.is_given or self._settings == settings:
            return self
        with self._choice:
            if self._settings is None:
                self._settings = settings
            if self._settings == settings:
                return self
            if settings not in self._others:
                other = Shared()
                other.references, other.pasted = self.references, self.pasted
                other._settings = settings
                self._others[settings] = other
            return self._others[settings]

    def engine(self, load: Callable[[], Engine]) -> Engine:
        """The engine; `load` makes it the first time."""
        if self._engine is not None:
            return self._engine
        with self.guard:
            if self._engine is None:
                self._engine = load()
            return self._engine

    def warn_once(self, kind: str, sentence: str) -> None:
        """Warn with `sentence`, unless there was a warning of this kind before."""
        with self.guard:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(sentence, stacklevel=2)
