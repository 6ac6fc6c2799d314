"""Read the rotary frequencies that a model really uses off its own modules.

transformers keeps them as buffers whose names end in `inv_freq`, one per layer type in some models.
Families without such a buffer (tables only) get the classic frequencies from their config, which
the probe then verifies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvcache_rag.models.base import FrequencySet


def frequency_sets(model: nn.Module, config: Any) -> tuple[FrequencySet, ...]:
    """Every distinct set of frequencies found in the model.

    Args:
        model: The whole model.
        config: Its text config.
    """
    found: list[FrequencySet] = []
    seen: list[Tensor] = []
    for name, module in _search_root(model).named_modules():
        for attribute in _frequency_attributes(module):
            values = getattr(module, attribute)
            if any(values.shape == other.shape and torch.equal(values, other) for other in seen):
                continue
            seen.append(values)
            layer_type = attribute.removesuffix("_inv_freq") if attribute != "inv_freq" else None
            found.append(_of_module(f"{name}.{attribute}", module, attribute, layer_type))
    return tuple(found) or (_of_config(config),)


def _search_root(model: nn.Module) -> nn.Module:
    # Multimodal models have further rotary modules; some models call their lm_head "decoder".
    getter: Any = getattr(model, "get_decoder", None)
    decoder = getter() if getter is not None else None
    if isinstance(decoder, nn.Module) and any(
        name.endswith("inv_freq") for name, _ in decoder.named_buffers()
    ):
        return decoder
    return model


def _frequency_attributes(module: nn.Module) -> list[str]:
    plain = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    names = [name for name in (*module._buffers, *plain) if name.endswith("inv_freq")]
    skipped = ("original", "long_", "short_")
    return [
        name
        for name in names
        if not any(part in name for part in skipped) and getattr(module, name) is not None
    ]


def _of_module(
    name: str, module: nn.Module, attribute: str, layer_type: str | None
) -> FrequencySet:
    kind = getattr(module, "rope_type", "default")
    kind = str(kind.get(layer_type, "default") if isinstance(kind, dict) else kind)
    length_dependent = kind == "longrope" or "dynamic" in kind

    def read(total: int) -> Tensor:
        if length_dependent:
            device = getattr(module, attribute).device
            positions = torch.tensor([[total - 1]], device=device)
            arguments = (layer_type,) if layer_type else ()
            with torch.no_grad():
                module(torch.zeros(1, 1, 1, device=device), positions, *arguments)
        frequencies: Tensor = getattr(module, attribute)
        return frequencies.detach().float().clone()

    return FrequencySet(name, read, _limit(module, kind, layer_type))


def _limit(module: nn.Module, kind: str, layer_type: str | None) -> int | None:
    config: Any = getattr(module, "config", None)
    if kind == "longrope":
        parameters = config.rope_parameters
        parameters = parameters.get(layer_type, parameters) if layer_type else parameters
        limit = parameters.get("original_max_position_embeddings")
        return int(limit or config.original_max_position_embeddings)
    if "dynamic" in kind:
        return int(getattr(module, "original_max_seq_len", config.max_position_embeddings))
    return None


def _of_config(config: Any) -> FrequencySet:
    base = getattr(config, "rope_theta", None) or 10000.0
    width = (
        getattr(config, "rotary_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    values = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float) / width))
    return FrequencySet(f"config(base={base}, dim={width})", lambda _total: values)
