"""What a model is recognised by, whether its weights are as they were trained or quantised."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.errors import KVCacheRagError
from kvcache_rag.models.gguf import GgufHeader

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Self

_NORM: Final = "norm.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "token_embd.weight")


@dataclass(frozen=True)
class ModelMark:
    """A model's vocabulary, and its norms, which no format of weights rounds.

    Models that were trained on from one another differ in norms unless these were frozen.

    Attributes:
        vocabulary: Tokens that it has embeddings of.
        norms: SHA-256 of the weights of all norms in bfloat16, whatever their names and order.
    """

    vocabulary: int
    norms: str

    @classmethod
    def from_tensors(cls, named: Iterable[tuple[str, Tensor]], vocabulary: int) -> Self:
        """Of a model's weights; those that are no norms are passed over."""
        digests = [
            hashlib.sha256(_as_bytes(tensor)).hexdigest()
            for name, tensor in named
            if name.endswith(_NORM) and tensor.dim() == 1
        ]
        return cls(vocabulary, hashlib.sha256("".join(sorted(digests)).encode()).hexdigest())

    @classmethod
    def from_model(cls, model: Any) -> Self:
        """Of a loaded transformers model."""
        rows = int(model.get_input_embeddings().weight.shape[0])
        return cls.from_tensors(model.named_parameters(), rows)

    @classmethod
    def read(cls, place: Path) -> Self | None:
        """Of a GGUF file, or a folder of safetensors; None for anything else, or what is damaged.

        The norms alone are read.
        """
        try:
            if place.is_file():
                header = GgufHeader.read(place)
                embeddings = header.tensors[_EMBEDDINGS[1]]
                return cls.from_tensors(header.vectors(place), embeddings.shape[0])
            return cls._from_folder(place)
        except (OSError, KeyError, ValueError, KVCacheRagError):  # loading it says what is wrong
            return None

    @classmethod
    def _from_folder(cls, folder: Path) -> Self | None:
        from safetensors import SafetensorError, safe_open

        norms: list[tuple[str, Tensor]] = []
        vocabulary = 0
        try:
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118  # no mapping
                        if name.endswith(_EMBEDDINGS):
                            vocabulary = int(file.get_slice(name).get_shape()[0])
                        elif name.endswith(_NORM):
                            norms.append((name, file.get_tensor(name)))
        except SafetensorError:
            return None
        return cls.from_tensors(norms, vocabulary) if vocabulary else None


def _as_bytes(tensor: Tensor) -> bytes:
    rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    return rounded.view(torch.uint8).numpy().tobytes()


def mark_of(place: Path) -> ModelMark | None:
    """`ModelMark.read`, once for a file or folder that stays as it is."""
    seen = place.stat()
    return _known(place, seen.st_mtime_ns, seen.st_size)


@lru_cache(maxsize=8)
def _known(place: Path, _changed: int, _size: int) -> ModelMark | None:
    return ModelMark.read(place)
