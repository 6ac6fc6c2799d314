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
from chunks import LAYOUTS, make_chunk, window
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
    bits = BITS[Run._fields.index(field)]
    fits = Run(0, 0, 0, 0)._replace(**{field: (1 << bits) - 1})
    assert Run.unpack(fits.pack()) == fits
    with pytest.raises(InvalidInputError, match=f"^{field} {1 << bits} of a run does not fit"):
        fits._replace(**{field: 1 << bits}).pack()
    with pytest.raises(InvalidInputError, match=field):
        fits._replace(**{field: -1}).pack()


def table_of(layout: str, rows: Sequence[Sequence[tuple[ChunkKV, int, int]]]) -> SegmentTable:
    shapes = LAYOUTS[layout]
    groups = tuple(LayerGroup(one, None, NO_ROTATION, NO_ROTATION) for one in shapes.groups)
    kinds = tuple(LayerKind() for group in shapes.groups for _ in group.layers)
    model = ModelLayout(groups, kinds, (), shapes.dtype, 0.0)
    segments = [
        [Segment(chunk, column, chunk.start + far) for chunk, column, far in row] for row in rows
    ]
    return SegmentTable.of(model, segments, 99, [0] * len(rows))


def test_runs_cover_every_token_once() -> None:
    one, other = (make_chunk(seed, tokens=tokens) for seed, tokens in ((0, 37), (1, 70)))
    table = table_of(
        "fused-bfloat16", [[(one, 0, 0), (other, 37, 9)], [(other, 29, 0)], [(one, 62, 4)]]
    )
    known = kernel_table(table)
    work = known.work(table, 32)
    assert known.groups[0].bases.shape == (3, 2, 2)
    assert work.bounds.tolist() == [0, 5, 8, 10]
    assert (work.longest, work.tokens) == (5, (37 + 70 + 70 + 37) / 10)
    runs = [Run.unpack(packed) for packed in work.packed.tolist()]
    assert runs[:5] == [
        Run(0, 0, 32, 0), Run(0, 32, 5, 0),
        Run(1, 0, 32, 1), Run(1, 32, 32, 1), Run(1, 64, 6, 1),
    ]  # fmt: skip
    assert runs[8:] == [Run(0, 0, 32, 2), Run(0, 32, 5, 2)]
    assert work.ends.tolist() == [32, 37, 69, 101, 107, 61, 93, 99, 94, 99]
    assert known.work(table, 32) is work


@pytest.mark.parametrize("layout", ["fused-float32", "apart-bfloat16", "mixed-float16"])
def test_addresses_are_where_the_layers_lie(layout: str) -> None:
    shapes = LAYOUTS[layout]
    small = make_chunk(0, tokens=9, layout=shapes)
    part = window(make_chunk(1, tokens=30, layout=shapes), 4, 11)
    known = kernel_table(table_of(layout, [[(small, 0, 0), (part, 9, 0)]]))
    for index, group in enumerate(known.groups):
        for number, chunk in enumerate((small, part)):
            for slot, tensor in enumerate((chunk.keys(index), chunk.values(index))):
                bases = group.bases[:, slot, number].tolist()
                assert bases == [layer.data_ptr() for layer in tensor]
                step = int(group.strides[slot, number]) * tensor.element_size()
                assert bases[0] + step * (tensor.shape[1] - 1) == tensor[0, -1].data_ptr()


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


def test_a_table_without_segments_has_no_runs() -> None:
    table = table_of("fused-bfloat16", [[], []])
    known = kernel_table(table)
    work = known.work(table, 64)
    assert (work.packed.shape, work.bounds.tolist(), work.longest) == ((0,), [0, 0, 0], 0)
    assert [tuple(group.bases.shape) for group in known.groups] == [(3, 2, 0)]


def test_what_a_kernel_reads_keeps_no_chunk_alive() -> None:
    chunk = make_chunk(0)
    table = table_of("fused-bfloat16", [[(chunk, 0, 0)]])
    known = kernel_table(table)
    known.work(table, 64)
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
