"""PEFT adapters from their folders."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    import os

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter alone, without the model that it is for."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """What an adapter says its model is called; "" if it does not say.

    Raises:
        InvalidInputError: If the folder holds no adapter.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return str(config.get("base_model_name_or_path") or "")
    except OSError as error:
        raise InvalidInputError(
            f"{folder} holds no PEFT adapter: it has no {CONFIG}; check the path"
        ) from error
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(f"{folder / CONFIG} is not the JSON of an adapter") from error


def with_adapter(model: Any, adapter: str | os.PathLike[str], name: str) -> Any:
    """The model with an adapter in force, as a PEFT model.

    Args:
        model: Is changed: the adapter's layers are put into it.
        adapter: Folder that PEFT's `save_pretrained` wrote.
        name: What the model was loaded as, for messages.

    Raises:
        InvalidInputError: If it is none, or was made for another model.
        MissingExtraError: If peft is not installed.
    """
    folder = Path(adapter).expanduser()
    base = base_of(folder)
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise MissingExtraError("peft", "finetune") from error
    try:
        with warnings.catch_warnings():
            # peft asks transformers by a name that transformers is about to drop, and warns of
            # weights that it lacks, which are an error here.
            warnings.simplefilter("ignore")
            # In the model's own dtype: nothing is trained.
            adapted = PeftModel.from_pretrained(
                model, str(folder), is_trainable=False, autocast_adapter_dtype=False
            )
            expected = get_peft_model_state_dict(adapted).keys()
    except Exception as error:  # peft and torch raise what they like for weights that do not fit
        reason = str(error).strip().splitlines()
        raise _misfit(folder, base, name, reason[0] if reason else type(error).__name__) from error
    found = _stored_names(folder)
    if found is not None and found != expected:
        name_of_one = min(found ^ expected)
        where = "has no place in the model" if name_of_one in found else "is not in the adapter"
        raise _misfit(folder, base, name, f"{name_of_one} {where}")
    return adapted


def _misfit(folder: Path, base: str, name: str, reason: str) -> InvalidInputError:
    made_for = f", which was made for {base!r}," if base else ""
    return InvalidInputError(
        f"the adapter {folder}{made_for} does not fit the model {name!r}: {reason}"
    )


def _stored_names(folder: Path) -> set[str] | None:
    """Names of an adapter's weights; None where they are kept in another form."""
    from safetensors import safe_open

    if not (folder / WEIGHTS).is_file():
        return None
    with safe_open(folder / WEIGHTS, "pt") as file:
        return set(file.keys())
