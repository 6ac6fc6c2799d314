"""Small tokenizers of every usual kind, trained on the spot, and one that gives no offsets."""

from __future__ import annotations

import copy
import json
import re
from functools import lru_cache, partial
from typing import Any

from small import make_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SAMPLES = [
    "The mayor of Grabra is Dulek Skeskes; its postal code is 59392.",
    "Dakrim has a staff of 2246 people, 17 offices and 5663623 customers in 2012.",
    "Grün, Straße, naïve café: 12 °C; 3 mal 4. Ünïcödé 東京 は 日本 の 首都 です。 Привет, мир!",
    "line one\nline two\n\n\tindented   spaces",
] * 4


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def _trained(model: Any, trainer: Any, **parts: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return _fast(tokenizer)


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
    words = sorted(re.findall(r"\w+", text))
    pieces = dict.fromkeys(["<unk>", *letters, *(f"##{letter}" for letter in letters), *words])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _fast(tokenizer)


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


CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def _controlled(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """With added tokens of every kind and a chat template that writes some of them."""
    tokenizer = copy.deepcopy(tokenizer)
    special = [
        AddedToken("<|im_start|>", special=True, normalized=False),
        AddedToken("<|im_end|>", special=True, normalized=False),
        AddedToken("[SEP]", special=True, normalized=True, lstrip=True),
        AddedToken("<mask>", special=True, normalized=False, lstrip=True, rstrip=True),
        AddedToken("</s>", special=True, normalized=False, rstrip=True),
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(
        [
            AddedToken("<tool>", normalized=True),
            AddedToken("<doc>", normalized=False),
            AddedToken("sep", single_word=True, normalized=False),
            AddedToken("\n\n", normalized=False),
        ]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    """Pieces with scores, as T5 and ALBERT; control tokens are pieces with the best score."""
    letters = sorted(set("".join(SAMPLES)) | set("<>|[]/_"))
    words = sorted({word for text in SAMPLES for word in text.split()})
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<|im_end|>", 0.0), ("\u2581", -2.0)]
    pieces += [(letter, -6.0) for letter in letters if not letter.isspace()]
    pieces += [(f"\u2581{word}", -4.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _fast(tokenizer)


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2: a mark for each space, written by the normaliser, and bytes."""
    tokenizer = metaspace()
    config = json.loads(tokenizer.backend_tokenizer.to_str())
    config["added_tokens"] = config["added_tokens"][:1]  # bytes are no added tokens there
    config["pre_tokenizer"] = None
    backend = Tokenizer.from_str(json.dumps(config))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return _fast(backend)


def whole_words() -> PreTrainedTokenizerFast:
    """Takes what it has as a whole, before any merges, as Llama 3."""
    tokenizer = byte_level()
    config = json.loads(tokenizer.backend_tokenizer.to_str())
    config["model"]["ignore_merges"] = True
    config["pre_tokenizer"]["use_regex"] = False
    return _fast(Tokenizer.from_str(json.dumps(config)))


def spaced_pieces() -> PreTrainedTokenizerFast:
    """Pieces of words that only spaces part, so that a control token could be one."""
    tokenizer = copy.deepcopy(word_pieces())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


CONTROLLED = {
    name: lru_cache(maxsize=1)(partial(lambda make: _controlled(make()), make))
    for name, make in {
        **TOKENIZERS,
        "unigram": unigram,
        "sentencepiece": sentencepiece,
        "whole words": whole_words,
        "spaced pieces": spaced_pieces,
    }.items()
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
