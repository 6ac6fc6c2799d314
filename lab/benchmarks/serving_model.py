"""The model, the tokenizer and the documents of `benchmarks.serving`.

Random weights in a shape of our own: small enough for one thread of a CPU, and with so many tokens
of documents before a question that prefilling them takes most of an answer, as it does on a GPU
with a model of its size.  They cost what trained weights cost and say nothing about answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from benchmarks.locality_retrieval import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCABULARY: Final = 4096
LEAST: Final = 1200  # characters of a document that is joined from paragraphs
_SYLLABLES: Final = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2 model.

    Attributes:
        hidden: Width.
        inner: Width of the feed-forward layers.
        layers: How many.
        heads: Of queries, 64 wide.
        kv_heads: Of keys and values.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


MAIN: Final = Shape(512, 1792, 4, 8, 2)
TINY: Final = Shape(128, 256, 1, 2, 1)  # of `--quick`


def save_model(shape: Shape, documents: Sequence[str], folder: Path) -> PreTrainedTokenizerFast:
    """Write a model and a tokenizer trained on the documents, as `from_pretrained` reads them.

    There is no end-of-sequence token: every answer is as long as it may be.

    Returns:
        The tokenizer.
    """
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = train_tokenizer(documents)
    tokenizer.save_pretrained(folder)
    return tokenizer


def train_tokenizer(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte pairs, as many as the vocabulary holds, of which every text is made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def generated(count: int, characters: int = LEAST, seed: int = 0) -> list[str]:
    """Documents of words that mean nothing, common ones and rare ones as in a language."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 5, 3000)
    lexicon = ["".join(generator.choice(_SYLLABLES, size)) for size in sizes.tolist()]
    weights = 1 / np.arange(1, len(lexicon) + 1)
    documents = []
    for _ in range(count):
        picks = generator.choice(len(lexicon), characters // 2, p=weights / weights.sum())
        words = " ".join(lexicon[pick] for pick in picks)
        documents.append(words[: words.index(" ", characters)] + ".")
    return documents


def joined(file: Path, characters: int = LEAST) -> list[str]:
    """Documents of at least so many characters: consecutive paragraphs of one title, joined.

    Raises:
        ValueError: If the file cannot be read (see `read_rows`), or holds no document that long.
    """
    documents: list[str] = []
    held: list[str] = []
    title = ""
    for row in read_rows(file, ("text",)):
        if row.get("title", "") != title:
            held, title = [], row.get("title", "")
        held.append(row["text"])
        if sum(map(len, held)) >= characters:
            documents.append("\n".join(held))
            held = []
    if not documents:
        raise ValueError(f"{file} holds no {characters} characters under one title")
    return documents
