"""The model of a GGUF file, its weights read and dequantised one tensor at a time.

transformers keeps one array per token of the vocabulary whenever it opens such a file, which takes
longer than all weights, and it opens it once for the configuration, once for the weights and once
more for the tokenizer. So it is given a file of the same description without the vocabulary; names,
shapes and the order of rows stay as it has them.
"""

from __future__ import annotations

import math
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcache_rag.models.gguf import GgufHeader, StoredTensor

# Weights that are dequantised at once: numpy takes twice as long for a sixteenth of them.
_AT_ONCE = 1 << 18

# Weights that torch copies without its other threads: on a busy machine they were waited for five
# times as long as dequantising takes.
_ALONE = 1 << 14

# glibc gives freed memory back, and takes it cleared again, up to twice the largest block that was
# freed: that took twice as long as dequantising, which frees some megabytes a slice.
_FREED = 8 << 20

_STRING, _ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class Description:
    """What a file says about its model, as transformers reads it.

    Attributes:
        architecture: llama.cpp's name of it.
        values: Of transformers' configuration, by its names.
    """

    architecture: str
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, header: GgufHeader) -> Description | None:
        """None if this transformers reads such files in another way.

        Raises:
            Exception: As transformers does for what it does not know.
        """
        try:
            from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        except ImportError:
            return None
        if not header.architecture or _is_read_lazily(header.architecture):
            return None
        with tempfile.TemporaryDirectory() as folder:
            short = Path(folder) / path.name
            short.write_bytes(_without_vocabulary(path, header))
            values = dict(load_gguf_checkpoint(str(short), return_tensors=False)["config"])
        if values.get("vocab_size") == 1:  # counted in the file without a vocabulary
            values["vocab_size"] = _count(path, header)
        return cls(header.architecture, values)

    def config(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """The configuration of transformers, and those of the options that it does not take."""
        from transformers import CONFIG_MAPPING

        kind: Any = CONFIG_MAPPING[self.values["model_type"]]
        config, rest = kind.from_dict(dict(self.values), return_unused_kwargs=True, **options)
        return config, rest


def _is_read_lazily(architecture: str) -> bool:
    """Whether transformers itself reads tensor by tensor, as since 5.19 for some architectures."""
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:
        return False
    return architecture in GGUF_ARCHS


def model_of(
    path: Path, header: GgufHeader, dtype: torch.dtype, options: Mapping[str, Any]
) -> Any | None:
    """The model with its weights in `dtype`; None if this transformers needs another way.

    Args:
        path: The file.
        header: Of it.
        dtype: Of the weights.
        options: Further arguments of transformers' `from_pretrained`.
    """
    description = Description.read(path, header)
    if description is None:
        return None
    from transformers import AutoModelForCausalLM

    config, rest = description.config(dtype=dtype, **options)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    try:
        state = _state(path, header, dtype, description, empty)
    except ImportError:
        return None
    kind: Any = type(empty)
    told = {"dtype": dtype, "output_loading_info": True}
    model, found = kind.from_pretrained(None, config=config, state_dict=state, **told, **rest)
    ensure_whole(path, found)
    return model


def ensure_whole(path: Path, found: Mapping[str, Any]) -> None:
    """Refuse a file without some weights of its model, which transformers would draw at random.

    Args:
        path: The file.
        found: What transformers says about the loading.

    Raises:
        InvalidInputError: If any are missing.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        raise InvalidInputError(
            f"{path} lacks {len(missing)} weights of its model, such as {missing[0]}; if it is one "
            "of several parts, join them first (llama-gguf-split --merge)"
        )


def _state(
    path: Path, header: GgufHeader, dtype: torch.dtype, description: Description, empty: Any
) -> dict[str, torch.Tensor]:
    """Weights by the names that `empty` has for them.

    Raises:
        ImportError: If this transformers has no functions for that.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    kind: Any = TENSOR_PROCESSORS.get(description.architecture, TensorProcessor)
    processor = kind(config=description.values)
    names = _names(header, empty, processor)
    state: dict[str, torch.Tensor] = {}
    np.empty(_FREED, np.uint8)
    if kind.process is TensorProcessor.process:  # it only renames
        for name, tensor in header.tensors.items():
            if name in names:
                state[names[name]] = dequantised(path, tensor, dtype)
        return state
    for name, tensor in header.tensors.items():
        result = processor.process(
            weights=dequantised(path, tensor, torch.float32).numpy(),
            name=name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": state},  # gets what becomes other tensors than one
        )
        if result.name in names:
            state[names[result.name]] = torch.from_numpy(result.weights)
        state.update({key: value.to(dtype) for key, value in state.items() if value.dtype != dtype})
    return state


def _names(header: GgufHeader, empty: Any, processor: Any) -> Mapping[str, str]:
    """The model's names for a file's tensors.

    transformers also looks for them below each single module, which takes seconds and adds only
    names that are not found further up.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    names: dict[str, str] = get_gguf_hf_weights_map(_Upper(empty, below=1), processor)
    if not header.tensors.keys() <= names.keys():
        names = get_gguf_hf_weights_map(empty, processor)
    # llama.cpp's names of scales end as those of weights, and transformers looks for them bare.
    for name in header.tensors.keys() - names.keys():
        if (bare := name.removesuffix(".weight")) in names:
            names[name] = names[bare]
    return names


@dataclass(frozen=True)
class _Upper:
    """A module and those right below it, so far as names go."""

    module: torch.nn.Module
    below: int

    @property
    def config(self) -> Any:
        return self.module.config

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self.module.state_dict()

    def named_children(self) -> list[tuple[str, _Upper]]:
        children = self.module.named_children() if self.below else ()
        return [(name, _Upper(child, self.below - 1)) for name, child in children]


def dequantised(path: Path, tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a file, of its shape; beside it, only a slice of it is float32.

    Raises:
        NotImplementedError: If gguf does not know the type.
    """
    out = torch.empty(math.prod(tensor.shape), dtype=dtype)
    for place, values in _slices(path, tensor):
        for first in range(0, values.size, _ALONE):
            part = torch.from_numpy(values[first : first + _ALONE])
            out[place + first : place + first + part.numel()].copy_(part)
    return out.reshape(tensor.shape)


def _slices(path: Path, tensor: StoredTensor) -> Iterator[tuple[int, np.ndarray]]:
    """The numbers of a tensor from a place on, float32."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    step = max(_AT_ONCE // tensor.block, 1)
    blocks = math.prod(tensor.shape) // tensor.block
    for first in range(0, blocks, step):
        # Read, not mapped: pages of the file would count as memory of this process.
        raw = np.fromfile(
            path,
            np.uint8,
            min(step, blocks - first) * tensor.block_bytes,
            offset=tensor.place + first * tensor.block_bytes,
        )
        yield first * tensor.block, dequantize(raw.reshape(1, -1), kind).reshape(-1)


# ---------------------------------------------------------------------- without the vocabulary
def _without_vocabulary(path: Path, header: GgufHeader) -> bytes:
    """A GGUF file of the same metadata and names, with one token and one number per tensor."""
    entries = []
    with path.open("rb") as file:
        for name, (start, end) in header.metadata.items():
            file.seek(start)
            entry = file.read(end - start)
            (kind,) = struct.unpack_from("<I", entry, 8 + len(name.encode()))
            is_long = kind == _ARRAY and name.startswith("tokenizer.")
            if not is_long and name != "general.alignment":
                entries.append(entry)
    if _TOKENS in header.metadata:
        entries.append(_text(_TOKENS) + struct.pack("<IIQ", _ARRAY, _STRING, 1) + _text("a"))
    # One axis of one float32, all at the same place: 1, 1, 0, 0.
    tensors = [_text(name) + struct.pack("<IQIQ", 1, 1, 0, 0) for name in header.tensors]
    counts = struct.pack("<IQQ", 3, len(tensors), len(entries))
    found = b"".join((b"GGUF", counts, *entries, *tensors))
    return found + bytes(-len(found) % 32 + 4)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _count(path: Path, header: GgufHeader) -> int:
    """Tokens of the vocabulary."""
    with path.open("rb") as file:
        file.seek(header.metadata[_TOKENS][0] + 8 + len(_TOKENS) + 8)  # behind name and two types
        (count,) = struct.unpack("<Q", file.read(8))
    return int(count)
