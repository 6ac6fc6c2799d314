"""Cases of the Triton kernel of deferred rotation, run by triton's interpreter.

`TRITON_INTERPRET` counts only if it is set before anything imports triton, so this is a script for
a process of its own: names of cases come in on lines, one line of JSON goes out for each.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from kvcache_rag.kv.chunk import ChunkKV, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation, rotate
from kvcache_rag.models.deferred.segments import Segment, SegmentTable
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout

if TYPE_CHECKING:
    from torch import Tensor

HALF = Rotation("half", 0, 32, 0)
PAIRS = replace(HALF, style="interleaved")
LENGTHS = (19, 53, 32, 3, 75)
# Of outputs of size 1 to 3; bfloat16 rounds the turned query and the weights to 8 bits.
FARTHEST = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """One call; `rows` are, per row, columns of padding and then `(chunk, distance)` pairs."""

    rows: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ((0, ((0, 5), (1, 33), (3, 0))),)
    rotation: Rotation = HALF
    heads: tuple[int, int] = (4, 2)
    width: int = 32
    value: int = 32
    queries: int = 3
    tail: int = 9
    window: int | None = None
    dtype: torch.dtype = torch.float32
    rotated: str | None = None
    splits: int | None = None
    run: int | None = None
    masked: bool = False
    has_sinks: bool = False
    is_strided: bool = False
    refused: str = ""


BATCH = ((3, ((1, 33), (0, 90))), (0, ((0, 5), (1, 33), (3, 7))), (40, ((2, 60), (3, 7))))
# The second and third row hold more columns than the first: these lie under `keep`.
UNEVEN = ((13, ((0, 5), (3, 42))), (0, ((0, 5), (3, 42), (0, 50))), (11, ((3, 0), (2, 5))))

CASES: dict[str, Case] = {
    "half": Case(),
    "interleaved": Case(rotation=PAIRS),
    "none": Case(rotation=NO_ROTATION),
    "reverse": Case(rotation=replace(HALF, reverse=True)),
    "reverse interleaved": Case(rotation=replace(PAIRS, reverse=True), queries=40, tail=40),
    "partial": Case(rotation=replace(HALF, dim=16)),
    "partial, behind": Case(rotation=replace(HALF, dim=12, start=20)),
    "partial, in the middle": Case(rotation=replace(PAIRS, dim=12, start=6)),
    "odd widths": Case(rotation=replace(HALF, dim=40), width=40, value=24),
    "width 80": Case(rotation=replace(HALF, dim=80), width=80, value=80, dtype=torch.bfloat16),
    "width 160": Case(rotation=replace(HALF, dim=160), width=160, value=160),
    "all heads": Case(heads=(3, 3)),
    "one head for all": Case(heads=(5, 1)),
    "seven heads each": Case(heads=(14, 2), queries=20, tail=20),
    "query 1": Case(queries=1),
    "query 17": Case(queries=17, tail=20),
    "query 40": Case(queries=40, tail=40),
    "query 40, keys turned": Case(queries=40, tail=55, rotated="keys"),
    "query 40, query turned": Case(queries=40, tail=55, rotated="query"),
    "query 40, keys turned, interleaved": Case(
        rotation=PAIRS, queries=40, tail=40, rotated="keys", splits=2
    ),
    "query 1, keys turned": Case(queries=1, rotated="keys"),
    "query 70, several tiles": Case(queries=70, tail=70, splits=2, run=32),
    "long tail": Case(queries=2, tail=70, run=32),
    "short runs": Case(rows=((0, ((1, 3), (4, 104), (0, 9))),), queries=1, run=32),
    "more splits than work": Case(queries=17, tail=17, splits=9),
    "batch": Case(rows=BATCH, tail=3),
    "batch, query 20": Case(rows=BATCH, tail=24, queries=20, masked=True),
    "batch, bfloat16": Case(rows=BATCH, queries=1, dtype=torch.bfloat16),
    "keep": Case(rows=UNEVEN, queries=22, tail=22, masked=True),
    "keep, splits": Case(rows=UNEVEN, queries=22, tail=22, splits=2),
    "keep, later": Case(rows=UNEVEN, queries=1, tail=25, masked=True),
    "row without segments": Case(rows=(*UNEVEN[:2], (40, ())), queries=22, tail=22),
    "no segments": Case(rows=((0, ()), (0, ()))),
    "window": Case(window=20),
    "window over segments": Case(window=60, queries=17, tail=20, masked=True),
    "window, decoding": Case(window=50, queries=1, rows=((0, ((4, 0), (1, 150))),), run=32),
    "window that begins with the last token of a run": Case(
        window=31, queries=1, rows=((0, ((4, 0), (1, 150))),), run=32
    ),
    "window, splits": Case(
        window=40, queries=30, tail=40, rows=((5, ((4, 0), (1, 150))),), run=32, splits=2
    ),
    "window, batch": Case(rows=BATCH, window=60, queries=5, tail=12, masked=True),
    "window 1": Case(window=1, queries=5, tail=9),
    "bfloat16": Case(dtype=torch.bfloat16, queries=17, tail=20),
    "bfloat16, keys turned": Case(dtype=torch.bfloat16, queries=40, tail=40, rotated="keys"),
    "float16": Case(dtype=torch.float16, queries=17, tail=20),
    "sinks": Case(has_sinks=True),
    "sinks, splits": Case(has_sinks=True, queries=20, tail=20, splits=2, rows=BATCH),
    "chunks in larger buffers": Case(is_strided=True),
    "mask that hides more": Case(queries=17, tail=20, masked=True, refused="mask"),
    "values that turn": Case(refused="values"),
    "another dtype": Case(refused="float64"),
}
CASES |= {f"random {seed}": Case() for seed in range(8)}


def any_case(seed: int) -> Case:
    """A case drawn from what the others vary one at a time."""
    draw = random.Random(seed)
    dim = draw.choice((8, 16, 20, 32))
    style = draw.choice(("half", "interleaved"))
    rotation = Rotation(style, draw.choice((0, 32 - dim)), dim, 0, draw.random() < 0.3)
    rows = []
    for _ in range(draw.randint(1, 3)):
        chunks = draw.sample(range(len(LENGTHS)), draw.randint(1, 4))
        rows.append(tuple((chunk, draw.choice((0, 7, 60, 500))) for chunk in chunks))
    longest = max(sum(LENGTHS[chunk] for chunk, _ in row) for row in rows)
    padded = tuple((longest - sum(LENGTHS[chunk] for chunk, _ in row), row) for row in rows)
    queries = draw.choice((1, 2, 5, 12))
    return Case(
        rows=padded,
        rotation=rotation,
        heads=draw.choice(((2, 2), (4, 2), (6, 1))),
        queries=queries,
        tail=queries + draw.choice((0, 3, 20)),
        window=draw.choice((None, None, 10, 100)),
        rotated=draw.choice((None, "query", "keys")),
        splits=draw.choice((None, 1, 2, 4)),
        run=draw.choice((None, 32, 64)),
        masked=draw.random() < 0.5,
        has_sinks=draw.random() < 0.3,
    )


def layout_of(case: Case) -> ModelLayout:
    """A model of one group of two layers, behind a group of another shape."""
    heads = case.heads[1]
    turns = HALF if case.refused == "values" else NO_ROTATION
    groups = (
        LayerGroup(GroupLayout((0,), (1, 8), (1, 8)), None, NO_ROTATION, NO_ROTATION),
        LayerGroup(
            GroupLayout((1, 2), (heads, case.width), (heads, case.value)),
            case.window, case.rotation, turns,
        ),
    )  # fmt: skip
    inv_freq = 10000.0 ** -torch.linspace(0, 0.9, max(case.rotation.dim // 2, 1))
    found = FrequencySet("test", lambda length: inv_freq)
    dtype = torch.float64 if case.refused == "float64" else case.dtype
    return ModelLayout(groups, (LayerKind(),) * 3, (found,), dtype, 0.0)


def make_chunk(layout: ModelLayout, tokens: int, is_strided: bool) -> ChunkKV:
    shapes = layout.chunk_layout
    tensors = shapes.empty(tokens)
    for group in tensors:
        for tensor in group:
            tensor.normal_()
    if is_strided:  # each head's tokens lie in a longer row of a buffer
        tensors = tuple(
            tuple(
                torch.nn.functional.pad(one, (0, 0, 3, 9), value=torch.nan)[..., 3:-9, :]
                for one in group
            )
            for group in tensors
        )
    return ChunkKV(shapes, torch.zeros(tokens, dtype=torch.int32), 3, tensors)


def reference(
    case: Case, table: SegmentTable, query: Tensor, keys: Tensor, values: Tensor,
    seen: Tensor, sinks: Tensor | None, distances: list[list[int]],
) -> Tensor:  # fmt: skip
    """All keys turned and laid out by column, and a softmax in float64."""
    outputs = []
    inv_freq = table.layout.frequencies[0].at_rest
    for row, segments in enumerate(table.rows):
        tail = table.tail + keys.shape[2]
        k = torch.zeros(keys.shape[1], tail, keys.shape[3], dtype=torch.float64)
        v = torch.zeros(values.shape[1], tail, values.shape[3], dtype=torch.float64)
        fresh = table.keep[row]
        k[:, table.tail + fresh :] = keys[row, :, fresh:]
        v[:, table.tail + fresh :] = values[row, :, fresh:]
        for segment, distance in zip(segments, distances[row], strict=True):
            place = slice(segment.column, segment.stop)
            old = torch.zeros(len(segment.chunk))
            held = segment.chunk.keys(1)[1].float()
            k[:, place] = rotate(held, case.rotation, inv_freq, old, old + distance)
            v[:, place] = segment.chunk.values(1)[1]
        repeats = query.shape[1] // k.shape[0]
        scores = (
            query[row].double()
            @ k.repeat_interleave(repeats, 0).transpose(-1, -2)
            * case.width**-0.5
        )
        scores = scores.masked_fill(~seen[row], -torch.inf)
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1).nan_to_num()[..., :tail]
        outputs.append(weights @ v.repeat_interleave(repeats, 0))
    return torch.stack(outputs).transpose(1, 2)


def laid_out(case: Case) -> tuple[SegmentTable, list[int]]:
    """The table of a case's rows, and how many columns of its tail they hold."""
    layout = layout_of(case)
    chunks = [make_chunk(layout, tokens, case.is_strided) for tokens in LENGTHS]
    rows, ends = [], []
    for column, row in case.rows:
        placed = []
        for chunk, distance in row:
            placed.append(Segment(chunks[chunk], column, chunks[chunk].start + distance))
            column += LENGTHS[chunk]
        rows.append(placed)
        ends.append(column)
    keep = [end - min(ends) for end in ends]
    return SegmentTable.from_rows(layout, rows, min(ends), keep), keep


def run_case(case: Case) -> None:
    """Hold the kernel to the reference."""
    from kvcache_rag.models.deferred.kernel import deferred_attend

    table, keep = laid_out(case)
    heads, kv_heads = case.heads
    count = len(keep)
    query = torch.randn(count, case.queries, heads, case.width).to(case.dtype).transpose(1, 2)
    room = case.tail + 6
    keys = torch.randn(count, kv_heads, room, case.width).to(case.dtype)[:, :, : case.tail]
    values = torch.randn(count, kv_heads, room, case.value).to(case.dtype)[:, :, : case.tail]
    for row, kept in enumerate(keep):
        keys[row, :, :kept] = values[row, :, :kept] = torch.nan  # nobody may look
    columns = torch.arange(table.tail + case.tail)
    own = columns[-case.queries :, None]
    rule = (columns <= own) & (columns > own - (case.window or len(columns)))
    seen = rule & (columns >= torch.tensor([pad for pad, _ in case.rows])[:, None, None, None])
    mask = torch.nn.functional.pad(seen, (0, 5)) if case.masked else None
    if mask is not None and case.refused:
        mask[:, :, 3, 2] = False
    sinks = torch.randn(heads) if case.has_sinks else None
    found = deferred_attend(
        query, keys, values, mask, case.width**-0.5, table, 1, 1, sinks,
        rotated=case.rotated, splits=case.splits,
    )  # fmt: skip
    distances = [[distance for _, distance in row] for _, row in case.rows]
    wanted = reference(case, table, query, keys, values, seen, sinks, distances)
    if found.dtype != case.dtype or not bool(found.isfinite().all()):
        raise AssertionError(f"{found.dtype}, finite: {bool(found.isfinite().all())}")
    asked = (own[:, 0] >= table.tail + torch.tensor(keep)[:, None])[..., None, None]
    far = float(((found - wanted).abs() * asked).max())
    if far > FARTHEST[case.dtype]:
        raise AssertionError(f"off by {far:.2e}")


def widen_products() -> None:
    """Let the interpreter multiply bfloat16, which it holds as bits and multiplies as such."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def widened(factor: TensorHandle) -> TensorHandle:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        bits = factor.data.astype("uint32") << 16
        return TensorHandle(bits.view("float32"), tl.float32)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return multiply(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def answer(name: str) -> str:
    """Run a case; the error, or ""."""
    from kvcache_rag.models.deferred import kernel

    torch.manual_seed(0)
    case = any_case(int(name.split()[1])) if name.startswith("random") else CASES[name]
    runs = (case.run, case.run) if case.run else (256, 512)
    kernel.DECODE_RUN, kernel.PREFILL_RUN = runs
    try:
        run_case(case)
    except NotImplementedError as error:
        return "" if case.refused and case.refused in str(error) else f"{case}\n{error}"
    except Exception:  # told to the test
        return f"{case}\n{traceback.format_exc()[-2000:]}"
    return f"not refused: {case}" if case.refused else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    widen_products()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line.strip())) + "\n")
        sys.stdout.flush()
