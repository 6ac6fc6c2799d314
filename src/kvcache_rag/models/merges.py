"""The model of a GGUF file with an adapter merged into it, kept for the next time.

Merging, and importing PEFT, took a fifth of the time in which `ask` answered by SmolLM2.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvcache_rag.models.adapters import compare_base, note_training, trains_blocks
from kvcache_rag.models.gguf import GgufHeader, torch_dtype
from kvcache_rag.models.kept import cache_folder, file_digest, has_room, keep, load_kept

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from typing_extensions import Self


@dataclass(frozen=True)
class KeptMerge:
    """Where a file's weights with an adapter's are kept.

    Attributes:
        file: The GGUF file.
        adapter: The adapter's folder.
        dtype: Of the weights.
    """

    file: Path
    adapter: Path
    dtype: torch.dtype

    @classmethod
    def of(cls, file: Path, adapter: Path, dtype: torch.dtype | str) -> Self | None:
        """None for an adapter that is none."""
        target = GgufHeader.read(file).dtype if dtype == "auto" else torch_dtype(dtype)
        return cls(file, adapter, target) if adapter.is_dir() else None

    @property
    def folder(self) -> Path:
        """By the content of both, and by the version of PEFT that merges them."""
        try:
            peft = version("peft")
        except PackageNotFoundError:
            peft = ""
        parts = [file_digest(self.file), str(self.dtype), peft]
        for path in sorted(self.adapter.iterdir()):
            if path.is_file():
                parts += [path.name, file_digest(path)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return cache_folder() / f"{digest[:32]}-merged"

    def load(self, name: str) -> tuple[Any, Any] | None:
        """Model on the CPU and the file's tokenizer; None if not kept, or not as it was.

        Args:
            name: What the user wrote, for messages.
        """
        folder = self.folder
        loaded = load_kept(folder, self.dtype, {}, own_tokenizer=True) if folder.is_dir() else None
        if loaded is None:
            return None
        model, tokenizer = loaded
        model.config._name_or_path = str(self.file)
        compare_base(model, self.adapter, name)
        note_training(model.config, blocks=trains_blocks(self.adapter))
        return model, tokenizer

    def keep(self, model: Any, tokenizer: Any) -> None:
        """Keep a model and the file's tokenizer, if it could be merged, and was so on the CPU.

        Args:
            model: As `merged` gave it.
            tokenizer: The file's own.
        """
        is_merged = not hasattr(model, "merge_and_unload") and model.device.type == "cpu"
        if not is_merged or not has_room(GgufHeader.read(self.file).memory(self.dtype)):
            return

        def write(folder: Path) -> None:
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))

        keep(self.folder, write)
