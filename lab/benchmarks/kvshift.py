"""AgentKVShift: what a tenth of the tokens changes by on average is added to the others.

The correction of arXiv 2607.21604, as others describe its algorithm 1; it has no public code.  All
context tokens run up to the check layer, where the distances of keys, and of values, from cached
ones are measured.  In each chunk but the first the farthest are probes, those of keys and those of
values apart; both are computed again in every layer.  There the mean change of a chunk's probes is
added to its other tokens, before anybody attends to them, each weighed by its own distance at the
check layer, 1 at most.

Not described, and chosen here: the check layer is 1, the first whose values depend on the context;
every layer is shifted; keys are compared, and shifted, at their positions in the prompt.

Its time says nothing: an engine computes the probes once more, to the same end, with the query.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.cache_utils import Cache

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.cache import HaltedError, RecomputeLayer, bare_layer, tapped_cache
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.policies.checks import checked_count, checked_ratio
from kvcache_rag.policies.selection import nothing
from kvcache_rag.policies.signals import RowSignals

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.policies.base import Signal, Signals
    from kvcache_rag.stitching.stitch import Span, StitchedPrompt, StitchedRow


@dataclass(frozen=True, eq=False)
class Shift:
    """How keys, or values, of one chunk are shifted.

    Attributes:
        probes: `(p,)` int64 places of the tokens whose change is averaged.
        others: `(m,)` int64 places of those that it is added to.
        weights: `(m,)` float32.
    """

    probes: Tensor
    others: Tensor
    weights: Tensor

    def apply(self, held: Tensor, fresh: Tensor, places: Tensor) -> None:
        """Shift what is held, in place.

        Args:
            held: `(1, heads, tokens or more, width)`, nothing of which was computed again yet.
            fresh: `(1, heads, n, width)` computed again.
            places: `(n,)` int64 places of these, ascending, the probes among them.
        """
        found = fresh[:, :, torch.searchsorted(places, self.probes)].float()
        change = (found - held[:, :, self.probes].float()).mean(2, keepdim=True)
        shifted = held[:, :, self.others].float() + self.weights[:, None] * change
        held[:, :, self.others] = shifted.to(held.dtype)


@dataclass(frozen=True, eq=False)
class Shifts:
    """How a prompt's chunks are shifted.

    Attributes:
        keys: Of the keys of each chunk but the first.
        values: Of their values.
    """

    keys: tuple[Shift, ...]
    values: tuple[Shift, ...]

    def chosen(self, prompt: StitchedPrompt) -> Tensor:
        """All probes, `(context_tokens,)` bool."""
        chosen = nothing(prompt)
        for one in (*self.keys, *self.values):
            chosen[one.probes] = True
        return chosen


class ShiftedLayer(RecomputeLayer):
    """A layer that shifts what it holds by what the tokens that come anew change.

    Attributes:
        shifts: By how much.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, length: int, places: Tensor, shifts: Shifts
    ) -> None:
        """Hold `length` tokens of `keys` and `values`, some of which come anew."""
        super().__init__(keys, values, length, places)
        self.shifts = shifts

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Shift, then write in place as any other."""
        count = self.places.shape[0]
        for held, fresh, shifts in (
            (self.key_buffer, key_states, self.shifts.keys),
            (self.value_buffer, value_states, self.shifts.values),
        ):
            for one in shifts:
                one.apply(held, fresh[:, :, :count], self.places)
        return super().update(key_states, value_states, *args, **kwargs)


@dataclass(frozen=True)
class KVShift(ReusePolicy):
    """Compute a few tokens of every chunk again, and shift the others by their mean change.

    Attributes:
        ratio: Share of a chunk's tokens that are probes of its keys, and as many of its values.
        least: Weight of any other token at least; 1 adds the mean as it is.
        check_layer: Layer at which tokens are compared, 0-based.
    """

    name: ClassVar[str] = "kvshift"
    reads: ClassVar[tuple[Signal, ...]] = ("deviation",)  # type: ignore[misc]  # the same for all
    ratio: float = 0.1
    least: float = 0.0
    check_layer: int = 1

    def __post_init__(self) -> None:
        checked_ratio(self.ratio)
        checked_ratio(self.least, "least", "no weight but its own")
        checked_count("check_layer", self.check_layer)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """The probes, once all others are shifted in the prompt's buffer.

        Whoever computes the probes again finds the keys and values that they have there already.
        """
        shifts = self.parts(prompt, signals)
        chosen = shifts.chosen(prompt)
        if bool(chosen.any()):
            with torch.inference_mode():
                _shift(_row(signals), shifts, chosen)
        return chosen

    def parts(self, prompt: StitchedPrompt, signals: Signals) -> Shifts:
        """What is shifted by what."""
        chunks = prompt.chunks[1:] if self.ratio else ()
        if not chunks:
            return Shifts((), ())
        with torch.inference_mode():
            keys, values = _distances(_row(signals), self.check_layer)
        probes = [[self._farthest(one, chunk) for chunk in chunks] for one in (keys, values)]
        chosen = nothing(prompt)
        chosen[torch.cat([*probes[0], *probes[1]])] = True
        others = [(~chosen[one.start : one.stop]).nonzero()[:, 0] + one.start for one in chunks]
        return Shifts(
            *(
                tuple(
                    Shift(some, rest, distances[rest].clamp(self.least, 1))
                    for some, rest in zip(own, others, strict=True)
                )
                for own, distances in zip(probes, (keys, values), strict=True)
            )
        )

    def _farthest(self, distances: Tensor, chunk: Span) -> Tensor:
        """Places `(p,)` of a chunk's probes; of equal distances the first."""
        order = torch.sort(distances[chunk.start : chunk.stop], descending=True, stable=True)
        return order.indices[: math.ceil(self.ratio * len(chunk))] + chunk.start


def _row(signals: Signals) -> StitchedRow:
    if not isinstance(signals, RowSignals):
        raise InvalidInputError("kvshift changes keys and values in a buffer, and here is none")
    return signals.row


def _distances(row: StitchedRow, layer: int) -> list[Tensor]:
    """How far cached keys, and values, are from a full prefill's, `(context_tokens,)` float32."""
    model, context = row.model, row.shape.context_tokens
    slots = row.buffer.slots()
    if layer not in slots:
        raise InvalidInputError(f"layer {layer} keeps no keys; choose another check_layer")
    cache, tapped = tapped_cache(model.measured.kinds, layer)
    with suppress(HaltedError):
        model.forward(row.ids[None, :context], cache, torch.arange(context), keep=1)
    pairs = zip(tapped.found or (), slots[layer], strict=True)
    return [
        (full[0].float() - held[0, :, :context].float()).pow(2).sum((0, 2)).sqrt()
        for full, held in pairs
    ]


def _shift(row: StitchedRow, shifts: Shifts, chosen: Tensor) -> None:
    """One pass over the probes, in which every layer is shifted."""
    model, context = row.model, row.shape.context_tokens
    places = chosen.nonzero()[:, 0]
    mask, slots = model.causal_mask(places, context), row.buffer.slots()
    layers: list[Any] = [
        ShiftedLayer(*slots[index], context, places, shifts) if kind.has_kv else bare_layer(kind)
        for index, kind in enumerate(model.measured.kinds)
    ]
    layers[max(slots)].halts = True
    with suppress(HaltedError):
        model.forward(row.ids[None, places], Cache(layers=layers), places, mask=mask, keep=1)
