"""What a run needs to go on, bit for bit: weights, optimiser, random states, place in the data."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Work:
    """The folder of an unfinished run."""

    folder: Path

    @property
    def log(self) -> Path:
        """JSON lines, one per step."""
        return self.folder / "training_log.jsonl"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def open(self, settings: dict[str, Any]) -> bool:
        """Make the folder, or take up the run in it; True if there is a checkpoint.

        Raises:
            InvalidInputError: If it belongs to a run with other settings or data.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name in settings if known.get(name) != settings[name]]
            if other:
                raise InvalidInputError(
                    f"{self.folder} holds an unfinished run with another {', '.join(other)}; "
                    "go on with its settings, remove the folder, or choose another output"
                )
        else:
            self._replace(path, json.dumps(settings, indent=2).encode())
        return self._checkpoint.exists()

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; a crash leaves the old one or the new one."""
        partial = self._checkpoint.with_suffix(".partial")
        torch.save({**state, "random": _random_states()}, partial)
        _sync(partial)
        os.replace(partial, self._checkpoint)

    def load(self) -> dict[str, Any]:
        """The newest checkpoint; puts the random states back.

        Raises:
            InvalidInputError: If the file is damaged.
        """
        try:
            state: dict[str, Any] = torch.load(
                self._checkpoint, map_location="cpu", weights_only=True
            )
        except Exception as error:  # torch raises what it likes for a damaged file
            raise InvalidInputError(
                f"{self._checkpoint} is damaged; remove {self.folder} to begin anew"
            ) from error
        _restore(state.pop("random"))
        return state

    def cut_log(self, step: int) -> None:
        """Forget the lines of steps behind the checkpoint: they will be run again."""
        if not self.log.exists():
            return
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [one for one in lines if one.endswith("\n") and json.loads(one)["step"] <= step]
        self._replace(self.log, "".join(kept).encode())

    def remove(self) -> None:
        """Remove the folder of a finished run."""
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def _replace(self, path: Path, content: bytes) -> None:
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        os.replace(partial, path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
