"""What a request asks of an engine, once the engine, its template and its tokenizer are known.

The same meaning as in the integrations: with documents, only the engine's own instruction can stand
before the chunks; without any, it is an ordinary conversation.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_rag.engine import Engine
    from kvcache_rag.serve.work import Work


def grounded(engine: Engine, work: Work) -> tuple[str, bool]:
    """The question of a request with documents, and whether its instruction was another one.

    An instruction that is not the engine's cannot stand before the chunks, which were computed
    behind that one; it stands before the question.
    """
    own = engine.template.system.strip()
    if work.system.strip() in ("", own):
        return work.question, False
    return f"{work.system}\n\n{work.question}", True


def plain_prompt(engine: Engine, work: Work) -> str:
    """The text that `Engine.complete` continues: a prompt as it is, a conversation as written.

    Raises:
        InvalidInputError: If the tokenizer's chat template cannot write these messages.
    """
    if not work.is_chat:
        return work.question
    turns = [*((turn.role, turn.content) for turn in work.history), ("user", work.question)]
    try:
        return _rendered(engine, turns)
    except InvalidInputError:
        plain = joined(("user" if role == "system" else role, text) for role, text in turns)
        if plain == turns:
            raise
        return _rendered(engine, plain)  # for chat templates that know two roles only


def joined(turns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns that have text; consecutive ones of one role are one, as chat templates want it."""
    written = (turn for turn in turns if turn[1].strip())
    runs = groupby(written, key=itemgetter(0))
    return [(role, "\n\n".join(text for _, text in run)) for role, run in runs]


def _rendered(engine: Engine, turns: list[tuple[str, str]]) -> str:
    return engine.render_chat([{"role": role, "content": text} for role, text in turns])
