"""Which model it is: hub id and revision, or a digest of the weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import xxhash

from kvcache_rag.chunk import canonical_json

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

    A model from a hub is its id and commit.  Anything else (a local path, a model built or changed
    in this process, one with adapters) is a digest of the weights in memory, so that two folders
    with the same weights share caches and a changed file never meets old ones.
    """
    config = model.config
    commit = getattr(config, "_commit_hash", None)
    quantization = getattr(config, "quantization_config", None)
    identity: dict[str, Any] = {
        "type": str(config.model_type),
        "quantization": None if quantization is None else repr(quantization),
    }
    if commit and not getattr(model, "peft_config", None):
        return {**identity, "id": str(config._name_or_path), "revision": str(commit)}
    return {**identity, "weights": weights_digest(model), "config": _config_digest(config)}


def _config_digest(config: Any) -> str:
    values = {k: repr(v) for k, v in config.to_diff_dict().items() if k not in _IRRELEVANT}
    return hashlib.sha256(canonical_json(values)).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """xxh3_128 over names, dtypes, shapes and bytes of all parameters, 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.named_parameters()):
        state.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(flat.numpy().data)
    return state.hexdigest()
