"""The block mask, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache_rag.kv.mask import MaskedSequence, block_mask


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


@pytest.mark.parametrize("prefix", [[], [1, 2, 3]])
def test_one_chunk_is_plain_causal_attention(prefix: list[int]) -> None:
    found = block_mask(prefix, [[4, 5]], [6])
    length = len(prefix) + 3
    assert found.allowed.tolist() == torch.ones(length, length).tril().bool().tolist()
    assert found.positions.tolist() == list(range(length))


def test_no_chunks_is_plain_causal_attention_too() -> None:
    found = block_mask([1, 2], [], [3])
    assert lists(found) == ([1, 2, 3], [0, 1, 2], [0, 1, 2])
    assert rows(found.allowed) == ["x..", "xx.", "xxx"]
