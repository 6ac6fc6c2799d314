"""Prompts of models that others trained, against what is public of them: words, ids, names."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
from laws import QUESTION, TEXTS, TOLERANCE, error, masked_logits
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, Message, PromptTemplate, Reuse
from kvcache_rag.models.adapters import TRAINING, note_training, trained_for_blocks
from kvcache_rag.policies.default import UNTRAINED
from kvcache_rag.prompt.known_templates import TEMPLATES, template_for_model
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.settings import LocalSettings

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = TEMPLATES["block-attention"]
TITLED = ["Dulek Skeskes\nHe is the mayor of Grabra.", "Grabra\nIts postal code is 59392."]
ASKED = "Who is the mayor?"
# Of Llama 3: ids of its control tokens and of what stands in these prompts beside words.
CONTROL = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eot_id|>": 128009,
}
PIECES = {"user": 882, "assistant": 78191, "ĊĊ": 271, ">Ċ": 397}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
USER, ASSISTANT = (27, 91, 882, 91, 397), (27, 91, 78191, 91, 397)


@lru_cache(maxsize=1)
def llama3() -> PreTrainedTokenizerFast:
    """Reads as Llama 3 does, but for words, which it reads byte by byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [*map(chr, visible), *(chr(256 + index) for index in range(len(hidden)))]
    vocabulary = {letter: index for index, letter in enumerate(letters)} | PIECES | CONTROL
    backend = Tokenizer(models.BPE(vocabulary, [(">", "Ċ"), ("Ċ", "Ċ")], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*CONTROL])
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 128000)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )


def renderer() -> PromptRenderer:
    return PromptRenderer(BLOCK, llama3())


def text(ids: tuple[int, ...]) -> str:
    return str(llama3().decode(list(ids)))


# ---------------------------------------------------------------------- Block-Attention
def test_a_prompt_is_written_as_block_attention_wrote_those_that_it_trained_on() -> None:
    found = renderer().tokenize(ASKED, TITLED, [])
    blocks = [
        "<|user|>\nYou are an intelligent AI assistant. Please answer questions based on the "
        "user's instructions. Below are some reference documents that may help you in answering "
        "the user's question.\n\n",
        "- Title: Dulek Skeskes\nHe is the mayor of Grabra.\n",
        "- Title: Grabra\nIts postal code is 59392.\n",
        "\n\nPlease write a high-quality answer for the given question using only the provided "
        "search documents (some of which might be irrelevant).\nQuestion: Who is the mayor?\n"
        "<|assistant|>\n",
    ]
    assert [text(found.prefix), *map(text, found.chunks), text(found.query)] == blocks
    apart = [llama3().encode(block, add_special_tokens=False) for block in blocks]
    assert list(found.all) == [id_ for ids in apart for id_ in ids]


def test_its_ids_are_those_of_llama_3() -> None:
    found = renderer().tokenize(ASKED, TITLED, [])
    assert found.prefix[:5] == USER
    assert found.query[0] == PIECES["ĊĊ"]
    assert found.query[-5:] == ASSISTANT
    # No control token at all: its roles are words, and no beginning of a text was trained.
    assert max(found.all) < min(CONTROL.values())
    with_bos = llama3()("")["input_ids"]
    assert with_bos == [CONTROL["<|begin_of_text|>"]]


def test_an_earlier_answer_ends_as_it_was_trained_to() -> None:
    turns = [Message("user", "Where?"), Message("assistant", "In Grabra.")]
    query = renderer().query_ids(ASKED, turns)
    spoken = text(query)
    assert spoken.startswith("\nWhere?\n<|assistant|>\nIn Grabra.<|end_of_text|>\n<|user|>\n")
    assert query.count(CONTROL["<|end_of_text|>"]) == 1
    assert renderer().prefix_ids == renderer().tokenize("", [], turns).prefix


def test_a_tokenizers_own_chat_template_is_not_asked() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=llama3().backend_tokenizer, eos_token="<|end_of_text|>"
    )
    tokenizer.chat_template = "{{ strftime_now('%d') }}{{ messages[0]['content'] }}"
    assert PromptRenderer(BLOCK, tokenizer).tokenize("a", ["b"], []) == renderer().tokenize(
        "a", ["b"], []
    )


def test_an_answer_ends_before_a_further_document() -> None:
    assert BLOCK.markers == ("\n- Title:",)


# ---------------------------------------------------------------------- how it is chosen
@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("ldsjmdy/Tulu3-Block-FT", True),
        ("hxia7/Llama-3.2-1B-block-FT", True),
        ("models/Tulu3-Block-FT", True),
        ("hub/models--ldsjmdy--Tulu3-Block-FT/snapshots/0123abcd", True),
        ("ldsjmdy/Tulu3-RAG", False),
        ("ldsjmdy/Tulu3-Block-FT/other", False),
        ("Tulu3-Block-FT.gguf", False),
        ("", False),
    ],
)
def test_a_model_is_known_by_its_name(name: str, is_known: bool) -> None:
    assert template_for_model(name) == (BLOCK if is_known else None)
    model = build("llama")
    del model.config.__dict__[TRAINING]
    model.config._name_or_path = name
    assert trained_for_blocks(model) is is_known
    note_training(model.config, blocks=True)
    assert trained_for_blocks(model)


def folder(place: Path) -> Path:
    model = build("llama")
    note_training(model.config, blocks=False)
    model.save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def test_a_known_model_brings_its_template_and_its_policy(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(folder(tmp_path / "Tulu3-Block-FT"))
    assert (engine.template, engine.policy) == (BLOCK, Reuse())
    assert error(engine.logits(QUESTION, TEXTS), masked_logits(engine, TEXTS, "reordered")) < (
        TOLERANCE
    )
    (tmp_path / "Tulu3-Block-FT" / "prompt_template.json").write_text('{"system": "Read.\\n"}')
    engine = Engine.from_pretrained(tmp_path / "Tulu3-Block-FT")
    assert engine.template == PromptTemplate(system="Read.\n")


def test_any_model_takes_it_by_its_name(tmp_path: Path) -> None:
    place = folder(tmp_path / "other")
    engine = LocalSettings(model=place, template="block-attention").open()
    assert (engine.template, engine.policy) == (BLOCK, UNTRAINED)
    with pytest.raises(InvalidInputError, match=r"prompt_template\.json in .*block-attention"):
        LocalSettings(model=place, template=tmp_path / "block-attention")
