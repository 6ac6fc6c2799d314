"""What ratio policies share: how many tokens to choose, which are eligible, and the best ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvcache_rag.stitching.stitch import StitchedPrompt


def nothing(prompt: StitchedPrompt) -> Tensor:
    """No token, as `(context_tokens,)` bool."""
    return torch.zeros(prompt.context_tokens, dtype=torch.bool)


def share(ratio: float, prompt: StitchedPrompt) -> int:
    """How many tokens a ratio stands for: that part of all chunk tokens."""
    return round(ratio * sum(map(len, prompt.chunks)))


def candidates(prompt: StitchedPrompt) -> Tensor:
    """Tokens that gain from being computed again: those of every chunk but the first.

    Prefix and first chunk are what they are in a full prefill.

    Returns:
        `(context_tokens,)` bool.
    """
    allowed = nothing(prompt)
    for chunk in prompt.chunks[1:]:
        allowed[chunk.start : chunk.stop] = True
    return allowed


def top(scores: Tensor, count: int, allowed: Tensor) -> Tensor:
    """The `count` largest scores; of equal ones, those that stand first.

    Args:
        scores: `(n,)` of any float dtype.
        count: How many; all that are allowed if there are fewer.
        allowed: `(n,)` bool, which may be chosen.

    Returns:
        `(n,)` bool.
    """
    # -inf: what is not allowed comes behind every finite score.
    ranked = torch.sort(
        scores.float().masked_fill(~allowed, -torch.inf), descending=True, stable=True
    )
    best = ranked.indices[: min(count, int(allowed.sum()))]  # (count or fewer,)
    selected = torch.zeros_like(allowed)
    selected[best] = True
    return selected


def grouped(selected: Tensor, prompt: StitchedPrompt, window: int, threshold: int) -> Tensor:
    """All or nothing per window (CacheClip, arXiv 2510.10129, section 3.3).

    A number of which only some digits are computed again is read wrongly, so tokens are computed
    again together with their neighbours or not at all.  Windows are counted from the start of each
    chunk.  The last window of a chunk may be short; it needs more than the same part of its tokens.

    Args:
        selected: `(context_tokens,)` bool.
        prompt: Where the chunks are.
        window: Tokens of a window.
        threshold: How many of a whole window must be exceeded for all of it to be selected.

    Returns:
        `(context_tokens,)` bool; nothing outside of chunks.
    """
    result = torch.zeros_like(selected)
    for chunk in prompt.chunks:
        own = selected[chunk.start : chunk.stop]  # (tokens,) of the chunk
        windows = torch.arange(len(own)) // window  # (tokens,), the window of each
        size = torch.bincount(windows)  # (windows,), tokens in each
        hits = torch.bincount(windows, weights=own.double())  # (windows,), selected ones in each
        # hits / size > threshold / window, without a division; then of each token its window's.
        result[chunk.start : chunk.stop] = (hits * window > size * threshold)[windows]
    return result


def top_windows(
    scores: Tensor, count: int, allowed: Tensor, prompt: StitchedPrompt, window: int
) -> Tensor:
    """The windows of highest mean score that have `count` tokens together at most.

    Args:
        scores: `(context_tokens,)` of any float dtype.
        count: How many tokens at most; the first window that does not fit ends the choice.
        allowed: `(context_tokens,)` bool; whole chunks.
        prompt: Where the chunks are; windows are counted from the start of each.
        window: Tokens of a window.

    Returns:
        `(context_tokens,)` bool.
    """
    lengths = _windows(prompt, allowed, window)
    owner = torch.repeat_interleave(lengths)  # (allowed tokens,), window of each
    sums = torch.zeros(len(lengths), dtype=torch.double)  # (windows,)
    sums.index_add_(0, owner, scores[allowed].double())
    # (windows,), by mean; stable: of equal ones the first in the prompt
    best = torch.sort(sums / lengths, descending=True, stable=True).indices
    return _fitting(best, lengths, count, allowed)


def filled_windows(
    scores: Tensor,
    count: int,
    allowed: Tensor,
    prompt: StitchedPrompt,
    window: int,
    threshold: int,
) -> Tensor:
    """`grouped` of as many best tokens as it takes, so that it gives `count` at most.

    With one token more chosen, at most one window more has enough of them: the one whose
    `threshold + 1`-th best it is (of a short window, as many as exceed the same part).

    Args:
        scores: `(context_tokens,)` of any float dtype.
        count: How many tokens at most; the first window that does not fit ends the choice.
        allowed: `(context_tokens,)` bool; whole chunks.
        prompt: Where the chunks are; windows are counted from the start of each.
        window: Tokens of a window.
        threshold: As for `grouped`; less than `window`.

    Returns:
        `(context_tokens,)` bool.
    """
    lengths = _windows(prompt, allowed, window)
    owner = torch.repeat_interleave(lengths)  # (allowed tokens,), window of each
    order = torch.sort(scores[allowed].float(), descending=True, stable=True).indices
    ranks = torch.empty_like(order)  # (allowed tokens,), 0 for the best
    ranks[order] = torch.arange(len(order))
    # (allowed tokens,), window after window, and in each the best first
    inside = ranks[torch.argsort(owner * len(owner) + ranks)]
    starts = lengths.cumsum(0) - lengths  # (windows,)
    reached = inside[starts + lengths * threshold // window]  # (windows,)
    return _fitting(torch.argsort(reached), lengths, count, allowed)


def _windows(prompt: StitchedPrompt, allowed: Tensor, window: int) -> Tensor:
    """`(windows,)` int64: tokens of each window of the chunks allowed, in their order."""
    return torch.tensor(
        [
            min(window, chunk.stop - start)
            for chunk in prompt.chunks
            if len(chunk) and bool(allowed[chunk.start])
            for start in range(chunk.start, chunk.stop, window)
        ],
        dtype=torch.long,
    )


def _fitting(best: Tensor, lengths: Tensor, count: int, allowed: Tensor) -> Tensor:
    """The first windows of `best` that have `count` tokens together at most.

    Args:
        best: `(windows,)` int64, their numbers in the order in which they are taken.
        lengths: `(windows,)` int64, tokens of each.
        count: How many tokens at most.
        allowed: `(context_tokens,)` bool, what the windows are of.

    Returns:
        `(context_tokens,)` bool.
    """
    chosen = torch.zeros(len(lengths), dtype=torch.bool)
    # The running sum only grows, so behind the first that does not fit there is none that does.
    chosen[best[lengths[best].cumsum(0) <= count]] = True
    selected = torch.zeros_like(allowed)
    selected[allowed] = torch.repeat_interleave(chosen, lengths)  # (allowed tokens,) on both sides
    return selected
