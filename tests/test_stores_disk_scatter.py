"""Bytes reach strided memory in the order of its elements, however the source hands them out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores import runs as file
from kvcache_rag.stores.runs import ReadV, read_views, views
from tests.contracts import bits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32]


@st.composite
def windows(draw: st.DrawFn) -> torch.Tensor:
    """A part of a larger tensor, cut in every dimension but the last."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)))
    for axis in range(len(shape) - 1):
        begin = draw(st.integers(0, shape[axis] - 1))
        tensor = tensor.narrow(axis, begin, draw(st.integers(0, shape[axis] - begin)))
    return tensor


def source(data: bytes, most: int) -> ReadV:
    """Reads from memory, at most `most` bytes at once."""

    def read(buffers: Sequence[memoryview], offset: int) -> int:
        assert len(buffers) <= 1024
        assert all(len(buffer) for buffer in buffers)
        left = data[offset : offset + most]
        count = len(left)
        for buffer in buffers:
            part, left = left[: len(buffer)], left[len(buffer) :]
            buffer[: len(part)] = part
        return count - len(left)

    return read


@settings(deadline=None, max_examples=150)
@given(windows(), st.integers(1, 50), st.integers(0, 9))
def test_any_window_is_filled_in_order(tensor: torch.Tensor, most: int, offset: int) -> None:
    runs = views(tensor)
    assert runs is not None
    assert sum(map(len, runs)) == tensor.nbytes
    data = os.urandom(offset + tensor.nbytes)
    seen: list[bytes] = []
    read_views(source(data, most), offset, runs, lambda view: seen.append(bytes(view)))
    assert bits(tensor) == data[offset:]
    assert b"".join(seen) == data[offset:]


def test_memory_that_cannot_be_addressed_has_no_runs() -> None:
    assert views(torch.zeros(4, 4).t()) is None
    assert views(torch.zeros(4, 4)[:, ::2]) is None
    assert views(torch.zeros(())) is None
    assert views(torch.zeros(3, device="meta")) is None
    assert views(torch.zeros(0, device="meta")) == []


def test_memory_that_needs_gradients_is_filled() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    read_views(source(b"\0\0\x80\x3f" * 3, 99), 0, views(tensor) or [], lambda _: None)
    assert tensor.tolist() == [1, 1, 1]


def test_more_runs_than_one_call_takes() -> None:
    tensor = torch.zeros(3000, 2, 4, dtype=torch.int8)[:, 1]
    data = os.urandom(tensor.nbytes)
    read_views(source(data, 1 << 20), 0, views(tensor) or [], lambda _: None)
    assert bits(tensor) == data


def test_a_source_that_ends_early_is_corrupt() -> None:
    with pytest.raises(CorruptChunkError):
        read_views(source(b"abc", 9), 0, [memoryview(bytearray(4))], lambda _: None)


@pytest.mark.parametrize("has_preadv", [True, False])
def test_files_are_read_alike_with_and_without_preadv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_preadv: bool
) -> None:
    if not has_preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    path = tmp_path / "file"
    data = os.urandom(600_000)
    path.write_bytes(data)
    tensor = torch.zeros(6, 2, 99_000, dtype=torch.int8)[:, 0]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        read_views(file.positional(descriptor), 1000, views(tensor) or [], lambda _: None)
    finally:
        os.close(descriptor)
    assert bits(tensor) == data[1000:595_000]
