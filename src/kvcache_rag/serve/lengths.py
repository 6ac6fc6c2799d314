"""Refuse what cannot fit before it waits, without tokenising all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.errors import ContextTooLongError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.engine import Engine
    from kvcache_rag.serve.work import Work

# Characters of a token, of which texts that fit have fewer on the average, almost always: only
# longer ones are looked at, which costs nothing where a request may be answered.
PER_TOKEN = 8
# What is read in pieces may have some tokens more than as a whole, but not so many times as many.
SURELY = 2


def is_doubtful(engine: Engine, work: Work) -> bool:
    """Whether a request is so long that it should be looked at before it waits."""
    return sum(map(len, _texts(work))) > PER_TOKEN * engine.context_window


def ensure_fits(engine: Engine, work: Work) -> None:
    """Read a request piece by piece until it is certain that it does not fit.

    No more is tokenised than a few context windows, however long the request is.

    Raises:
        ContextTooLongError: If it does not fit.  One that is hardly too long is left to its answer.
        InvalidInputError: If a text is not valid Unicode.
    """
    window, tokens = engine.context_window, 0
    for text in _texts(work):
        for start in range(0, len(text), window):
            tokens += len(engine.tokenize_text(text[start : start + window]))
            if tokens > SURELY * window:
                raise ContextTooLongError(
                    f"the request has more than {SURELY * window} tokens and the model's context "
                    f"window is {window}; shorten it, or send fewer or smaller documents"
                )


def _texts(work: Work) -> Iterator[str]:
    yield work.question
    yield work.system
    yield from (turn.content for turn in work.history)
    yield from work.chunks
