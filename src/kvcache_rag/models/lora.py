"""The matrices of a low-rank adapter (LoRA, arXiv 2106.09685) in the folder that PEFT wrote."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.adapters import CONFIG, WEIGHTS, base_of
from kvcache_rag.models.kept import file_digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_PREFIX: Final = "base_model.model."
# What an adapter of low rank may ask for besides.
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


_ALPHA: Final = 8  # PEFT's own


@dataclass(frozen=True, eq=False)
class LoraPair:
    """What is added to the weights of one linear layer: `factor * up @ down`.

    Attributes:
        down: `(rank, inputs)`.
        up: `(outputs, rank)`.
        factor: By which the product is multiplied.
    """

    down: Tensor
    up: Tensor
    factor: float


def lora_digest(folder: Path) -> str:
    """What names an adapter: its weights and its config."""
    config = (folder / CONFIG).read_bytes()
    return hashlib.sha256(config + file_digest(folder / WEIGHTS).encode()).hexdigest()


def read_lora(folder: Path, who: str, instead: str) -> dict[str, LoraPair]:
    """The matrices of an adapter by the paths of its modules.

    Args:
        folder: The adapter's.
        who: Takes them, for messages.
        instead: What to do with an adapter that is more than such matrices.

    Raises:
        InvalidInputError: If it is no adapter of low rank, or more than that.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    base_of(folder)  # says what is wrong with a folder that holds none
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    asked = [name for name in _MORE if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or asked:
        why = f"{asked[0]} is set" if asked else f"it is of kind {config.get('peft_type')}"
        raise InvalidInputError(
            f"{who} adapters of low rank (LoRA) as they are, and of {folder} {why}; {instead}"
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise InvalidInputError(f"{folder} has no {WEIGHTS}; save the adapter with PEFT once more")
    found: dict[str, dict[str, Tensor]] = {}
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(f"{path} cannot be read ({error}); copy it again") from error
    for name, tensor in stored.items():
        module, _, which = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        found.setdefault(module, {})[which] = tensor
    pairs = {}
    for module, parts in found.items():
        if parts.keys() != {"lora_A", "lora_B"}:
            raise InvalidInputError(
                f"{folder} has more than matrices of low rank for {module} ({', '.join(parts)}); "
                f"{instead}"
            )
        down, up = parts["lora_A"], parts["lora_B"]
        matrices = down.dim() == up.dim() == 2 and len(down) == up.shape[-1] > 0
        if not matrices or not all(bool(one.isfinite().all()) for one in (down, up)):
            raise InvalidInputError(
                f"the matrices of {folder} for {module} are no finite ones of one rank; save the "
                "adapter with PEFT once more"
            )
        pairs[module] = LoraPair(down, up, _factor(config, module, down.shape[0]))
    if not pairs:
        raise InvalidInputError(f"{path} holds no matrices; save the adapter with PEFT once more")
    return pairs


def _factor(config: Mapping[str, Any], module: str, rank: int) -> float:
    """As PEFT has it, of whose patterns the first one that fits decides."""
    alphas: Mapping[str, Any] = config.get("alpha_pattern") or {}
    fitting = (key for key in alphas if re.match(rf"(.*\.)?({key})$", module))
    key = next(fitting, None)
    alpha = config.get("lora_alpha", _ALPHA) if key is None else alphas[key]
    try:
        return float(float(alpha) / (rank**0.5 if config.get("use_rslora") else rank))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"lora_alpha of an adapter is a number, not {alpha!r}") from error
