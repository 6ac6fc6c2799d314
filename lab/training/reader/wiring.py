"""A start that can already look back and copy.

Random weights need long to find the circuits of copying. Queries and keys have biases here, so a
head that looks a fixed distance back is a bias alone, and two such layers make an induction head
(Olsson et al. 2022, https://arxiv.org/abs/2209.11895). Training changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from training.reader.network import Attention, Network


_SLOWEST_RATE = 1 / 300  # radians per token: content is matched where position hardly turns

_QUIET = 0.1


@torch.no_grad()
def wire(network: Network) -> None:
    """Wire heads of the first three layers of a freshly initialised `network`.

    Layer 0: heads 0-2 look one, two and three tokens back, head 0 copies what it sees. Layer 1:
    heads 0 and 1 find where the current token stood before and copy what followed; the others
    gather the last ten tokens or so. Layer 2: heads 0 and 1 match gathered bags and copy.

    Raises:
        ValueError: If the network has fewer than three layers or four heads.
    """
    config = network.config
    if config.layers < 3 or config.heads < 4:
        raise ValueError("wiring needs at least three layers and four heads")
    first, second, third = (layer.self_attn for layer in network._layers()[:3])
    dim, width, scale = config.head_dim, config.width, config.embedding_std
    slow = [index for index, rate in enumerate(network.inv_freq) if rate < _SLOWEST_RATE]
    slow += [index + dim // 2 for index in slow]

    for head, distance in enumerate((1, 2, 3)):
        _look_back(network, first, head, distance, start=0, stop=5, strength=6.0)
    read, write = _orthonormal(dim, width), _orthonormal(dim, width)
    first.v_proj.weight[:dim] = read
    first.o_proj.weight[:, :dim] = scale * write.T
    for head in (0, 1):
        _match(second, head, slow, read, write)
        _copy(second, head, dim, 1.5 * scale)

    bag_read, bag_write = _orthonormal(dim, width), _orthonormal(dim, width)
    for head in range(2, config.heads):
        _look_back(network, second, head, distance=5, start=2, stop=5, strength=3.7)
    rows = slice(2 * dim, 3 * dim)
    second.v_proj.weight[rows] = bag_read
    second.o_proj.weight[:, rows] = 3 * scale * bag_write.T
    for head in (0, 1):
        _match(third, head, slow, bag_write, bag_write)
        _copy(third, head, dim, scale)


def _look_back(
    network: Network,
    attention: Attention,
    head: int,
    distance: int,
    *,
    start: int,
    stop: int,
    strength: float,
) -> None:
    """Make `head` look `distance` tokens back, by biases in the rotary pairs `start:stop`."""
    dim = network.config.head_dim
    rows = slice(head * dim, (head + 1) * dim)
    pairs = torch.zeros(dim // 2)
    pairs[start:stop] = strength
    angle = network.inv_freq * distance
    attention.k_proj.bias[rows] = torch.cat((pairs, torch.zeros(dim // 2)))
    attention.q_proj.bias[rows] = torch.cat((pairs * angle.cos(), -pairs * angle.sin()))
    attention.q_proj.weight[rows] *= _QUIET
    attention.k_proj.weight[rows] *= _QUIET


def _match(attention: Attention, head: int, slow: list[int], query: Tensor, key: Tensor) -> None:
    """Make `head` attend where the `key` projection equals the `query` projection here."""
    dim = query.shape[0]
    rows = slice(head * dim, (head + 1) * dim)
    attention.q_proj.weight[rows] *= _QUIET
    attention.k_proj.weight[rows] *= _QUIET
    chosen = [head * dim + index for index in slow]
    attention.q_proj.weight[chosen] = 2.0 * query[: len(slow)]
    attention.k_proj.weight[chosen] = 2.0 * key[: len(slow)]


def _copy(attention: Attention, head: int, dim: int, strength: float) -> None:
    """Make `head` write what it sees back into the stream."""
    rows = slice(head * dim, (head + 1) * dim)
    basis = _orthonormal(dim, attention.q_proj.in_features)
    attention.v_proj.weight[rows] = basis
    attention.o_proj.weight[:, rows] = strength * basis.T


def _orthonormal(rows: int, columns: int) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return basis.T
