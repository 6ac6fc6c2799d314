"""The block mask, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache_rag.kv.mask import MaskedSequence, PositionScheme, block_mask
from kvcache_rag.stitching.stitch import first_positions


def rows(allowed: Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in allowed.tolist()]


def lists(sequence: MaskedSequence) -> tuple[list[int], list[int], list[int]]:
    return sequence.ids.tolist(), sequence.positions.tolist(), sequence.indices.tolist()


def test_without_a_prefix_it_is_turborags_mask() -> None:
    found = block_mask([], [[1, 2], [3]], [8, 9])
    assert lists(found) == ([1, 2, 3, 8, 9], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert rows(found.allowed) == [
        "x....",
        "xx...",
        "..x..",
        "xxxx.",
        "xxxxx",
    ]
    assert found.query_tokens == 2


def test_each_later_chunk_has_its_own_copy_of_the_prefix_right_before_it() -> None:
    found = block_mask([1, 2], [[3, 4, 5], [6, 7]], [9])
    assert found.ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 6, 7, 9]
    assert found.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert found.indices.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert rows(found.allowed) == [
        "x.........",
        "xx........",
        "xxx.......",
        "xxxx......",
        "xxxxx.....",
        ".....x....",
        ".....xx...",
        ".....xxx..",
        ".....xxxx.",
        "xxxxx..xxx",  # the query sees the first copy, every chunk and itself
    ]


def test_composite_chunks_share_positions_and_the_query_starts_at_the_total_length() -> None:
    found = block_mask([1, 2], [[3, 4, 5], [6, 7]], [9, 9], "composite")
    assert found.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 7, 8]
    assert found.indices.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8]
    reordered = block_mask([1, 2], [[3, 4, 5], [6, 7]], [9, 9])
    assert torch.equal(found.allowed, reordered.allowed)


@pytest.mark.parametrize("chunks", [[], [[4, 5]]])
@pytest.mark.parametrize("prefix", [[], [1, 2, 3]])
def test_no_chunk_or_one_is_plain_causal_attention(
    prefix: list[int], chunks: list[list[int]]
) -> None:
    found = block_mask(prefix, chunks, [6])
    length = len(prefix) + 2 * len(chunks) + 1
    assert found.allowed.tolist() == torch.ones(length, length).tril().bool().tolist()
    assert found.positions.tolist() == found.indices.tolist() == list(range(length))


def chunk_columns(prefix: int, chunks: list[int]) -> list[int]:
    """Where the tokens of the chunks are in the sequence of `block_mask`.

    Args:
        prefix: Tokens of the prefix, a copy of which stands before every chunk.
        chunks: Tokens of each chunk.
    """
    columns: list[int] = []
    stop = 0
    for tokens in chunks:
        start = stop + prefix
        stop = start + tokens
        columns += range(start, stop)
    return columns


@pytest.mark.parametrize("scheme", ["reordered", "composite"])
@pytest.mark.parametrize("sizes", [[3, 2, 4], [5], []])
@pytest.mark.parametrize("prefix", [0, 2])
def test_chunks_stand_where_the_specification_has_them(
    prefix: int, sizes: list[int], scheme: PositionScheme
) -> None:
    chunks = [[10 * number + step for step in range(size)] for number, size in enumerate(sizes)]
    spec = block_mask([90] * prefix, chunks, [99], scheme)
    columns = chunk_columns(prefix, sizes)
    assert spec.ids[columns].tolist() == [token for chunk in chunks for token in chunk]
    seen = spec.allowed[-1].nonzero()[:, 0].tolist()
    assert [*range(prefix), *columns, len(spec.ids) - 1] == seen
    firsts = first_positions([(0, prefix), *((prefix, size) for size in sizes)], scheme)
    expected = [
        first + step for first, size in zip(firsts[1:], sizes, strict=True) for step in range(size)
    ]
    assert firsts[0] == 0
    assert spec.positions[columns].tolist() == expected


def test_an_adjacent_query_follows_the_highest_position_at_its_own_distances() -> None:
    parts = [(0, 2), (2, 3), (2, 5)]  # prefix and two chunks: 10 tokens, highest position 6
    plain = first_positions(parts, "composite")
    moved = first_positions(parts, "composite", adjacent=True)
    assert plain == [0, 2, 2]
    assert moved == [3, 5, 5]  # the query stands at 10
    ends = [first + tokens for first, (_, tokens) in zip(moved, parts, strict=True)]
    assert max(ends) == sum(tokens for _, tokens in parts)
    # Reordered parts leave no gap, and nothing moves where there is nothing.
    reordered = first_positions(parts, "reordered")
    assert first_positions(parts, "reordered", adjacent=True) == reordered == [0, 2, 5]
    assert first_positions([], "composite", adjacent=True) == []
