"""Keep what queries to come are expected to attend to (Devoto et al. 2025, arXiv 2510.00636).

The queries of a chunk are taken for samples of a normal distribution, `N(m, C)` before they are
rotated.  A query at one of the next positions is then `N(R m, R C R^T)`, with `R` the mean of the
rotations to these positions, and the expected score of a key `k` is
`exp(k^T R m f + k^T R C R^T k f^2 / 2)` with `f` the factor of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.kv.rotary import angle_table, rotate_
from kvcache_rag.presses.base import Press

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.presses.base import LayerStates


@dataclass(frozen=True)
class ExpectedAttention(Press):
    """The share of attention that a token is expected to get, times the norm of its value.

    Norms are taken as parts of the head's mean norm, so that no layer decides for all by its scale.
    The first positions of all (`sinks`), whose queries are far from others, count for nothing and
    are kept; where the prefix has that many tokens, they are not the chunk's.

    Attributes:
        future: Positions behind the chunk over which the rotation is averaged.
        sinks: First positions, prefix included, that are left out.
    """

    future: int = 512
    sinks: int = 4

    name: ClassVar[str] = "expected-attention"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.future < 1 or self.sinks < 0:
            raise InvalidInputError(
                f"future is a number of positions from 1 up and sinks one from 0 up, not "
                f"{self.future} and {self.sinks}"
            )

    def scores(self, layer: LayerStates) -> Tensor:
        """The expected attention, infinite for the sinks."""
        scores = torch.full((layer.keys.shape[0], layer.tokens), torch.inf)
        first = max(0, self.sinks - layer.start)  # of the chunk's tokens, the first one scored
        if first >= layer.tokens or layer.queries is None:
            return scores
        mean, covariance = self._statistics(layer, layer.queries[:, first:].float())
        repeats = len(layer.queries) // len(layer.keys)
        keys = layer.keys[:, min(self.sinks, layer.start) + first :].float()
        keys = keys.repeat_interleave(repeats, 0)  # (heads, seen, width)
        logits = (keys @ mean[:, :, None])[..., 0] * layer.factor  # (heads, seen)
        logits = logits + ((keys @ covariance) * keys).sum(-1) * (layer.factor**2 / 2)
        share = layer.per_kv_head(logits.softmax(-1))[:, first - layer.tokens :]
        norms = layer.values[:, first - layer.tokens :].float().norm(dim=-1)
        norms = norms / norms.mean(-1, keepdim=True).clamp_min(1e-12)
        scores[:, first:] = (share * norms).cpu()
        return scores

    def _statistics(self, layer: LayerStates, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `(heads, width)` and covariance `(heads, width, width)` of queries to come.

        Args:
            layer: Whose queries they are.
            queries: `(heads, n, width)` of the chunk's last `n` tokens, rotated; overwritten.
        """
        count, stop = queries.shape[1], layer.keys.shape[1]
        rotation, inv_freq = layer.rotation, layer.inv_freq
        matrix = torch.eye(queries.shape[-1], device=queries.device)
        if rotation is None:
            raise UnsupportedModelError(
                f"its cache holds another form of the keys than its queries meet, so {self!r} "
                f"cannot turn queries; use Knorm({self.keep}) or SnapKV({self.keep})"
            )
        if inv_freq is not None and rotation.style != "none":
            here = torch.arange(stop - count, stop, device=queries.device)
            queries = rotate_(
                queries.clone(), rotation, *angle_table(inv_freq, here, torch.zeros_like(here))
            )
            ahead = torch.arange(stop, stop + self.future, device=queries.device)
            cos, sin = angle_table(inv_freq, torch.zeros_like(ahead), ahead)
            width = len(matrix)
            turn = (cos.mean(0).expand(width, -1), sin.mean(0).expand(width, -1))
            rotate_(matrix, rotation, *turn)  # row i is R e_i, so this is R transposed
        mean = queries.mean(1)  # (heads, width)
        centred = queries - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / count  # (heads, width, width)
        return mean @ matrix, matrix.T @ covariance @ matrix
