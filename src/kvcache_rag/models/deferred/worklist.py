"""What a kernel reads about the segments of a batch: a work list, addresses, angles.

Made once per request and uploaded; nothing in it depends on the question or on what was generated
since.  The work list cuts each segment into *runs* of a bounded length, one packed 64-bit integer
per run: which chunk, its first token there, how many tokens count, which angles (LazyAttention,
arXiv 2606.04302, packs block, offset and mask in the same way).  A run never crosses the border of
a segment, so one rotation holds for all of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.models.deferred.segments import SegmentTable


# Widths of the fields from the lowest bit up; with the sign they fill 64 bits.
ANGLE_BITS, TOKENS_BITS, FIRST_BITS, CHUNK_BITS = 13, 12, 22, 16

ALIGNMENT = 16  # bytes that a GPU's thread loads at a time


class Run(NamedTuple):
    """Neighbouring tokens of one chunk that are rotated alike.

    Attributes:
        chunk: Number of the chunk in the request.
        first: First token within the chunk.
        tokens: How many tokens.
        angle: Row of the angle tables.
    """

    chunk: int
    first: int
    tokens: int
    angle: int

    def pack(self) -> int:
        """The run as one integer.

        Raises:
            InvalidInputError: If a field is too large for its bits.
        """
        packed = 0
        widths = (CHUNK_BITS, FIRST_BITS, TOKENS_BITS, ANGLE_BITS)
        for name, value, bits in zip(self._fields, self, widths, strict=True):
            if not 0 <= value < 1 << bits:
                raise InvalidInputError(
                    f"{name} {value} of a run does not fit {bits} bits; ask with fewer or shorter "
                    "chunks, or use rotation='copied'"
                )
            packed = packed << bits | value
        return packed

    @classmethod
    def unpack(cls, packed: int) -> Run:
        """The run that `pack` made an integer of."""
        fields = []
        for bits in (ANGLE_BITS, TOKENS_BITS, FIRST_BITS, CHUNK_BITS):
            fields.append(packed & ((1 << bits) - 1))
            packed >>= bits
        return cls(*reversed(fields))


@dataclass(frozen=True, eq=False)
class WorkList:
    """Runs of all rows of a batch, row by row and in ascending columns.

    Attributes:
        packed: `(runs,)` int64, see `Run.pack`.
        ends: `(runs,)` int32, the column behind each run's last token.
        bounds: `(rows + 1,)` int32, where each row's runs begin.
        longest: Runs of the row that has most.
        tokens: Tokens of a run on average.
    """

    packed: Tensor
    ends: Tensor
    bounds: Tensor
    longest: int
    tokens: float


@dataclass(frozen=True, eq=False)
class GroupAddresses:
    """Where the layers of a group lie in each chunk.

    Attributes:
        bases: `(layers, 2, chunks)` int64, the addresses of K and V.
        strides: `(2, chunks)` int64, elements from one head to the next.
        aligned: Whether every head begins at a multiple of `ALIGNMENT` bytes.
    """

    bases: Tensor
    strides: Tensor
    aligned: bool


@dataclass(frozen=True, eq=False)
class KernelTable:
    """A segment table as a kernel reads it.

    It refers to no chunk and not to the table, so that it can be kept for as long as the table is.

    Attributes:
        groups: Addresses per layer group.
        keep: `(rows,)` int32, see `SegmentTable`.
        lists: Work lists by their longest run.
        trusted: Per window (0 for none) whether the model's mask says what the kernel does.
    """

    groups: tuple[GroupAddresses, ...]
    keep: Tensor
    lists: dict[int, WorkList] = field(default_factory=dict)
    trusted: dict[int, bool] = field(default_factory=dict)

    def work(self, table: SegmentTable, length: int) -> WorkList:
        """The segments cut into runs of at most `length` tokens, made on first use."""
        if length not in self.lists:
            self.lists[length] = _work_list(table, length, self.keep.device)
        return self.lists[length]


def kernel_table(table: SegmentTable) -> KernelTable:
    """Write down where the chunks of a table lie, which have to stay there.

    Raises:
        NotImplementedError: If the tokens of a head do not lie one behind the other.
    """
    chunks = _distinct(table)
    device = chunks[0].tensors[0][0].device if chunks else torch.device("cpu")
    groups = tuple(
        _addresses(chunks, group, len(layer_group.layout.layers), device)
        for group, layer_group in enumerate(table.layout.groups)
    )
    return KernelTable(groups, torch.tensor(table.keep, dtype=torch.int32).to(device))


def _distinct(table: SegmentTable) -> tuple[ChunkKV, ...]:
    chunks = {id(segment.chunk): segment.chunk for row in table.rows for segment in row}
    return tuple(chunks.values())


def _work_list(table: SegmentTable, length: int, device: torch.device) -> WorkList:
    numbers = {id(chunk): number for number, chunk in enumerate(_distinct(table))}
    packed: list[int] = []
    ends: list[int] = []
    bounds = [0]
    for row in table.rows:
        for segment in row:
            number = numbers[id(segment.chunk)]
            for first in range(0, len(segment.chunk), length):
                tokens = min(length, len(segment.chunk) - first)
                packed.append(Run(number, first, tokens, segment.angle).pack())
                ends.append(segment.column + first + tokens)
        bounds.append(len(packed))
    tokens = sum(len(segment.chunk) for row in table.rows for segment in row)
    return WorkList(
        torch.tensor(packed, dtype=torch.int64).to(device),
        torch.tensor(ends, dtype=torch.int32).to(device),
        torch.tensor(bounds, dtype=torch.int32).to(device),
        max((stop - start for start, stop in itertools.pairwise(bounds)), default=0),
        tokens / max(len(packed), 1),
    )


def _addresses(
    chunks: tuple[ChunkKV, ...], group: int, layers: int, device: torch.device
) -> GroupAddresses:
    bases, steps, strides = [], [], []
    for slot in ("keys", "values"):
        tensors: list[Tensor] = [getattr(chunk, slot)(group) for chunk in chunks]
        if any(
            tensor.stride(-1) != 1 or tensor.stride(-2) != tensor.shape[-1] for tensor in tensors
        ):
            raise NotImplementedError("tokens of a chunk do not lie one behind the other")
        bases.append([tensor.data_ptr() for tensor in tensors])
        steps.append([tensor.stride(0) * tensor.element_size() for tensor in tensors])
        strides.append([tensor.stride(1) for tensor in tensors])
    size = chunks[0].layout.dtype.itemsize if chunks else 1
    places = torch.arange(layers)[:, None, None]  # with (2, chunks): (layers, 2, chunks)
    addresses = torch.tensor(bases, dtype=torch.int64) + places * torch.tensor(
        steps, dtype=torch.int64
    )
    heads = torch.tensor(strides, dtype=torch.int64)
    aligned = not bool((addresses % ALIGNMENT).any() or (heads * size % ALIGNMENT).any())
    return GroupAddresses(addresses.to(device), heads.to(device), aligned)


def is_implied(
    mask: Tensor, table: SegmentTable, queries: int, tail_tokens: int, window: int | None
) -> bool:
    """Whether a mask hides padding, later tokens, what is behind the window, and nothing else.

    Args:
        mask: Bool or additive, `(rows or 1, 1, queries, columns or more)`.
        table: The segments; queries at columns that it keeps may see anything.
        queries: How many tokens ask; they stand at the last columns.
        tail_tokens: Tokens behind the segments, the queries included.
        window: Sliding window in tokens, or None.
    """
    columns = table.tail + tail_tokens
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] < columns:
        return False
    part = mask[..., :columns]
    if part.dtype == torch.bool:
        seen = part
    else:
        seen = part > torch.finfo(part.dtype).min / 2
        if bool((part.masked_fill(~seen, 0) != 0).any()):
            return False
    column = torch.arange(columns, device=mask.device)
    own = column[columns - queries :, None]  # (queries, 1), where each stands
    rule = column <= own  # (queries, columns)
    if window is not None:
        rule &= column > own - window
    begins = [row[0].column if row else table.tail + kept
              for row, kept in zip(table.rows, table.keep, strict=True)]  # fmt: skip
    # (rows, 1, 1, 1), against masks of (rows or 1, 1, queries, columns)
    starts = torch.tensor(begins, device=mask.device)[:, None, None, None]
    asked = own >= table.tail + torch.tensor(table.keep, device=mask.device)[:, None, None, None]
    return not bool(((seen != (rule & (column >= starts))) & asked).any())
