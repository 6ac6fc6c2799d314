"""A reader of the project's own: a tiny model that answers from documents, and its language.

The packaged model has under a million parameters and reads controlled English only, but it
really reads: names and numbers are new in every example, so an answer can come from the documents
alone. That makes it a test bench for reuse policies that needs no download and no GPU. Importing
this package does not import torch.

- `make_example`, `make_corpus`: documents, questions, exact answers; a function of their seed.
- `model_path`: the packaged model, for `AutoModelForCausalLM.from_pretrained`.
- `python -m training.reader.train`: train it again.
- `python -m training.reader.check`: measure it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvcache_rag_lab.reader.contexts import ReaderQuestion
from kvcache_rag_lab.reader.generator import KINDS, ReaderExample, make_corpus, make_example

__all__ = ["KINDS", "ReaderExample", "ReaderQuestion", "make_corpus", "make_example", "model_path"]


def model_path() -> Path:
    """Return the directory of the packaged model.

    Raises:
        FileNotFoundError: If the package was installed without its data.
    """
    path = Path(str(files("kvcache_rag") / "reader" / "model"))
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"the reader's model is missing: {path} has no config.json")
    return path
