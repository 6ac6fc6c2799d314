"""Convert a low-rank PEFT adapter (LoRA) to the file that llama.cpp reads."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.adapters import CONFIG, WEIGHTS, base_of
from kvcache_rag.models.kept import file_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

# Rotated neighbours in llama.cpp, halves in transformers: rows of these are in another order.
_REORDERED: Final = ("attn_q.weight", "attn_k.weight")
# Architectures of which that is known; the other way round, halves are as in transformers.
_NEIGHBOURS: Final = ("llama",)
_PREFIX: Final = "base_model.model."
# What an adapter of low rank may ask for besides, which llama.cpp does not do.
_MORE: Final = (
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)


def adapter_digest(folder: Path) -> str:
    """What names an adapter: its weights and its config."""
    config = (folder / CONFIG).read_bytes()
    return hashlib.sha256(config + file_digest(folder / WEIGHTS).encode()).hexdigest()


@contextmanager
def adapter_file(
    folder: Path, *, architecture: str, layers: int, heads: tuple[int, int], halves: bool
) -> Iterator[Path]:
    """A GGUF file of an adapter, for as long as it is read.

    Args:
        folder: What PEFT's `save_pretrained` wrote.
        architecture: Of the model, as llama.cpp calls it.
        layers: How many that has.
        heads: Of queries, and of keys.
        halves: Whether llama.cpp rotates halves, as transformers does, and not neighbours.

    Raises:
        InvalidInputError: If it is no adapter of low rank, or not for such a model.
        MissingExtraError: If gguf is not installed.
    """
    config, weights = _read(folder)
    scales = _Scales(config)
    if not halves and architecture not in _NEIGHBOURS:
        raise InvalidInputError(
            f"how {architecture} orders the rows of its keys in GGUF files is not known here, so "
            f'{folder} cannot be put into it; use backend="transformers"'
        )
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError("gguf", "llama-cpp") from error
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise InvalidInputError(f"the installed gguf knows no {architecture}; pip install -U gguf")
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    with TemporaryDirectory() as place:
        path = Path(place) / "adapter.gguf"
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)  # the factors are in the weights
        for module, (down, up) in sorted(weights.items()):
            target = names.get_name(module, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise InvalidInputError(f"{folder} changes {module}, which {architecture} has not")
            tensor = f"{target}.weight"
            wide = up.float() * scales.factor(module, down.shape[0])  # (outputs, rank)
            if not halves and tensor.endswith(_REORDERED):
                wide = _as_neighbours(wide, heads[tensor.endswith(_REORDERED[1])])
            writer.add_tensor(f"{tensor}.lora_a", down.float().numpy())
            writer.add_tensor(f"{tensor}.lora_b", wide.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path


def _as_neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows of halves, `(heads * width, rank)`, in the order of neighbours."""
    outputs, rank = rows.shape
    return rows.view(heads, 2, outputs // heads // 2, rank).transpose(1, 2).reshape(outputs, rank)


class _Scales:
    """By how much the product of an adapter's matrices is multiplied."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._alpha = float(config.get("lora_alpha") or 1)
        self._alphas: Mapping[str, Any] = config.get("alpha_pattern") or {}
        self._is_root = bool(config.get("use_rslora"))

    def factor(self, module: str, rank: int) -> float:
        own = next((self._alphas[key] for key in self._alphas if module.endswith(key)), None)
        alpha = self._alpha if own is None else float(own)
        return float(alpha / (rank**0.5 if self._is_root else rank))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[Tensor, Tensor]]]:
    """The config of an adapter, and per module its matrices `(rank, in)` and `(out, rank)`."""
    from safetensors.torch import load_file

    base_of(folder)  # says what is wrong with a folder that holds none
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    asked = [name for name in _MORE if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or asked:
        why = f"{asked[0]} is set" if asked else f"it is of kind {config.get('peft_type')}"
        raise InvalidInputError(
            f"llama.cpp takes adapters of low rank (LoRA) as they are, and of {folder} {why}; use "
            'backend="transformers"'
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise InvalidInputError(f"{folder} has no {WEIGHTS}; save the adapter with PEFT once more")
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(path).items():
        module, _, which = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        found.setdefault(module, {})[which] = tensor
    pairs = {}
    for module, parts in found.items():
        if parts.keys() != {"lora_A", "lora_B"}:
            raise InvalidInputError(
                f"{folder} has more than matrices of low rank for {module} ({', '.join(parts)}); "
                'use backend="transformers"'
            )
        pairs[module] = parts["lora_A"], parts["lora_B"]
    return config, pairs
