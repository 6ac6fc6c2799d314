"""The model of a GGUF file with an adapter merged into it, kept for the next time.

Merging, and importing PEFT, took a fifth of the time in which `ask` answered by SmolLM2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.models.adapters import compare_base, note_training, trains_blocks
from kvcache_rag.models.gguf import GgufHeader, kept_model, torch_dtype
from kvcache_rag.models.kept import file_digest, keep, kept_folder, read_kept, version_of

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
        folder: By the content of both as it was when this was made, and by the version of PEFT.
    """

    file: Path
    adapter: Path
    dtype: torch.dtype
    folder: Path

    @classmethod
    def of(cls, file: Path, adapter: Path, dtype: torch.dtype | str) -> Self | None:
        """None for an adapter that is none.

        Raises:
            InvalidInputError: If the file cannot be read.
        """
        own = GgufHeader.read(file).dtype
        target = own if dtype == "auto" else torch_dtype(dtype)
        if not adapter.is_dir():
            return None
        return cls(file, adapter, target, _place(file, adapter, target))

    def load(self, name: str) -> Any | None:
        """The model on the CPU; None if not kept, or not as it was.

        Args:
            name: What the user wrote, for messages.
        """
        model = read_kept(self.folder, lambda folder: kept_model(folder, self.dtype, {}))
        if model is None:
            return None
        model.config._name_or_path = str(self.file)
        compare_base(model, self.adapter, name)
        note_training(model.config, blocks=trains_blocks(self.adapter))
        return model

    def keep(self, model: Any) -> None:
        """Keep a model, if it could be merged, and was so on the CPU, of what is still there.

        Args:
            model: As `merged` gave it.
        """
        is_merged = not hasattr(model, "merge_and_unload") and model.device.type == "cpu"
        if is_merged and _place(self.file, self.adapter, self.dtype) == self.folder:
            nbytes = GgufHeader.read(self.file).memory(self.dtype)
            keep(self.folder, lambda folder: model.save_pretrained(str(folder)), nbytes)


def _place(file: Path, adapter: Path, dtype: torch.dtype) -> Path:
    parts = [file_digest(file), str(dtype), version_of("peft")]
    for path in sorted(adapter.iterdir()):
        if path.is_file():
            parts += [path.name, file_digest(path)]
    return kept_folder(parts, "merged")
