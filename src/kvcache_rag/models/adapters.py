"""PEFT adapters from their folders, or by the names that installed packages give them.

This module also says what a model or an adapter was trained for (`trained_for_blocks`).
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError, check_name, expanded
from kvcache_rag.prompt.known_templates import template_for_model
from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.models.model_marks import ModelMark

_LOG = logging.getLogger(__name__)

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"

GROUP: Final = "kvcache_rag.adapters"
"""Entry points that give adapters their names; each says in which package's folder one lies."""

PACKAGED_ADAPTERS: Final = {"block": "kvcache-rag-smollm2"}
"""Packages of ours by the names of their adapters, which mean these, installed or not."""

NO_ADAPTER: Final = "none"
"""Says that no adapter is put into a model that has one by itself."""

TRAINING: Final = "kvcache_rag"
"""Key of a model's `config.json` that says what it was trained for.

PEFT warns of keys that it does not know, so an adapter says the same in a file beside its own.
"""

TRAINING_FILE: Final = f"{TRAINING}.json"

BLOCKS: Final[Mapping[str, str]] = {"trained_for": "blocks"}
"""Of a model that was fine-tuned under the block mask (TurboRAG, arXiv 2410.07590)."""

ON_QUESTION: Final[Mapping[str, str]] = {"acts_on": "question"}
"""Of an adapter that is in force for question and answer alone: chunks are the model's own."""

# Behind the names of the hub's repositories of GGUF files.
_QUANTISED: Final = "-GGUF"

# What was warned of: an adapter's folder, and the model that it was put into.
_WARNED: Final[set[tuple[str, str]]] = set()


@dataclass(frozen=True)
class AdapterBase:
    """The model on which an adapter was trained, as the adapter's folder may say it.

    Attributes:
        model: What it is called: a short name, or its id on the hub.
        sha256: Digest of its GGUF file.
        mark: What it is recognised by in another form; None where the adapter says nothing of that.
    """

    model: str
    sha256: str
    mark: ModelMark | None = None

    @classmethod
    def read(cls, folder: Path) -> AdapterBase | None:
        """What the folder of an adapter says; None if it says nothing.

        Raises:
            InvalidInputError: If its file is not of this form.
        """
        path = folder / BASE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            name, digest = values["model"], values["sha256"]
            return cls(check_name("model", name), check_name("digest", digest), _mark(values))
        except (ValueError, KeyError, TypeError, OverflowError, OSError) as error:
            raise InvalidInputError(
                f'{path} is not of the form {{"model": "name", "sha256": "digest of its file"}}'
            ) from error


def _mark(values: Mapping[str, Any]) -> ModelMark | None:
    if "norms" not in values:
        return None
    from kvcache_rag.models.model_marks import ModelMark  # which loads torch

    return ModelMark(int(values["vocabulary"]), str(values["norms"]))


def fitting_adapter(name: str, place: Path | None) -> str | None:
    """The installed adapter that was trained for a model, whatever form its weights have.

    Args:
        name: Of the model, perhaps its id on the hub.
        place: Its file or folder; None where it is somewhere else.
    """
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        base = None
        with suppress(InvalidInputError):  # of a damaged package, which nobody asked for
            base = AdapterBase.read(_installed(point.name, [point]))
        if base is None or base.mark is None:
            continue
        if place is None:
            is_it = name.removesuffix(_QUANTISED) == base.model
        else:
            from kvcache_rag.models.model_marks import mark_of

            is_it = mark_of(place) == base.mark
        if is_it:
            return point.name
    return None


def adapter_folder(adapter: str | os.PathLike[str]) -> Path:
    """The folder of an adapter.

    Args:
        adapter: A folder, or as a text without a separator the name of an installed one, which
            stands before a folder of that name.

    Raises:
        InvalidInputError: If it is the name of one that is not installed, or that several packages
            claim.
    """
    if isinstance(adapter, os.PathLike):
        return Path(expanded(adapter))
    name = check_name("adapter", adapter)
    points = _points(name)
    if points:
        return _installed(name, points)
    folder = Path(expanded(name))
    if name in PACKAGED_ADAPTERS:
        hint = f" (the folder is ./{name})" if folder.is_dir() else ""
        raise InvalidInputError(
            f"the adapter {name!r} comes with a package that is not installed: "
            f"pip install {PACKAGED_ADAPTERS[name]}{hint}"
        )
    if _is_word(name) and not folder.exists():
        known = ", ".join(sorted({*PACKAGED_ADAPTERS, *entry_points(group=GROUP).names}))
        raise InvalidInputError(
            f"there is no adapter {name!r}: no folder, and none of the names {known}"
        )
    return folder


def lasting_adapter(adapter: str | os.PathLike[str]) -> str:
    """An adapter as a text that is valid in any working folder: a name, or an absolute path."""
    names = (*PACKAGED_ADAPTERS, NO_ADAPTER)
    if isinstance(adapter, str) and (adapter in names or _points(adapter)):
        return adapter
    return os.path.abspath(expanded(adapter))


def is_installed(name: str) -> bool:
    """Whether a package brings an adapter of this name."""
    return bool(_points(name))


def trained_for_blocks(model: Any) -> bool:
    """Whether a model was trained to read chunks that do not see each other.

    The last training counts: of a PEFT model that of its active adapters, which are silent unless
    `with_adapter` put them there; of any other what its config says, else its name.
    """
    adapters = getattr(model, "peft_config", None)
    if not adapters or _are_disabled(model):
        config = getattr(model, "config", None)
        if hasattr(config, TRAINING):
            return _says_blocks(getattr(config, TRAINING))
        return template_for_model(str(getattr(config, "_name_or_path", ""))) is not None
    active = model.active_adapters
    names: list[str] = []
    # transformers' own models have a method of PEFT's name, which raises where PEFT put the
    # adapters into them: those are silent.
    with suppress(ValueError):
        names = [*(active() if callable(active) else active)]
    said = [_says_blocks(getattr(adapters.get(name), TRAINING, None)) for name in names]
    return bool(said) and all(said)


def hidden_size(config: Any) -> int:
    """The width of a model, as its config says; 0 where it says none."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return int(getattr(text, "hidden_size", 0) or 0)


def _are_disabled(model: Any) -> bool:
    switches = (getattr(part, "_disable_adapters", None) for part in model.modules())
    return next((switch for switch in switches if switch is not None), False)


def note_training(config: Any, *, blocks: bool) -> None:
    """Let a model's config say what it was trained for, or nothing."""
    if blocks:
        setattr(config, TRAINING, dict(BLOCKS))
    elif hasattr(config, TRAINING):
        delattr(config, TRAINING)


def write_training(folder: Path, *, blocks: bool = True, on_question: bool = False) -> None:
    """Let an adapter say what it was trained for; nothing, if it has nothing to say.

    Args:
        folder: The adapter's.
        blocks: Whether it was trained for blocks.
        on_question: Whether it acts on question and answer alone.
    """
    said = {**(BLOCKS if blocks else {}), **(ON_QUESTION if on_question else {})}
    if not said:
        return
    (folder / TRAINING_FILE).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _says_blocks(said: Any) -> bool:
    return isinstance(said, dict) and said.get("trained_for") == BLOCKS["trained_for"]


def trains_blocks(folder: Path) -> bool:
    """Whether an adapter's folder says that it was trained for blocks."""
    return _says_blocks(_said_training(folder))


def trained_on_questions(folder: Path) -> bool:
    """Whether an adapter's folder says that it acts on question and answer alone."""
    (key, value), said = *ON_QUESTION.items(), _said_training(folder)
    acts_on = said.get(key) if isinstance(said, dict) else None
    if acts_on not in (None, value):
        raise InvalidInputError(
            f"{folder / TRAINING_FILE} says that the adapter acts on {acts_on!r}, which is not "
            f'known; "{value}" is, and without that it acts on everything'
        )
    return acts_on is not None


def _said_training(folder: Path) -> Any:
    path = folder / TRAINING_FILE
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # As an ordinary adapter it would change chunks, too.
        raise InvalidInputError(
            f"{path}, which says what the adapter was trained for, cannot be read: {error}"
        ) from error


def adapter_template(adapter: str | os.PathLike[str]) -> PromptTemplate | None:
    """The prompt template that an adapter brings along in its folder, if any."""
    return PromptTemplate.load(adapter_folder(adapter))


def _is_word(name: str) -> bool:
    return not name.startswith((".", "~")) and os.path.basename(name) == name != ""


def _points(name: str) -> list[EntryPoint]:
    """The entry points of a name, which a text with a separator never is."""
    return [*entry_points(group=GROUP, name=name)] if _is_word(name) else []


def _installed(name: str, points: list[EntryPoint]) -> Path:
    owners = sorted({str(point.dist.name) if point.dist else point.value for point in points})
    if len(owners) > 1:
        raise InvalidInputError(
            f"the adapter {name!r} is claimed by the packages {' and '.join(owners)}; "
            "uninstall all but one, or name a folder"
        )
    try:
        found = find_spec(points[0].module)
    except Exception:  # a package of somebody else may raise what it likes
        found = None
    for place in (found and found.submodule_search_locations) or ():
        if (Path(place) / CONFIG).is_file():
            return Path(place)
    raise InvalidInputError(
        f"the adapter {name!r} is missing from its package: "
        f"pip install --force-reinstall {owners[0]}"
    )


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
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidInputError(
            f"{folder} holds no PEFT adapter: it has no {CONFIG}; check the path"
        ) from error
    except OSError as error:
        raise InvalidInputError(
            f"{folder / CONFIG} cannot be read ({error.strerror}); check its permissions"
        ) from error
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(f"{folder / CONFIG} is not the JSON of an adapter") from error


def with_adapter(model: Any, adapter: str | os.PathLike[str], name: str) -> Any:
    """The model with an adapter in force, as a PEFT model.

    Args:
        model: Is changed: the adapter's layers are put into it.
        adapter: Folder that PEFT's `save_pretrained` wrote, or the name of an installed one.
        name: What the model was loaded as, for messages.

    Raises:
        InvalidInputError: If it is none, or does not fit the model, or that is rounded (see
            `weight_formats.py`).
        MissingExtraError: If peft is not installed.
    """
    from kvcache_rag.models.weight_formats import pack_weights

    folder = adapter_folder(adapter)
    base = base_of(folder)
    pack_weights(model, "plain")  # PEFT puts its layers around those of torch
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
        _without_settings(adapted.unload())  # else its layers would stay in the model
        name_of_one = min(found ^ expected)
        where = "has no place in the model" if name_of_one in found else "is not in the adapter"
        raise _misfit(folder, base, name, f"{name_of_one} {where}")
    compare_base(model, folder, name)
    note_training(adapted.active_peft_config, blocks=trains_blocks(folder))
    return adapted


def merged(model: Any) -> Any:
    """A PEFT model's own model with the adapter in its weights: no layer is computed twice.

    The products are summed in float64, so that every machine rounds to the same weights and finds
    the chunks of the others.  What cannot be merged stays as it is: some adapters, and any adapter
    of a quantised model.
    """
    if getattr(model.config, "quantization_config", None) is not None or model.device.type == "mps":
        return model  # MPS has no float64
    blocks = trained_for_blocks(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.data = weight.data.double()
            found = model.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError):  # as PEFT says it
        return model
    _without_settings(found)
    note_training(found.config, blocks=blocks)
    # As it was loaded.  On CPUs torch 2.13 takes twice the time for a few tokens in low precision
    # where weights want no gradient, even in inference mode.
    return found.requires_grad_(requires_grad=True)


def _without_settings(model: Any) -> None:
    """Remove what PEFT 0.18 leaves at a model whose adapter has gone."""
    if hasattr(model, "peft_config"):
        del model.peft_config


def compare_base(model: Any, folder: Path, name: str) -> None:
    """Warn once of a model that is not known to be the one on which an adapter was trained."""
    from kvcache_rag.models.kept import file_digest
    from kvcache_rag.models.model_names import SUFFIX

    base = AdapterBase.read(folder)
    if base is None or (str(folder), name) in _WARNED:
        return
    # What a model is loaded from tells first: its weights differ with the dtype.
    file = Path(str(getattr(model.config, "_name_or_path", "")))
    is_file = file.suffix == SUFFIX and file.is_file()
    if is_file and file_digest(file) == base.sha256:
        return
    if base.mark is not None:
        from kvcache_rag.models.model_marks import ModelMark, mark_of

        if (mark_of(file) if is_file else ModelMark.from_model(model)) == base.mark:
            return
    _WARNED.add((str(folder), name))
    _LOG.warning(
        "the adapter %s was trained on %s (SHA-256 %s...), which %s is not known to be: what was "
        "measured of it may not hold",
        folder,
        base.model,
        base.sha256[:12],
        name,
    )


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
