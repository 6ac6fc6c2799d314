"""Which tokens are chosen: ratios, ties, windows, and numbers that must stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache_rag import CacheClip
from kvcache_rag.policies.selection import candidates, filled_windows, grouped, top, top_windows
from kvcache_rag.stitching.stitch import StitchedPrompt

shapes = st.builds(
    StitchedPrompt.from_sizes,
    st.integers(0, 5),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(1, 4),
)


class Scored:
    """Signals with given relevance; notes how often it was asked for."""

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores
        self.asked = 0

    def relevance(self) -> Tensor:
        self.asked += 1
        return self._scores

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


def noise(prompt: StitchedPrompt, seed: int) -> Tensor:
    return torch.rand(prompt.context_tokens, generator=torch.Generator().manual_seed(seed))


def plain_windows(
    selected: list[bool], prompt: StitchedPrompt, window: int, threshold: int
) -> list[bool]:
    """The rule of the paper, one window after the other."""
    result = [False] * len(selected)
    for chunk in prompt.chunks:
        for start in range(chunk.start, chunk.stop, window):
            stop = min(start + window, chunk.stop)
            if sum(selected[start:stop]) * window > threshold * (stop - start):
                result[start:stop] = [True] * (stop - start)
    return result


@given(shapes, st.integers(1, 9), st.integers(0, 8), st.integers(0, 99))
@settings(deadline=None)
def test_windows_are_all_or_nothing(
    prompt: StitchedPrompt, window: int, threshold: int, seed: int
) -> None:
    threshold = min(threshold, window - 1)
    selected = noise(prompt, seed) < 0.5
    found = grouped(selected, prompt, window, threshold)
    assert found.tolist() == plain_windows(selected.tolist(), prompt, window, threshold)


def test_six_of_eight_exceed_five_and_five_do_not() -> None:
    prompt = StitchedPrompt.from_sizes(3, [16, 11], 1)
    selected = torch.zeros(30, dtype=torch.bool)
    selected[[3, 5, 6, 7, 8, 10]] = True  # six of the first window
    selected[[11, 12, 13, 14, 18]] = True  # five of the second
    selected[[27, 28]] = True  # two of the last three: 5/8 of 3 is 1.9
    found = grouped(selected, prompt, 8, 5)
    assert found.nonzero()[:, 0].tolist() == [*range(3, 11), 27, 28, 29]


@given(shapes, st.integers(0, 40), st.integers(0, 99))
@settings(deadline=None)
def test_the_best_of_those_allowed_are_taken(prompt: StitchedPrompt, count: int, seed: int) -> None:
    scores, allowed = (noise(prompt, seed) * 4).round(), candidates(prompt)
    found = top(scores, count, allowed)
    assert int(found.sum()) == min(count, int(allowed.sum()))
    assert not (found & ~allowed).any()
    ranked = sorted(allowed.nonzero()[:, 0].tolist(), key=lambda i: (-float(scores[i]), i))
    assert found.nonzero()[:, 0].tolist() == sorted(ranked[:count])


@given(shapes, st.integers(1, 9), st.integers(0, 60), st.integers(0, 99))
@settings(deadline=None)
def test_windows_by_mean_fill_the_budget(
    prompt: StitchedPrompt, window: int, count: int, seed: int
) -> None:
    scores, allowed = noise(prompt, seed), candidates(prompt)
    spans = [
        (float(scores[a : (b := min(a + window, c.stop))].mean()), a, b)
        for c in prompt.chunks[1:]
        for a in range(c.start, c.stop, window)
    ]
    expected: set[int] = set()
    for _, start, stop in sorted(spans, key=lambda span: -span[0]):
        if len(expected) + stop - start > count:
            break
        expected |= set(range(start, stop))
    found = top_windows(scores, count, allowed, prompt, window)
    assert set(found.nonzero()[:, 0].tolist()) == expected


@given(shapes, st.integers(1, 9), st.integers(0, 8), st.integers(0, 120), st.integers(0, 99))
@settings(deadline=None)
def test_windows_fill_a_budget_by_the_rule_of_the_paper(
    prompt: StitchedPrompt, window: int, threshold: int, count: int, seed: int
) -> None:
    threshold = min(threshold, window - 1)
    scores, allowed = (noise(prompt, seed) * 20).round(), candidates(prompt)  # many are equal
    by_number = [
        grouped(top(scores, number, allowed), prompt, window, threshold)
        for number in range(int(allowed.sum()) + 1)
    ]
    expected = max(
        (found for found in by_number if int(found.sum()) <= count),
        key=lambda found: int(found.sum()),
    )
    found = filled_windows(scores, count, allowed, prompt, window, threshold)
    assert torch.equal(found, expected)


def test_a_ratio_of_the_recomputed_comes_out_as_asked() -> None:
    prompt = StitchedPrompt.from_sizes(4, [400, 400, 400], 5)
    scores = noise(prompt, 1)  # as scattered as can be
    for ratio in (0.1, 0.2, 0.5):
        asked = round(ratio * 800)
        chosen = CacheClip(ratio=ratio).select(prompt, Scored(scores))
        filled = CacheClip(ratio=ratio, ratio_of="recomputed").select(prompt, Scored(scores))
        assert asked - 8 < int(filled.sum()) <= asked
        assert int(chosen.sum()) < asked / 2
        assert not (chosen & ~filled).any()


@given(shapes)
def test_prefix_and_first_chunk_are_exact_already(prompt: StitchedPrompt) -> None:
    allowed = candidates(prompt)
    first = prompt.chunks[0]
    assert not allowed[: first.stop].any()
    assert allowed[first.stop :].all()


@given(shapes, st.floats(0, 1), st.integers(0, 99))
@settings(deadline=None)
def test_the_ratio_is_of_the_tokens_that_may_be_chosen(
    prompt: StitchedPrompt, ratio: float, seed: int
) -> None:
    later = sum(map(len, prompt.chunks[1:]))
    scores = noise(prompt, seed)
    ungrouped = CacheClip(ratio=ratio, window=1, threshold=0).select(prompt, Scored(scores))
    assert int(ungrouped.sum()) == round(ratio * later)
    # However long the first chunk is, which nobody would choose.
    first, *others = map(len, prompt.chunks)
    longer = StitchedPrompt.from_sizes(len(prompt.spans[0]), [first + 50, *others], 1)
    moved = torch.cat([torch.zeros(50), scores])
    found = CacheClip(ratio=ratio).select(longer, Scored(moved))
    assert torch.equal(found[50:], CacheClip(ratio=ratio).select(prompt, Scored(scores)))


def test_scattered_scores_leave_no_window() -> None:
    prompt = StitchedPrompt.from_sizes(0, [40, 40, 40], 5)
    scores = torch.zeros(120)
    scores[40::4] = 1.0
    assert not CacheClip(ratio=0.25).select(prompt, Scored(scores)).any()
    whole = CacheClip(ratio=0.25, threshold=None).select(prompt, Scored(scores))
    assert int(whole.sum()) == 16


@pytest.mark.parametrize("ratio", [0.001, 0.995, 0.999])
def test_scores_are_not_asked_for_where_they_change_nothing(ratio: float) -> None:
    prompt = StitchedPrompt.from_sizes(4, [40, 40, 40], 5)
    signals = Scored(torch.zeros(124))
    found = CacheClip(ratio=ratio).select(prompt, signals)
    assert int(found.sum()) == (0 if ratio < 0.1 else 80)
    assert signals.asked == 0
    one = StitchedPrompt.from_sizes(4, [40], 5)
    assert not CacheClip().select(one, signals).any()
