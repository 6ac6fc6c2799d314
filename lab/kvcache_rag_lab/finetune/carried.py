"""A portable checkpoint: an adapter of a few megabytes, from which another machine continues.

The optimiser's moments stay behind: they are four times what is learned, and a short warm-up makes
them anew.  The folder is an adapter that engines load, as far as it was trained.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.adapters import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag_lab.finetune.learner import Learner

_KEY: Final = "training"


@dataclass(frozen=True)
class Carried:
    """What a travelling checkpoint holds.

    Attributes:
        weights: Of the adapter by PEFT's names, bfloat16.
        progress: Steps, place in the data and measures, as plain values.
        log: JSON lines of the steps.
    """

    weights: dict[str, Tensor]
    progress: dict[str, Any]
    log: str

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.progress["step"])


@dataclass(frozen=True)
class CarriedFolder:
    """Where travelling checkpoints of one run are written and found.

    Attributes:
        folder: Is made when there is something to write.
        settings: Which have to be equal on both machines.
    """

    folder: Path
    settings: Mapping[str, Any]

    @property
    def _log(self) -> Path:
        return self.folder / "training_log.jsonl"

    def save(self, learner: Learner, progress: Mapping[str, Any], log: str) -> None:
        """Replace the checkpoint; a crash leaves the old weights with their step, or the new."""
        self.folder.mkdir(parents=True, exist_ok=True)
        learner.describe_adapter(self.folder)
        partial = self.folder / f"{WEIGHTS}.partial"
        said = json.dumps({"settings": dict(self.settings), **progress})
        weights = {name: value.contiguous() for name, value in learner.adapter_weights().items()}
        save_file(weights, partial, metadata={"format": "pt", _KEY: said})
        self._log.write_text(log, encoding="utf-8")
        os.replace(partial, self.folder / WEIGHTS)

    def load(self) -> Carried | None:
        """The checkpoint; None if there is none.

        Raises:
            InvalidInputError: If it is damaged, or of a run with other settings or data.
        """
        path = self.folder / WEIGHTS
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
                progress = dict(json.loads(file.metadata()[_KEY]))
            log = self._log.read_text(encoding="utf-8") if self._log.exists() else ""
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(
                f"{path} is no checkpoint that can be read; copy it again, or name another folder"
            ) from error
        known = progress.pop("settings", {})
        other = sorted(
            name for name in {*known, *self.settings} if known.get(name) != self.settings.get(name)
        )
        if other:
            raise InvalidInputError(
                f"{self.folder} holds a checkpoint of a run with another {', '.join(other)}; go on "
                "with its settings and data, or name another folder"
            )
        return Carried(weights, progress, log)
