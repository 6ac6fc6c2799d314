"""Compute the tokens again whose values differ most from those of a full prefill."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import ReusePolicy
from kvcache_rag.policies.checks import checked_positions, checked_ratio
from kvcache_rag.policies.named import Form

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import LayerCheck, Signals
    from kvcache_rag.policies.named import Words
    from kvcache_rag.stitching.stitch import StitchedPrompt


# The first choice of several takes this many times the ratio, if that leaves enough for the rest.
FIRST: Final = 1.5
# The last choice takes at least this part of the ratio.
LAST: Final = 0.5


@dataclass(frozen=True, repr=False)
class CacheBlend(ReusePolicy):
    """Compute the tokens with the largest deviation again (CacheBlend, arXiv 2405.16444, 4.3).

    The deviation of a token is the squared distance, in float32, of its value at one early layer
    from the value it has in a full prefill.  To know it, all context tokens run through the layers
    below.  Unlike the published code, the query is never taken for a context token, and chosen
    tokens see no token behind them.

    With `check_layers` the choice narrows as in the paper's gradual filtering (which its code does
    not have): a larger part is chosen at the first of these layers, and at each further one those
    are dropped whose values there, computed anew, differ least from the stitched ones.  What was
    dropped keeps the values that it was given up to that layer.

    Attributes:
        ratio: Part of the chunk tokens that is computed again: 0 is `Reuse()`, 1 a full prefill;
            with `check_layers` the mean over the model's layers.
        check_layer: Layer whose values are compared, 0-based.  At layer 0 there is no deviation;
            each layer more costs a layer of a full prefill.
        positions: Where the other tokens stand; those computed again stand at their true places.
        check_layers: Layers at which the choice is made and narrowed, ascending, instead of
            `check_layer`; () for one choice.
    """

    name: ClassVar[str] = "cacheblend"
    _forms = (Form("cacheblend[:RATIO[,LAYER...]]", lambda words: _written(words)),)
    ratio: float = 0.15
    check_layer: int = 1
    positions: PositionScheme = "reordered"
    check_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checked_positions(self.positions)
        checked_ratio(self.ratio)
        if not isinstance(self.check_layers, (tuple, list)):
            raise InvalidInputError(
                f"check_layers must be numbers of layers such as (1, 2, 3), not "
                f"{self.check_layers!r}"
            )
        object.__setattr__(self, "check_layers", tuple(self.check_layers))
        for layer in (self.check_layer, *self.check_layers):
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 1:
                raise InvalidInputError(
                    f"check_layer must be the number of a layer from 1 up, not {layer!r}; values "
                    "at layer 0 do not depend on the context"
                )
        if list(self.check_layers) != sorted(set(self.check_layers)):
            raise InvalidInputError(
                f"check_layers must ascend, such as (1, 2, 3), not {self.check_layers!r}"
            )
        if self.check_layers and self.check_layer != 1:
            raise InvalidInputError(
                f"check_layer={self.check_layer} is not read where there are check_layers; give "
                "one of the two"
            )

    def __repr__(self) -> str:
        # Verdicts compare it: a policy of one choice is written as before there were several.
        shown = [one.name for one in fields(self) if one.name != "check_layers"]
        shown += ["check_layers"] * bool(self.check_layers)
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__name__}({settings})"

    @property
    def is_full(self) -> bool:
        """At ratio 1."""
        return self.ratio == 1

    @property
    def is_reuse(self) -> bool:
        """At ratio 0."""
        return self.ratio == 0

    @property
    def narrowing_layers(self) -> tuple[int, ...]:
        """All check layers but the first, at which `select` chooses."""
        return self.check_layers[1:]

    @property
    def _first(self) -> int:
        return self.check_layers[0] if self.check_layers else self.check_layer

    def signal_tokens(self, signals: Signals) -> int:
        """Those of the deviation."""
        return 0 if self.is_reuse else signals.deviation_tokens(self._first)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """The tokens of largest deviation, of equal ones those that stand first."""
        from kvcache_rag.policies.selection import candidates, nothing, share, top  # loads torch

        count = share(self.shares(signals.layers)[0], prompt)
        allowed = candidates(prompt)
        if not count or not allowed.any():
            return nothing(prompt)
        if count >= int(allowed.sum()):
            return allowed
        return top(signals.deviation(self._first), count, allowed)

    def narrow(self, prompt: StitchedPrompt, check: LayerCheck) -> Tensor:
        """The tokens of largest deviation among those that are left; at least one."""
        from kvcache_rag.policies.selection import share, top  # loads torch

        part = self.shares(check.layers)[self.check_layers.index(check.layer)]
        return top(check.deviation, max(share(part, prompt), 1), check.alive)

    def shares(self, layers: int) -> tuple[float, ...]:
        """Part of the chunk tokens that each choice leaves, falling evenly.

        The paper says that each is slightly smaller than the one before and `ratio` their mean
        over the layers, and no more.

        Args:
            layers: Of the model.  The first choice is computed again from layer 0 on.
        """
        ratio, checks = self.ratio, self.check_layers
        if len(checks) < 2:
            return (ratio,)
        stops = [*checks[1:], layers]
        spans = [stop - start for start, stop in zip([0, *checks[1:]], stops, strict=True)]
        steps = [number / (len(checks) - 1) for number in range(len(checks))]
        # How far down from the first to the last choice the mean layer stands, from 0 to 1.
        mean = sum(span * step for span, step in zip(spans, steps, strict=True)) / sum(spans)
        if not 0 < mean < 1:  # behind the last layer: refused where the model is known
            return (ratio,) * len(checks)
        # first - (first - last) * mean = 1, in parts of the ratio; the last stays above LAST
        first = min(FIRST, (1 - LAST * mean) / (1 - mean), 1 / ratio if ratio else FIRST)
        last = first - (first - 1) / mean
        return tuple(ratio * (first + (last - first) * step) for step in steps)


def _written(words: Words) -> CacheBlend:
    """By the ratio and, behind it, the check layers."""
    if not words.values:
        return CacheBlend()
    layers = tuple(words.number(index, int) for index in range(1, len(words.values)))
    return CacheBlend(words.number(0, float), check_layers=layers)
