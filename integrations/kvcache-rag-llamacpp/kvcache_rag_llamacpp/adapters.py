"""Convert a low-rank PEFT adapter (LoRA) to the file that llama.cpp reads."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.lora import read_lora

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Rotated neighbours in llama.cpp, halves in transformers: rows of these are in another order.
_REORDERED: Final = ("attn_q.weight", "attn_k.weight")
# Architectures of which that is known; the other way round, halves are as in transformers.
_NEIGHBOURS: Final = ("llama",)


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
    pairs = read_lora(folder, "llama.cpp takes", 'use backend="transformers"')
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
        for module, pair in sorted(pairs.items()):
            target = names.get_name(module, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise InvalidInputError(f"{folder} changes {module}, which {architecture} has not")
            tensor = f"{target}.weight"
            wide = pair.up.float() * pair.factor  # (outputs, rank)
            if not halves and tensor.endswith(_REORDERED):
                wide = _as_neighbours(wide, heads[tensor.endswith(_REORDERED[1])])
            writer.add_tensor(f"{tensor}.lora_a", pair.down.float().numpy())
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
