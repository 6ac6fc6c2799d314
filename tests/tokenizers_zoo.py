"""Small tokenizers of every usual kind, trained on the spot, and one that gives no offsets."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from small import make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAMPLES = [
    "The mayor of Grabra is Dulek Skeskes; its postal code is 59392.",
    "Dakrim has a staff of 2246 people, 17 offices and 5663623 customers in 2012.",
    "Grün, Straße, naïve café: 12 °C; 3 mal 4. Ünïcödé 東京 は 日本 の 首都 です。 Привет, мир!",
    "line one\nline two\n\n\tindented   spaces",
] * 4


def _trained(model: Any, trainer: Any, **parts: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@lru_cache(maxsize=1)
def byte_level() -> PreTrainedTokenizerFast:
    """Pairs of bytes, as in GPT-2, Llama 3 and Qwen."""
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(
        models.BPE(),
        trainer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )


@lru_cache(maxsize=1)
def metaspace() -> PreTrainedTokenizerFast:
    """Pieces with a mark for the space in front, and single bytes, as sentencepiece."""
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    return _trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainer,
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )


@lru_cache(maxsize=1)
def word_pieces() -> PreTrainedTokenizerFast:
    """Lower-case pieces of words, without spaces and accents, as BERT."""
    # Not trained: its trainer breaks ties by chance.
    text = " ".join(SAMPLES[:2]).lower()
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789.,;:?"))
    pieces = [*letters, *(f"##{letter}" for letter in letters), *sorted(re.findall(r"\w+", text))]
    tokenizer = Tokenizer(
        models.WordPiece(
            {"<unk>": 0, **{piece: i + 1 for i, piece in enumerate(dict.fromkeys(pieces))}},
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@lru_cache(maxsize=1)
def characters() -> PreTrainedTokenizerFast:
    """One token per character; knows ASCII only."""
    return make_tokenizer()


TOKENIZERS = {
    "byte level": byte_level,
    "metaspace": metaspace,
    "word pieces": word_pieces,
    "characters": characters,
}


class WithoutOffsets:
    """A tokenizer that only encodes and decodes, as those written in Python do."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.unk_token = inner.unk_token

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._inner(text, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        text: str = self._inner.decode(ids, **options)
        return text


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
