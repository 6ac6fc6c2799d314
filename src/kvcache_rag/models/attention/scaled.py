"""Attention that weighs chunks against the rest (APE, arXiv 2502.05431, section 4).

A token attends to two sets of columns: the chunks, with scores divided by a temperature T, and the
rest (prefix, query, generated tokens).  With `L_c` and `L_o` the log-sum-exp of the scores of each,
`[w_c, w_o] = softmax([S T L_c, L_o])` and the output is `w_c O_c + w_o O_o`.  All of it is float32
whatever the model's dtype: a log-sum-exp in bfloat16 has steps of 1/16 above 8, which moves the
weights by several percent.

`weighed_chunks` lets the function stand in for a model's own attention, for one call.  Whether a
model calls it, and whether that is then what the model computes by itself, is measured once per
model.  Where nothing is weighed it is plain attention, and what each column gets of it can be
counted (`AttentionMass`).
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError, refuse
from kvcache_rag.models.attention.support import attention_switched, whole_mask
from kvcache_rag.models.cache import HaltedError, growing_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag.models.language import LanguageModel


SCALED = "kvcache_rag_scaled"

# Largest error of the first layer's output against the model's own attention, in standard
# deviations; dtypes differ in where they round.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_PROBE_TOKENS = 12

# Why a model's attention cannot be weighed, or ""; measured once.
_REFUSALS: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()

# Scores in memory at a time (64 MiB of float32); longer queries are taken in pieces.
MAX_SCORES = 1 << 24

# Arguments that change which columns count or by how much, in ways this function does not know.
_UNKNOWN = ("position_bias", "indices", "block_indices")


@dataclass(eq=False)
class AttentionMass:
    """What each column of a cache gets of the attention of a pass.

    Attributes:
        columns: `(tokens,)` float32, weights after softmax, summed over layers, rows, heads and
            queries.
        layers: How many layers there are.
        seen: How many of them were counted; the pass ends with the last, as nothing else is asked.
    """

    columns: Tensor
    layers: int
    seen: int = 0

    def add(self, weights: Tensor, shares: Tensor | None = None) -> None:
        """Count a piece of one layer's attention, of which no more than the sum is kept.

        Args:
            weights: `(..., tokens)`.
            shares: `(..., 1)` by which these are still to be multiplied; None if they are not.
        """
        rows = weights.reshape(-1, weights.shape[-1])  # (any, tokens)
        if shares is None:
            self.columns += rows.sum(0, dtype=torch.float32)
        else:
            self.columns += shares.reshape(-1) @ rows

    def layer_ends(self) -> None:
        """Note that all pieces of a layer were counted; raises `HaltedError` behind the last."""
        self.seen += 1
        if self.seen == self.layers:
            raise HaltedError


@dataclass(frozen=True, eq=False)
class Weighting:
    """How the columns of a cache are weighed during one call.

    Attributes:
        temperature: Divides the scores of chunk columns.
        scale: Multiplies `temperature` times their log-sum-exp.
        columns: Per row the chunks' columns, half-open; in beam search the rows are repeated.
        callers: Where the layers that call are noted, in order; None to note nothing.
        mass: Where plain attention is counted; None to count nothing.
    """

    temperature: float
    scale: float
    columns: tuple[tuple[int, int], ...]
    callers: list[torch.nn.Module] | None = None
    mass: AttentionMass | None = None

    def groups(self, rows: int) -> Iterator[tuple[slice, int, int]]:
        """Runs of rows whose chunks stand in the same columns: rows, first column, one behind."""
        beams, remainder = divmod(rows, len(self.columns))
        if remainder or not beams:
            raise InvalidInputError(
                f"a batch of {rows} rows is none of {len(self.columns)} prompts or their beams"
            )
        first = 0
        for (start, stop), equal in itertools.groupby(self.columns):
            last = first + beams * len(list(equal))
            yield slice(first, last), start, stop
            first = last


# No column holds a chunk: plain attention.
PLAIN = Weighting(1.0, 1.0, ((0, 0),))

# A context variable, so that engines in other threads have theirs.
IN_FORCE: ContextVar[Weighting | None] = ContextVar("kvcache_rag_weighting", default=None)


def scaled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the weighting in force, or plain attention if there is none.

    Args:
        module: The calling layer.
        query: `(rows, heads, queries, width)`.
        key: `(rows, kv_heads, tokens, width)`.
        value: `(rows, kv_heads, tokens, value_width)`.
        attention_mask: Bool or additive, broadcastable to `(rows, heads, queries, tokens)` with
            columns to spare; None for plain causal attention.
        dropout: Not used: models are in evaluation mode.
        scaling: Factor of the scores, None for `width ** -0.5`.
        softcap: Scores are capped smoothly to this size before they are weighed.
        s_aux: `(heads,)` scores of a sink that holds no value; it belongs to the rest.
        kwargs: Of other attention functions.

    Returns:
        `(rows, queries, heads, value_width)` and None, as transformers expects.

    Raises:
        UnsupportedModelError: If the model passes a bias or a selection of columns.
        InvalidInputError: If the rows are not those that the weighting was made for.
        HaltedError: If the last layer was counted.
    """
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(own_code(type(module).__name__, f"passes {name}"))
    weighting = IN_FORCE.get() or PLAIN
    if weighting.callers is not None:
        weighting.callers.append(module)
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows, heads, queries, _ = query.shape
    hidden = _hidden(attention_mask, queries, key)  # (rows or 1, heads or 1, queries, tokens)
    sink = None if s_aux is None else s_aux.to(exact).reshape(1, -1, 1, 1)  # (1, heads, 1, 1)
    output = query.new_empty(rows, heads, queries, value.shape[-1])
    for group, start, stop in weighting.groups(rows):
        whole = _Columns(key[group].to(exact), value[group].to(exact), factor, softcap)
        inside = whole.part(start, stop)  # the chunks
        outside = whole if inside is None else whole.without(start, stop)
        hides = hidden.expand(rows, -1, -1, -1)[group]
        step = max(1, MAX_SCORES // (len(output[group]) * heads * key.shape[2]))
        for first in range(0, queries, step):
            piece = slice(first, first + step)
            # (rows of the group, heads, n, width) and (rows of the group, heads or 1, n, tokens)
            asked, unseen = query[group, :, piece].to(exact), hides[:, :, piece]
            if inside is None:
                output[group, :, piece] = outside.attend(asked, unseen, sink, mass=weighting.mass)[
                    0
                ]
                continue
            rest = torch.cat([unseen[..., :start], unseen[..., stop:]], -1)
            out_o, level_o = outside.attend(asked, rest, sink)
            out_c, level_c = inside.attend(
                asked, unseen[..., start:stop], None, weighting.temperature
            )
            levels = [weighting.scale * weighting.temperature * level_c, level_o]
            shares = torch.softmax(torch.cat(levels, -1), -1)  # (rows of the group, heads, n, 2)
            output[group, :, piece] = shares[..., :1] * out_c + shares[..., 1:] * out_o
    if weighting.mass is not None:
        weighting.mass.layer_ends()
    return output.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, eq=False)
class _Columns:
    """Keys and values of some columns, `(rows, kv_heads, tokens, width)`, and how they score."""

    keys: Tensor
    values: Tensor
    factor: float
    softcap: float | None

    def part(self, start: int, stop: int) -> _Columns | None:
        if start >= stop:
            return None
        return replace(self, keys=self.keys[:, :, start:stop], values=self.values[:, :, start:stop])

    def without(self, start: int, stop: int) -> _Columns:
        keys, values = (
            torch.cat([part[:, :, :start], part[:, :, stop:]], 2)
            for part in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values)

    def attend(
        self,
        query: Tensor,
        hides: Tensor,
        sink: Tensor | None,
        temperature: float = 1.0,
        mass: AttentionMass | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output `(rows, heads, n, width)` and log-sum-exp `(rows, heads, n, 1)` of the scores.

        Where everything is hidden (padding, or a window) the output is zero and the other the
        smallest number.  The weights are counted in `mass`, if there is one.
        """
        rows, heads, length, width = query.shape
        kv_heads, tokens = self.keys.shape[1:3]
        factor = self.factor / (temperature if self.softcap is None else 1.0)
        # The query heads of a group are folded into the query length: no copy of K and V.
        folded = (query * factor).reshape(rows, kv_heads, -1, width)  # heads of a group, then n
        scores = (folded @ self.keys.transpose(-1, -2)).view(rows, heads, length, tokens)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap / temperature)
        scores.masked_fill_(hides, -torch.inf)
        peak = scores.amax(-1, keepdim=True)  # (rows, heads, n, 1)
        peak = peak if sink is None else torch.maximum(peak, sink)
        limits = torch.finfo(scores.dtype)
        peak = peak.clamp_min(limits.min)  # where all is hidden: -inf - -inf would be NaN
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)  # a sink takes a share and gives no value
        total = total if sink is None else total + torch.exp(sink - peak)
        total = total.clamp_min(limits.tiny)
        if mass is not None:
            mass.add(weights, 1 / total)
        output = weights.view(rows, kv_heads, -1, tokens) @ self.values
        return output.view(rows, heads, length, -1) / total, peak + total.log()


def _hidden(mask: Tensor | None, queries: int, key: Tensor) -> Tensor:
    """Which columns a query may not look at, `(rows or 1, heads or 1, queries, tokens)` bool.

    Raises:
        UnsupportedModelError: If an additive mask does more than hide.
    """
    tokens = key.shape[2]
    if mask is None:
        last = torch.arange(tokens - queries, tokens, device=key.device)
        return (torch.arange(tokens, device=key.device) > last[:, None])[None, None]
    seen = mask[..., :tokens]
    if seen.dtype == torch.bool:
        return ~seen
    hides = seen <= torch.finfo(seen.dtype).min / 2
    if bool((seen.masked_fill(hides, 0) != 0).any()):
        raise UnsupportedModelError(own_code("the model", "has a mask that adds to scores"))
    return hides


def own_code(name: str, why: str) -> str:
    """Why a model's attention cannot be weighed, as a sentence."""
    return (
        f"{name}: its attention {why}, so chunks cannot be weighed against the rest; use "
        'Reuse(positions="composite") instead of Ape()'
    )


@contextmanager
def weighed_chunks(
    model: LanguageModel, temperature: float, scale: float, columns: Sequence[tuple[int, int]]
) -> Iterator[None]:
    """Let every forward pass within attend with these weights; afterwards all is as before.

    Args:
        model: The model; no other thread may use it meanwhile.
        temperature: Divides the scores of the chunks.
        scale: Multiplies `temperature` times their log-sum-exp.
        columns: Per row of the batch, the columns of the cache that hold chunks, half-open.

    Raises:
        UnsupportedModelError: If the model's attention is code of its own.
    """
    ensure_weighable(model)
    with switched(model.model, Weighting(temperature, scale, tuple(columns))):
        yield


def ensure_weighable(model: LanguageModel) -> None:
    """Raise `UnsupportedModelError` if the attention of a model cannot be replaced by this one."""
    refuse(why_own_code(model))


def why_own_code(model: LanguageModel) -> str:
    """Why the attention of a model cannot be replaced by this one, or ""; measured once."""
    if model.model not in _REFUSALS:
        _REFUSALS[model.model] = _measured_refusal(model)
    return _REFUSALS[model.model]


@contextmanager
def switched(module: torch.nn.Module, weighting: Weighting) -> Iterator[None]:
    """Let every forward pass of a model within attend by this function, with this weighting."""
    token = IN_FORCE.set(weighting)
    try:
        with attention_switched(module, SCALED, scaled_attention, whole_mask):
            yield
    finally:
        IN_FORCE.reset(token)


def _measured_refusal(model: LanguageModel) -> str:
    """Why this function cannot stand in for a model's attention, or ""."""
    refuse(model.abilities.cannot_weigh)
    kinds, name = model.measured.kinds, str(model.config.model_type)
    ids = torch.arange(_PROBE_TOKENS)[None] % max(1, min(int(model.config.vocab_size), 1000) - 5)
    callers: list[torch.nn.Module] = []
    plain = Weighting(1.0, 1.0, ((2, _PROBE_TOKENS // 2),), callers)

    def first_output(layer: torch.nn.Module | None) -> Tensor:
        kept: list[Tensor] = []

        def keep(_: Any, __: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output).float())

        hook = None if layer is None else layer.register_forward_hook(keep)
        try:
            model.forward(ids + 5, growing_cache(kinds), torch.arange(_PROBE_TOKENS), keep=1)
        finally:
            if hook is not None:
                hook.remove()
        return kept[0] if kept else torch.empty(0)

    try:
        with switched(model.model, plain):
            first_output(None)
            if len({id(layer) for layer in callers}) != len(kinds):
                return own_code(name, "does not go through transformers' attention interface")
            weighted_output = first_output(callers[0])
    except UnsupportedModelError as error:
        return str(error)
    expected = first_output(callers[0])
    off = float((weighted_output - expected).abs().max() / expected.std().clamp_min(1e-12))
    if not off <= _TOLERANCE.get(model.dtype, 1e-3):
        return own_code(name, f"differs from plain attention (by {off:.2g})")
    return ""
