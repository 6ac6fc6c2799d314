"""The reader's tokenizer: byte-pair encoding that never looks beyond one word.

Text is cut into words, single digits and single punctuation marks before the merges, so that the
ids of a text are the ids of its words put together, whatever stands around them. Runs of white
space count as one space and leading or trailing ones as none.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvcache_rag_lab.reader.language import sentences
from kvcache_rag_lab.reader.names import invent_name

if TYPE_CHECKING:
    from collections.abc import Iterator


SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>", "<doc>", "<q>", "<a>", "<unk>")

PAD, BOS, EOS, DOC, QUESTION, ANSWER, UNKNOWN = range(7)

VOCABULARY_SIZE: Final = 1024

MAX_LENGTH: Final = 4096

_SPACE: Final = "\u2581"

_NAMES: Final = 60_000

_REPEAT: Final = 400

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message['role'] != 'system' -%}{{- '<bos>' -}}{%- endif -%}"
    "{%- if message['role'] == 'system' -%}{{- '<bos>' + message['content'] -}}"
    "{%- elif message['role'] == 'user' -%}{{- '<q>' + message['content'] -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<a>' + message['content'] + '<eos>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<a>' -}}{%- endif -%}"
)


@lru_cache(maxsize=2)
def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the language and on invented names; trained once per process.

    Every printable ASCII character has a token; any other becomes `<unk>`.
    """
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.normalizer = normalizers.Sequence(
        [
            normalizers.Strip(),
            normalizers.Replace(Regex(r"\s+"), _SPACE),
            normalizers.Prepend(_SPACE),
        ]
    )
    words = rf"{_SPACE}?[A-Za-z]+|{_SPACE}?[0-9]|{_SPACE}?[^A-Za-z0-9{_SPACE}]|{_SPACE}"
    core.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=[chr(code) for code in range(33, 127)] + [_SPACE],
        show_progress=False,
    )
    core.train_from_iterator(_training_lines(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<doc>", "<q>", "<a>"],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


class WordEncoder:
    """Encodes text word by word with a cache: the ids of the tokenizer, many times faster.

    Texts must not hold special tokens; put their ids between the pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._core: Tokenizer = tokenizer.backend_tokenizer
        self._ids: dict[str, list[int]] = {}

    def pieces(self) -> tuple[str, ...]:
        """Return the tokens made of letters; a leading space marks one that begins a word."""
        texts = (text.replace(_SPACE, " ") for text in sorted(self._core.get_vocab()))
        return tuple(text for text in texts if text.strip().isalpha())

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, equal to the tokenizer's."""
        ids: list[int] = []
        for word in text.split():
            known = self._ids.get(word)
            if known is None:
                known = self._core.encode(word, add_special_tokens=False).ids
                self._ids[word] = known
            ids += known
        return ids


def _training_lines(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    fixed = [text.replace("{s}", "").replace("{v}", "") for text in sentences()]
    for _ in range(_REPEAT):
        yield from fixed
        yield "0 1 2 3 4 5 6 7 8 9 ; , : ."
    for _ in range(_NAMES):
        yield invent_name(rng)
