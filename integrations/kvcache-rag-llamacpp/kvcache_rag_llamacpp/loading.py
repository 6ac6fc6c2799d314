"""Load a GGUF file by name with llama.cpp, and its tokenizer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.errors import InvalidInputError, refuse_unknown
from kvcache_rag.models.adapters import (
    adapter_folder,
    compare_base,
    note_training,
    trained_on_questions,
    trains_blocks,
)
from kvcache_rag.models.gguf import GgufHeader
from kvcache_rag.models.kept import file_digest
from kvcache_rag.models.lora import lora_digest
from kvcache_rag.models.model_names import resolve
from kvcache_rag.models.pretrained import gguf_of, load_tokenizer, named_device, note_name
from kvcache_rag_llamacpp.adapters import adapter_file
from kvcache_rag_llamacpp.binding import (
    CACHE_TYPES,
    ContextOptions,
    LlamaCpp,
    library,
)
from kvcache_rag_llamacpp.causal import LlamaCppForCausalLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_OPTIONS: Final = ("flash_attn", "n_gpu_layers", "n_threads")
# Devices that are llama.cpp's to choose.
_ANY: Final = (None, "", "auto")
_HUB: Final = ("gguf_file", "revision", "token", "cache_dir", "local_files_only", "subfolder")
# Ids of which it is seen that tokenizer and file mean the same by them.
_COMPARED: Final = 200


def load_llama(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str,
    device: str | None,
    options: Mapping[str, Any],
    tokenizer: Any = None,
    adapter: str | os.PathLike[str] | None = None,
    weight_format: str = "auto",
) -> tuple[LlamaCppForCausalLM, Any]:
    """Load a GGUF file in llama.cpp, and its tokenizer.

    Args:
        name: A GGUF file, a name of `PACKAGED`, or a folder or hub id with `gguf_file` in options.
        dtype: Dtype of keys and values; "auto" for float16.
        device: "cpu" for no GPU, "cuda:1" for that one; None for all where this llama.cpp has some.
        options: `n_gpu_layers`, `flash_attn`, `n_threads` of llama.cpp, and `gguf_file` and its
            place on the hub.
        tokenizer: A loaded tokenizer or its name; None for the file's own.
        adapter: Low-rank PEFT adapter, a folder or an installed name; None for none.
        weight_format: "auto" or "plain": weights are as the file has them.

    Raises:
        InvalidInputError: If something cannot be loaded, or does not fit.
        MissingExtraError: If llama-cpp-python or gguf is not installed.
    """
    refuse_unknown(options, (*_OPTIONS, *_HUB), 'option of backend="llama.cpp"')
    check_format(weight_format)
    path = file_of(name, options)
    header = GgufHeader.read(path)
    llama = LlamaCpp(
        path,
        ContextOptions(_cache_type(dtype), flash=_flash(device, options)),
        gpu_layers=_gpu_layers(device, options),
        gpu=_gpu(device),
        threads=_threads(options),
    )
    if not llama.can_generate:
        raise InvalidInputError(f"{path} is no causal language model; name one that generates text")
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer or path), {})
    _compare(llama, tokenizer)
    model = LlamaCppForCausalLM(
        llama, rope_factors=header.rope_factors(path), file_digest=file_digest(path)
    )
    note_name(model, os.fspath(name))
    if adapter is not None:
        _adapt(model, adapter_folder(adapter), os.fspath(name))
    return model, tokenizer


def file_of(name: str | os.PathLike[str], options: Mapping[str, Any]) -> Path:
    """Find the file that a name means.

    Args:
        name: See `load_llama`.
        options: With `gguf_file` and its place.

    Raises:
        InvalidInputError: If it is not a GGUF file.
        MissingExtraError: If llama-cpp-python is not installed.
    """
    path = gguf_of(resolve(name), dict(options))
    if path is None:
        raise InvalidInputError(
            f'backend="llama.cpp" runs GGUF files, and {os.fspath(name)!r} is none; name one, or '
            'give gguf_file= with its folder or hub id, or use backend="transformers"'
        )
    library()
    return path


def check_format(weight_format: str) -> None:
    """Raise `InvalidInputError` for a weight format that differs from the file's."""
    if weight_format not in ("auto", "plain"):
        raise InvalidInputError(
            f'backend="llama.cpp" has weights as the file has them, not {weight_format}; leave '
            "weight_format out, or name a file of such weights"
        )


def _adapt(model: LlamaCppForCausalLM, folder: Path, name: str) -> None:
    """Put an adapter into a loaded model."""
    llama = model.llama
    with adapter_file(
        folder,
        architecture=llama.architecture,
        layers=llama.layers,
        heads=llama.heads,
        halves=llama.rotates_halves,
    ) as path:
        llama.adapt(path, acts=not trained_on_questions(folder))
    compare_base(model, folder, name)
    model.adapter_digest = lora_digest(folder)
    model.is_adapter_for_questions = trained_on_questions(folder)
    note_training(model.config, blocks=trains_blocks(folder))


def _cache_type(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return "float16"
    if name not in CACHE_TYPES:
        raise InvalidInputError(
            f"llama.cpp keeps keys and values in {', '.join(CACHE_TYPES)} here, not in {name!r}; "
            "say one of these as dtype, or leave it out"
        )
    return name


def _offloads(device: str | None) -> bool:
    """Whether layers go to a GPU."""
    has_gpu = bool(library().llama_supports_gpu_offload())
    if device in _ANY:
        return has_gpu
    named = named_device(device)
    if named.type != "cpu" and not has_gpu:
        raise InvalidInputError(
            f"this llama-cpp-python was built without a GPU, so there is no {named}; say cpu, or "
            "install one that was built with it (docs/models.md)"
        )
    return named.type != "cpu"


def _gpu(device: str | None) -> int | None:
    """Number of the one GPU that is meant; None for all that are there."""
    return None if device in _ANY else named_device(device).index


def _gpu_layers(device: str | None, options: Mapping[str, Any]) -> int:
    if (count := options.get("n_gpu_layers")) is not None:
        return _number("n_gpu_layers", count, least=-1)
    return -1 if _offloads(device) else 0


def _flash(device: str | None, options: Mapping[str, Any]) -> bool:
    """On a GPU flash attention is the faster one; on a CPU it is slower and rounds more."""
    said = options.get("flash_attn")
    if said is None:
        return _offloads(device)
    if not isinstance(said, bool):
        raise InvalidInputError(f"flash_attn must be true or false, not {said!r}")
    return said


def _threads(options: Mapping[str, Any]) -> Any:
    """As many as torch has, unless a number is said."""
    said = options.get("n_threads")
    if said is None:
        return torch.get_num_threads
    count = _number("n_threads", said, least=1)
    return lambda: count


def _number(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"{name} must be a whole number from {least} up, not {value!r}")
    return value


def _compare(llama: LlamaCpp, tokenizer: Any) -> None:
    """Raise `InvalidInputError` if a tokenizer means other tokens than the file."""
    step = max(1, llama.vocabulary // _COMPARED)
    for token in range(0, min(llama.vocabulary, len(tokenizer)), step):
        theirs = tokenizer.convert_ids_to_tokens(token)
        own = llama.piece(token)
        if theirs is not None and theirs != own:
            raise InvalidInputError(
                f"the tokenizer has {theirs!r} for token {token}, and {llama.path.name} has "
                f"{own!r}; give tokenizer= the one that the file was made with"
            )
