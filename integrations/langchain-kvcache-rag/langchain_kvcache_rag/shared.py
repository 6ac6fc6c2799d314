"""What copies of one chat model have in common, so that none of them loads the model again."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

from kvcache_rag.integration import References

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Engine


class Shared:
    """An engine, loaded once, with what was noted for it.

    Attributes:
        is_given: Whether the engine came from the caller and was not loaded here.
        references: Of texts that a vector store has prefilled.
        grammars: Compiled schemas of structured output, and the tokenizer they need.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        """Hold `engine`, or none yet."""
        self.is_given = engine is not None
        self.references = References()
        self.grammars: dict[str, Any] = {}
        self.guard = threading.RLock()
        self._engine = engine
        self._settings: str | None = None
        self._warned: set[str] = set()

    def serves(self, settings: str) -> bool:
        """Whether the engine is, or can become, the one that `settings` describe."""
        return self.is_given or self._settings in (None, settings)

    def engine(self, settings: str, load: Callable[[], Engine]) -> Engine:
        """The engine; `load` makes it the first time."""
        with self.guard:
            if self._engine is None:
                self._engine = load()
                self._settings = settings
            return self._engine

    def warn_once(self, kind: str, sentence: str) -> None:
        """Warn with `sentence`, unless there was a warning of this kind before."""
        with self.guard:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warnings.warn(sentence, stacklevel=2)
