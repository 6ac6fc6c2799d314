"""Which model it is: hub id and revision, or a digest of the weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import xxhash

from kvcache_rag.chunk import canonical_json

# Elements per tensor that tell whether a hub model's weights were changed in this process.
SAMPLE = 4096
# Entries of a config that change nothing about keys and values.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "architectures",
        "attn_implementation",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def model_identity(model: Any) -> dict[str, Any]:
    """Plain values that differ whenever the weights differ.

    A model from a hub is its id, its commit and a digest of samples of its weights, which notices
    weights that were changed in this process (a merged adapter, fine-tuning).  Anything else is a
    digest of all weights in memory, so that two folders with the same weights share caches and a
    changed file never meets old ones.
    """
    config = model.config
    commit = getattr(config, "_commit_hash", None)
    quantization = getattr(config, "quantization_config", None)
    identity: dict[str, Any] = {
        "type": str(config.model_type),
        "quantization": None if quantization is None else repr(quantization),
    }
    if commit and not getattr(model, "peft_config", None):
        sample = weights_digest(model, SAMPLE)
        return {**identity, "id": str(config._name_or_path), "revision": commit, "sample": sample}
    return {**identity, "weights": weights_digest(model), "config": _config_digest(config)}


def _config_digest(config: Any) -> str:
    values = {k: repr(v) for k, v in config.to_diff_dict().items() if k not in _IRRELEVANT}
    return hashlib.sha256(canonical_json(values)).hexdigest()


def weights_digest(model: torch.nn.Module, sample: int | None = None) -> str:
    """xxh3_128 over names, dtypes, shapes and bytes of all weights, 32 hexadecimal digits.

    Args:
        model: Its parameters and its buffers count (quantised weights are buffers), but not the
            rotary frequencies, which are part of the spec themselves.
        sample: Elements per tensor, evenly spread; None for all.
    """
    state = xxhash.xxh3_128()
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update({k: v for k, v in model.named_buffers() if "inv_freq" not in k})
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        if sample is not None:
            flat = flat[:: max(1, flat.numel() // sample)]
        state.update(flat.cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()
