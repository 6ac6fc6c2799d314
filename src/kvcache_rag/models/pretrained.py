"""Models, tokenizers and prompt templates by name, with one clear sentence when that fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from kvcache_rag.errors import InvalidInputError, KVCacheRagError
from kvcache_rag.forks import new_rlock
from kvcache_rag.models.adapters import (
    NO_ADAPTER,
    adapter_folder,
    adapter_template,
    base_of,
    hidden_size,
    is_adapter,
    merged,
    trained_for_blocks,
    trained_on_questions,
    with_adapter,
)
from kvcache_rag.models.backends import TRANSFORMERS, backend_of, named_backend
from kvcache_rag.models.gguf import GgufHeader, gguf_tokenizer, load_gguf
from kvcache_rag.models.merges import KeptMerge
from kvcache_rag.models.model_names import SUFFIX, chosen_adapter, offline_options, resolve
from kvcache_rag.models.question_adapter import put_question_adapter, question_adapter
from kvcache_rag.models.weight_formats import WeightFormat, check_weight_format, pack_weights
from kvcache_rag.prompt.known_templates import template_for_model
from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    from kvcache_rag.models.language import LanguageModel

DEVICE_PLANS: Final = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that name no device."""


_LOADING: Final = new_rlock()

# Characters of another library's message that are passed on.
_LONGEST = 400

# Of a loaded model: the name by which it was asked for.
_GIVEN: Final = "_kvcache_rag_name"

# Arguments of `from_pretrained` that say where something lies on the hub.
_HUB = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code", "subfolder")


def named_device(name: Any) -> torch.device:
    """A device by its name, whether it is here or not.

    Args:
        name: Such as "cuda:1"; a number is that of a GPU.

    Raises:
        InvalidInputError: If it is no name of one.
    """
    is_number = isinstance(name, int) and not isinstance(name, bool)
    try:
        return torch.device(f"cuda:{name}" if is_number else name)
    except (RuntimeError, TypeError):
        raise InvalidInputError(f"{name!r} is no device; say cpu, cuda or cuda:1") from None


def checked_device(name: Any) -> torch.device:
    """A device that torch finds here.

    Args:
        name: As for `named_device`.

    Raises:
        InvalidInputError: If it finds none of that name.
    """
    device = named_device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            built = torch.version.cuda or torch.version.hip
            why = "torch finds no GPU" if built else "this torch was built without CUDA"
            raise InvalidInputError(
                f"there is no {device} here, as {why}; say cpu, or leave the device out"
            )
        if (device.index or 0) >= count:
            there = ", ".join(f"cuda:{index}" for index in range(count))
            raise InvalidInputError(f"there is no {device} here, only {there}; say one of them")
        return device
    try:
        torch.empty(0, device=device)
    except Exception:  # whatever torch raises for what it was not built for
        raise InvalidInputError(
            f"torch finds no {device} here; say cpu, or leave the device out"
        ) from None
    return device


def _check_places(device: Any, device_map: Any) -> None:
    """Refuse devices that are not here, before a model is read."""
    places = [*device_map.values()] if isinstance(device_map, Mapping) else [device_map]
    for place in (device, *places):
        if place not in (None, "") and place not in (*DEVICE_PLANS, "disk"):
            checked_device(place)


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str,
    device: str | None,
    options: dict[str, Any],
    tokenizer: Any = None,
    adapter: str | os.PathLike[str] | None = None,
    weight_format: WeightFormat = "plain",
    backend: str = TRANSFORMERS,
) -> tuple[Any, Any, PromptTemplate | None]:
    """Model, tokenizer and the prompt template that they bring along, if any.

    Args:
        name: Hub id, folder, GGUF file, "tiny" or a name of `PACKAGED`; the folder of a PEFT
            adapter alone is the model that it was made for, with it.
        dtype: "auto" for the checkpoint's own.
        device: Where to put the model; None for CUDA if there is one, else the CPU.
        options: Further arguments of transformers' `from_pretrained`, with `gguf_file` for a GGUF
            file in a folder or on the hub.
        tokenizer: A loaded one, or the name of one, instead of the model's own; None for that.
        adapter: PEFT adapter to put into the model, a folder or an installed name; None for none.
        weight_format: How its linear layers keep their weights, after the adapter was put in.
        backend: What runs it.

    Raises:
        InvalidInputError: If something cannot be loaded, or does not fit.
        MissingExtraError: If gguf or peft is needed and not installed.
    """
    other = named_backend(backend)
    if other is not None:
        model, tokenizer = other.load(
            name,
            dtype=dtype,
            device=device,
            options=options,
            tokenizer=tokenizer,
            adapter=adapter,
            weight_format=weight_format,
        )
        return model, tokenizer, bundled_template(name, adapter or NO_ADAPTER)
    _check_places(device, options.get("device_map"))
    check_weight_format(weight_format)
    resolved = resolve(name)
    folder = Path(resolved)
    # transformers 5.23 loads wrong weights now and then when several threads load at once (3 of 48
    # small models had some that were not the file's), and says nothing.
    with _LOADING:
        if is_adapter(folder):
            if tokenizer is None and (folder / "tokenizer_config.json").is_file():
                tokenizer = resolved
            loaded = _adapted(
                folder, dtype=dtype, device=device, options=options, tokenizer=tokenizer
            )
            if adapter is not None:
                loaded = _changed_by(loaded[0], adapter, os.fspath(name)), loaded[1]
        else:
            how = (resolved, os.fspath(name), dtype, device, options, tokenizer)
            loaded = _plain(*how) if adapter is None else _merged(adapter, *how)
        model, tokenizer = loaded
    pack_weights(model, weight_format)
    note_name(model, os.fspath(name))
    return model, tokenizer, bundled_template(resolved, adapter or NO_ADAPTER)


def language_model(
    model: Any, *, packed_attention: bool = True, window: int | None = None
) -> LanguageModel:
    """A loaded model as the rest of the package uses it.

    Args:
        model: A transformers or PEFT model, or what another back end has loaded.
        packed_attention: As for `Engine`; of transformers' models alone.
        window: Longest prompt plus answer that is wanted; None for the model's own.

    Raises:
        UnsupportedModelError: If it is spread over several devices, or partly on none.
        InvalidInputError: As for `TransformersModel`.
    """
    other = backend_of(model)
    if other is not None:
        return other.language_model(model, window=window)
    from kvcache_rag.models.hf import TransformersModel

    return TransformersModel(model, packed_attention=packed_attention, window=window)


def fitted(
    model: Any, adapter: str | None, weight_format: WeightFormat, backend: str
) -> tuple[Any, PromptTemplate | None]:
    """A loaded model with adapter and weights as they are asked for, and the adapter's template.

    Raises:
        InvalidInputError: If a model that is loaded cannot be given that any more.
    """
    is_plain = adapter in (None, NO_ADAPTER)
    other = backend_of(model)
    if other is not None:
        other.check_loaded(weight_format, has_adapter=not is_plain)
        return model, None
    if backend != TRANSFORMERS:
        raise InvalidInputError(
            f'backend="{backend}" loads a model by its name, and a loaded one of transformers was '
            "given; name it, or leave backend out"
        )
    if adapter is None or is_plain:
        if adapter == NO_ADAPTER and question_adapter(model) is not None:
            raise InvalidInputError(
                "the model that was given has an adapter for questions in it, which cannot be "
                'taken out; load it again with adapter="none"'
            )
        if weight_format != "auto":
            pack_weights(model, weight_format)
        return model, None
    if weight_format not in ("auto", "plain"):
        raise InvalidInputError(
            "adapter= of a loaded model can be switched, which needs weights as they are; "
            "leave weight_format out, or name the model and its adapter"
        )
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    if trained_on_questions(adapter_folder(adapter)):
        put = put_question_adapter(model, adapter_folder(adapter), name)
        return put, adapter_template(adapter)
    return with_adapter(model, adapter, name), adapter_template(adapter)


def note_name(model: Any, name: str) -> None:
    """Let logs and spans call a model by this name."""
    setattr(model, _GIVEN, name)


def name_of(model: Any) -> str:
    """The name by which a model was asked for, of a path no more than tells it from others."""
    name = str(getattr(model, _GIVEN, "") or getattr(model.config, "_name_or_path", ""))
    path = Path(name)
    if not (path.is_absolute() or path.exists()):
        return name or str(model.config.model_type)
    path = Path(os.path.abspath(path))
    if path.parent.name != "snapshots":
        return path.name
    # The hub's own cache, or a copy of it: the last part is a commit.
    folder = path.parent.parent.name
    return f"{folder.removeprefix('models--').replace('--', '/')}@{path.name[:8]}"


def check_model(name: str, backend: str = TRANSFORMERS) -> None:
    """Say before hours of work whether a model is there.

    Raises:
        InvalidInputError: If it is not, or cannot be read.
        MissingExtraError: If what the back end needs is not installed.
    """
    other = named_backend(backend)
    if other is not None:
        other.check(name)
        return
    resolved = resolve(name)
    if resolved.endswith(SUFFIX):
        GgufHeader.read(Path(resolved))
        return
    if is_adapter(Path(resolved)):
        return
    _check_folder(resolved, name, "")
    try:
        transformers.AutoConfig.from_pretrained(resolved, **offline_options(resolved, {}))
    except Exception as error:  # as in `_plain`
        raise _unloaded("model", name, error) from error


def _adapted(folder: Path, **how: Any) -> tuple[Any, Any]:
    """The model that an adapter says it was made for, with it."""
    base = base_of(folder)
    try:
        model, tokenizer, _ = load(base, **how)
    except KVCacheRagError as error:
        raise InvalidInputError(
            f"{folder} is an adapter for {base!r}, which cannot be loaded: {error}; name its "
            "model, and this folder as adapter="
        ) from error
    return _changed_by(model, folder, base), tokenizer


def _changed_by(model: Any, adapter: str | os.PathLike[str], name: str) -> Any:
    """A model with an adapter in its weights, or beside them if it acts on questions alone."""
    folder = adapter_folder(adapter)
    if trained_on_questions(folder):
        return put_question_adapter(model, folder, name)
    return merged(with_adapter(model, folder, name))


def bundled_template(
    name: str | os.PathLike[str], adapter: str | os.PathLike[str] | None = None
) -> PromptTemplate | None:
    """The prompt template that an adapter brings along in its folder, else its model, if any.

    A model of somebody else brings it by its name, unless its folder says another.

    Args:
        name: Of the model.
        adapter: As for `chosen_adapter`.
    """
    adapter = chosen_adapter(name, adapter)
    found = None if adapter is None else adapter_template(adapter)
    if found is not None:
        return found
    place = Path(resolve(name))
    folder = place.parent if place.suffix == SUFFIX else place
    found = PromptTemplate.load(folder) if folder.is_dir() else None
    if found is None and is_adapter(folder):
        return bundled_template(base_of(folder), NO_ADAPTER)
    return found or template_for_model(place)


def is_trained(name: str, options: dict[str, Any]) -> bool:
    """Whether a model was trained for blocks, as its config or its name says, without its weights.

    Args:
        name: Of the model.
        options: Of the hub, such as `revision`.
    """
    return trained_for_blocks(SimpleNamespace(config=_config(name, options)))


def width_of(name: str, options: dict[str, Any]) -> int:
    """The hidden size of a model, as its config says, without its weights; 0 where it says none.

    Args:
        name: Of the model.
        options: Of the hub, such as `revision`.
    """
    return hidden_size(_config(name, options))


def _config(name: str, options: dict[str, Any]) -> Any:
    """What a model says about itself; its place alone where there is no more than a tokenizer."""
    place = resolve(name)
    with suppress(OSError, ValueError):
        return transformers.AutoConfig.from_pretrained(
            place, **{**options, **offline_options(place, options)}
        )
    return SimpleNamespace(_name_or_path=place)


def own_dtype(name: str) -> torch.dtype:
    """The dtype of a checkpoint, as "auto" would load it."""
    resolved = resolve(name)
    if resolved.endswith(SUFFIX):
        return GgufHeader.read(Path(resolved)).dtype
    dtype = transformers.AutoConfig.from_pretrained(resolved, **offline_options(resolved, {})).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _plain(
    path: str,
    name: str,
    dtype: torch.dtype | str,
    device: str | None,
    options: dict[str, Any],
    tokenizer: Any,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer.

    Args:
        path: Folder, GGUF file or hub id.
        name: What the user wrote, for messages.
        dtype: As for `load`.
        device: Where to put the model, unless `options` has a `device_map`; None for CUDA if there
            is one.
        options: As for `load`; those of the hub go to the tokenizer as well.
        tokenizer: As for `load`.

    Raises:
        InvalidInputError: If transformers cannot load it.
    """
    options = {**options, **offline_options(path, options)}
    common = {key: options[key] for key in _HUB if key in options}
    own = tokenizer is None
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer), common if tokenizer == path else {})
    try:
        gguf = gguf_of(path, options)
        if gguf is not None:
            further = {k: v for k, v in options.items() if k not in (*_HUB, "gguf_file")}
            model, its = load_gguf(gguf, dtype=dtype, options=further, own_tokenizer=own)
        else:
            _check_folder(path, name, str(options.get("subfolder") or ""))
            its = transformers.AutoTokenizer.from_pretrained(path, **common) if own else None
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        if "device_map" not in options:
            model = _placed(model, device)
    except (torch.OutOfMemoryError, KVCacheRagError):
        raise
    except Exception as error:  # libraries below raise what they like for a bad file or argument
        raise _unloaded("model", name, error) from error
    return model, its if own else tokenizer


def _placed(model: Any, device: str | None) -> Any:
    given = device not in (None, "")
    return model.to(device if given else "cuda" if torch.cuda.is_available() else "cpu")


def _merged(
    adapter: str | os.PathLike[str],
    path: str,
    name: str,
    dtype: torch.dtype | str,
    device: str | None,
    options: dict[str, Any],
    tokenizer: Any,
) -> tuple[Any, Any]:
    """`_plain` with an adapter in its weights; of a GGUF file both are kept for the next time."""
    kept = None
    is_merged = not trained_on_questions(adapter_folder(adapter))
    if is_merged and path.endswith(SUFFIX) and tokenizer is None and not options:
        kept = KeptMerge.of(Path(path), adapter_folder(adapter), dtype)
    if kept is not None and (found := kept.load(name)) is not None:
        return _placed(found, device), load_tokenizer(path, {})
    model, tokenizer = _plain(path, name, dtype, device, options, tokenizer)
    model = _changed_by(model, adapter, name)
    if kept is not None:
        kept.keep(model)
    return model, tokenizer


def gguf_of(path: str, options: dict[str, Any]) -> Path | None:
    """The GGUF file that is meant, fetched from the hub if it lies there; None for none."""
    if path.endswith(SUFFIX):
        return Path(path)
    file = options.get("gguf_file")
    if not file:
        return None
    folder, file = Path(path), str(file)
    if folder.is_dir():
        if not (folder / file).is_file():
            raise InvalidInputError(f"there is no GGUF file {file} in {path}; check gguf_file")
        return folder / file
    from transformers.utils import cached_file

    return Path(str(cached_file(path, file, **{k: options[k] for k in _HUB[:4] if k in options})))


def load_tokenizer(name: str, options: dict[str, Any]) -> Any:
    """A tokenizer by its name, folder or GGUF file.

    Raises:
        InvalidInputError: If transformers cannot load it.
    """
    place = resolve(name, "tokenizer")
    try:
        if place.endswith(SUFFIX):
            return gguf_tokenizer(Path(place), options)
        options = {**options, **offline_options(place, options, "tokenizer")}
        return transformers.AutoTokenizer.from_pretrained(place, **options)
    except KVCacheRagError:
        raise
    except Exception as error:  # as in `_plain`
        raise _unloaded("tokenizer", name, error) from error


def _check_folder(path: str, name: str, subfolder: str) -> None:
    folder = Path(path)
    if folder.is_dir() and not (folder / subfolder / "config.json").is_file():
        raise InvalidInputError(
            f"cannot load the model {name!r}: there is no config.json in that folder"
        )


def _unloaded(kind: str, name: str, error: Exception) -> InvalidInputError:
    """What a library says, on one line and not at length."""
    words = " ".join(str(error).split()) or type(error).__name__
    reason = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    return InvalidInputError(f"cannot load the {kind} {name!r}: {reason}")
