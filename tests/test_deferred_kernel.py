"""The Triton kernel of deferred rotation equals plain attention over rotated keys."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from chunks import LAYOUTS, make_chunk
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import CASES

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.kv.rotary import NO_ROTATION
from kvcache_rag.models.deferred.segments import Segment, SegmentTable
from kvcache_rag.models.deferred.worklist import (
    ANGLE_BITS,
    CHUNK_BITS,
    FIRST_BITS,
    TOKENS_BITS,
    Run,
    is_implied,
    kernel_table,
)
from kvcache_rag.models.rotation import LayerGroup, LayerKind, ModelLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BITS = (CHUNK_BITS, FIRST_BITS, TOKENS_BITS, ANGLE_BITS)
FIELDS = st.builds(Run, *(st.integers(0, (1 << bits) - 1) for bits in BITS))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[str], str]]:
    """Runs a case in a process in which triton interprets; gives the error, or ""."""
    pytest.importorskip("triton", reason="triton has no wheels for this system")
    script = Path(__file__).parent / "kernel_cases.py"
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def run(name: str) -> str:
            asked.write(name + "\n")
            asked.flush()
            line = answers.readline()
            return str(json.loads(line)) if line else "the process ended"

        yield run
        asked.close()


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_plain_attention(name: str, interpreted: Callable[[str], str]) -> None:
    error = interpreted(name)
    assert not error, error


@given(FIELDS)
def test_a_run_survives_packing(run: Run) -> None:
    packed = run.pack()
    assert 0 <= packed < 1 << 63
    assert Run.unpack(packed) == run


@pytest.mark.parametrize("field", Run._fields)
def test_a_field_that_is_too_large_is_named(field: str) -> None:
    limit = 1 << BITS[Run._fields.index(field)]
    for value in (limit, -1):
        with pytest.raises(InvalidInputError, match=f"^{field} {value} of a run does not fit"):
            Run(0, 0, 0, 0)._replace(**{field: value}).pack()


def table_of(layout: str, rows: Sequence[Sequence[tuple[ChunkKV, int, int]]]) -> SegmentTable:
    shapes = LAYOUTS[layout]
    groups = tuple(LayerGroup(one, None, NO_ROTATION, NO_ROTATION) for one in shapes.groups)
    kinds = tuple(LayerKind() for group in shapes.groups for _ in group.layers)
    model = ModelLayout(groups, kinds, (), shapes.dtype, 0.0)
    segments = [
        [Segment(chunk, column, chunk.start + far) for chunk, column, far in row] for row in rows
    ]
    return SegmentTable.from_rows(model, segments, 99, [0] * len(rows))


def test_alignment_is_told() -> None:
    wide = LAYOUTS["fused-float32"]
    aligned = make_chunk(0, tokens=16, layout=wide)
    known = kernel_table(table_of("fused-float32", [[(aligned, 0, 0)]]))
    assert known.groups[0].aligned
    whole = torch.zeros(aligned.tensors[0][0].numel() + 1)
    shifted = whole[1:].view(aligned.tensors[0][0].shape)
    off = ChunkKV(wide, aligned.tokens, 3, ((shifted,),))
    known = kernel_table(table_of("fused-float32", [[(aligned, 0, 0), (off, 16, 0)]]))
    assert not known.groups[0].aligned


def test_tokens_that_lie_apart_are_refused() -> None:
    chunk = make_chunk(0, tokens=16)
    apart = torch.zeros(*chunk.tensors[0][0].shape[:-1], 16, dtype=torch.bfloat16)[..., :8]
    table = table_of(
        "fused-bfloat16", [[(ChunkKV(chunk.layout, chunk.tokens, 3, ((apart,),)), 0, 0)]]
    )
    with pytest.raises(NotImplementedError, match="one behind the other"):
        kernel_table(table)


def test_what_a_kernel_reads_keeps_no_chunk_alive() -> None:
    chunk = make_chunk(0)
    table = table_of("fused-bfloat16", [[(chunk, 0, 0)]])
    known = kernel_table(table)
    assert known.work(table, 64) is known.work(table, 64)
    watched = [weakref.ref(chunk), weakref.ref(table)]
    del chunk, table
    gc.collect()
    assert [one() for one in watched] == [None, None]
    assert known.lists


PADDED = [[(5, 4, 0)], [(9, 0, 0)]]  # tokens, column, distance of each row's chunk


@pytest.mark.parametrize("is_additive", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_mask_that_hides_what_the_kernel_hides_is_known(
    window: int | None, is_additive: bool
) -> None:
    table = replace(table_of("fused-bfloat16", [
        [(make_chunk(0, tokens=tokens), column, far) for tokens, column, far in row]
        for row in PADDED
    ]), tail=7, keep=(2, 2))  # fmt: skip
    own = torch.arange(9, 12)[:, None]
    column = torch.arange(14)
    rule = (column <= own) & (column > own - (window or 99))
    seen = (rule & (column >= torch.tensor([4, 0])[:, None, None]))[:, None]

    def said(seen: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(torch.bfloat16).min
        return torch.zeros(seen.shape).masked_fill(~seen, lowest) if is_additive else seen

    assert is_implied(said(seen), table, 3, 5, window)
    assert not is_implied(said(seen), table, 3, 5, 3)
    for at in ((0, 0, 0, 3), (1, 0, 2, 10), (1, 0, 0, 10)):
        changed = seen.clone()
        changed[at] = ~changed[at]
        assert not is_implied(said(changed), table, 3, 5, window)
    assert not is_implied(said(seen)[..., :11], table, 3, 5, window)
    assert not is_implied(said(seen).expand(-1, 2, -1, -1), table, 3, 5, window)


def test_a_mask_that_adds_to_scores_is_not_the_kernels() -> None:
    table = table_of("fused-bfloat16", [[(make_chunk(0, tokens=9), 90, 0)]])
    mask = torch.full((1, 1, 1, 102), 0.5)
    assert not is_implied(mask, table, 1, 3, None)
