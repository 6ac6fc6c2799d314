"""A Llama decoder written out: chunks are prefilled apart and questions asked behind them.

`Network.prefill` runs a context and returns its un-rotated keys and values per layer; `Network.ask`
runs questions behind them, at whatever positions the caller gives the context. Module names are
transformers' own, so the weights move to and from `LlamaForCausalLM` unchanged.

Attention has biases, as in Qwen2: the wired start needs them. Llama is what is exported because
transformers cuts words in Qwen2's own way for every Qwen2 model, whatever its tokenizer says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import LlamaConfig


LayerKV = tuple["Tensor", "Tensor"]

_MASKED = -30_000.0

_OUTPUT_BIAS = "model.layers.{}.self_attn.o_proj.bias"


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the network; every head has keys and values of its own."""

    vocabulary: int = 1024
    width: int = 128
    layers: int = 4
    heads: int = 4
    feed_forward: int = 352
    theta: float = 1e6
    embedding_std: float = 0.5

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    def to_transformers(self, *, dtype: str = "float32") -> LlamaConfig:
        """Return the configuration of the same model in transformers."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dtype=dtype,
            architectures=["LlamaForCausalLM"],
        )

    @classmethod
    def from_transformers(cls, config: LlamaConfig) -> NetworkConfig:
        """Read the sizes from a transformers configuration."""
        rope: dict[str, Any] = dict(config.rope_parameters or {})
        return cls(
            vocabulary=config.vocab_size,
            width=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            feed_forward=config.intermediate_size,
            theta=float(rope["rope_theta"]),
        )


class Norm(nn.Module):
    """Root-mean-square normalisation with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised over its last axis."""
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Attention(nn.Module):
    """Projections of one attention layer and the attention itself."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `(batch, heads, tokens, head_dim)`, not rotated."""
        shape = (*x.shape[:2], self.heads, -1)
        query, key, value = (
            projection(x).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Return the attention output of rotated `query` and `key` under an additive `bias`.

        Written as two products: on CPU three times faster, backward included, than
        `scaled_dot_product_attention` with a mask.
        """
        score = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        weight = torch.softmax(score + bias.to(score.dtype), -1, dtype=score.dtype)
        mixed = (weight @ value).transpose(1, 2).flatten(2)
        output: Tensor = self.o_proj(mixed)
        return output


class FeedForward(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up_proj = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down_proj = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update of the residual stream."""
        update: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return update


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.width)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.width)
        self.mlp = FeedForward(config)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the normalised `x`."""
        return self.self_attn.project(self.input_layernorm(x))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output and the feed-forward update to `x`."""
        x = x + attended
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Network(nn.Module):
    """The trainable reader."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.width)
        exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", config.theta**-exponent, persistent=False)
        self._initialise()

    def prefill(
        self, ids: Tensor, positions: Tensor, *, hidden: bool = True
    ) -> tuple[Tensor, list[LayerKV]]:
        """Run contexts causally.

        Args:
            ids: Token ids, `(batch, tokens)`, padded on the right.
            positions: Position of each token, of the same shape.
            hidden: Whether the last hidden state is needed; without it the last layer stops at its
                keys and values.

        Returns:
            The last hidden state (of the layer before, if `hidden` is false) and per layer the
            keys, not rotated, and values, `(batch, heads, tokens, head_dim)`.
        """
        x: Tensor = self.embed_tokens(ids)
        rotation = self._rotation(positions)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        bias = _additive(causal)
        caches: list[LayerKV] = []
        for index, layer in enumerate(self._layers()):
            query, key, value = layer.project(x)
            caches.append((key, value))
            if not hidden and index == self.config.layers - 1:
                break
            rotated = _rotate(query, rotation), _rotate(key, rotation)
            x = layer.finish(x, layer.self_attn.attend(*rotated, value, bias))
        return x, caches

    def ask(
        self,
        ids: Tensor,
        positions: Tensor,
        context: list[LayerKV],
        context_positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Run questions behind stitched contexts and return the last hidden state.

        Args:
            ids: Token ids, `(batch, tokens)`.
            positions: Their positions, of the same shape.
            context: Per layer keys, not rotated, and values, `(batch, heads, context, head_dim)`.
            context_positions: Position of each context token, `(batch, context)`.
            mask: True where a token may look, `(batch, 1, tokens, context + tokens)`.
        """
        x: Tensor = self.embed_tokens(ids)
        rotation, context_rotation = map(self._rotation, (positions, context_positions))
        bias = _additive(mask)
        for layer, (old_key, old_value) in zip(self._layers(), context, strict=True):
            query, key, value = layer.project(x)
            keys = torch.cat((_rotate(old_key, context_rotation), _rotate(key, rotation)), 2)
            values = torch.cat((old_value, value), 2)
            attended = layer.self_attn.attend(_rotate(query, rotation), keys, values, bias)
            x = layer.finish(x, attended)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token for last hidden states."""
        return functional.linear(self.norm(hidden), self.embed_tokens.weight)

    def to_transformers_state(self) -> dict[str, Tensor]:
        """Return the weights under the names of `LlamaForCausalLM` (embeddings tied)."""
        state = {f"model.{name}": value.detach() for name, value in self.state_dict().items()}
        for index in range(self.config.layers):
            # Llama has all four attention biases or none; the output has none here.
            state[_OUTPUT_BIAS.format(index)] = torch.zeros(self.config.width)
        return state

    @classmethod
    def from_transformers_state(cls, config: NetworkConfig, state: Mapping[str, Tensor]) -> Network:
        """Build the network from a state dict of `LlamaForCausalLM`, in float32.

        Raises:
            ValueError: If the output of attention has a bias.
        """
        for index in range(config.layers):
            if state[_OUTPUT_BIAS.format(index)].any():
                raise ValueError(f"layer {index} has a bias on its attention output")
        network = cls(config)
        network.load_state_dict(
            {
                name.removeprefix("model."): value.float()
                for name, value in state.items()
                if name.startswith("model.") and not name.endswith("o_proj.bias")
            }
        )
        return network

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _rotation(self, positions: Tensor) -> LayerKV:
        angle = positions[..., None].float() * self.inv_freq
        angle = torch.cat((angle, angle), -1)[:, None]
        return angle.cos(), angle.sin()

    def _initialise(self) -> None:
        scale = self.config.embedding_std
        for name, parameter in self.named_parameters():
            if name.startswith("embed_tokens"):
                # Large, so that token identity is not swamped by what the layers add.
                nn.init.normal_(parameter, std=scale)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.data *= 0.3 * scale
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.constant_(self.norm.weight, 0.06 * math.sqrt(128 / self.config.width) / scale)


def _additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, _MASKED)


def _rotate(x: Tensor, rotation: LayerKV) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in rotation)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
