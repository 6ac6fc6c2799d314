"""What to do when the chunks do not fit the context window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvcache_rag.errors import ContextTooLongError

if TYPE_CHECKING:
    from collections.abc import Sequence

Overflow = Literal["error", "drop_lowest", "refine"]
"""`error`: refuse; `drop_lowest`: leave out the chunks with the lowest scores, or the last ones
(retrievers put the best first); `refine`: several stitched prompts, each improving the answer of
the one before."""


def split_rounds(
    sizes: Sequence[int],
    *,
    room: int,
    later_room: int,
    overflow: Overflow,
    scores: Sequence[float] | None = None,
) -> list[list[int]]:
    """Which chunks go into which round.

    Args:
        sizes: Tokens of each chunk, best first.
        room: Tokens for chunks beside prefix, query and answer, in the first round.
        later_room: The same in later rounds, whose query carries the answer so far.
        overflow: What to do.
        scores: Of each chunk, higher is better, where the order says nothing; None for best first.

    Returns:
        Indices of the chunks of each round; at least one round, which may be empty.

    Raises:
        ContextTooLongError: If not even the query fits, or "error" and not everything fits, or one
            chunk alone does not fit.
    """
    if room < 0:
        raise ContextTooLongError(
            f"instruction, history, question and max_new_tokens alone are {-room} tokens over the "
            "model's context window; shorten the question or the history, or lower max_new_tokens"
        )
    if sum(sizes) <= room:
        return [list(range(len(sizes)))]
    if overflow == "error":
        raise ContextTooLongError(
            f"the chunks have {sum(sizes)} tokens and the context window has room for {room}; "
            'retrieve fewer or smaller chunks, or use overflow="drop_lowest" or "refine"'
        )
    if overflow == "drop_lowest":
        ranked = sorted(range(len(sizes)), key=lambda i: -scores[i] if scores else i)
        kept = _fitting(sizes, ranked, room)
        if not kept:
            raise ContextTooLongError(_too_long(ranked[0], sizes[ranked[0]], room))
        return [kept]
    if later_room < 0:
        raise ContextTooLongError(
            f"a later round, which carries the answer so far, is {-later_room} tokens over the "
            "context window; lower max_new_tokens or retrieve fewer chunks"
        )
    rounds: list[list[int]] = [[]]
    used, space = 0, room
    for index, size in enumerate(sizes):
        if used + size > space and rounds[-1]:
            rounds.append([])
            used, space = 0, later_room
        if used + size > space:
            raise ContextTooLongError(_too_long(index, size, space))
        rounds[-1].append(index)
        used += size
    return rounds


def _too_long(index: int, size: int, room: int) -> str:
    return (
        f"chunk {index} has {size} tokens and the context window has room for {room}; "
        "split it into smaller chunks"
    )


def _fitting(sizes: Sequence[int], ranked: Sequence[int], room: int) -> list[int]:
    """The best chunks that fit together, in prompt order."""
    kept, used = [], 0
    for index in ranked:
        if used + sizes[index] > room:
            break
        kept.append(index)
        used += sizes[index]
    return sorted(kept)
