"""Wide names are kept apart from training, and the packaged reader copies names of any spelling."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_rag_lab.reader import make_corpus, make_example, model_path
from kvcache_rag_lab.reader.generator import READING
from kvcache_rag_lab.reader.language import INSTRUCTION, vocabulary
from kvcache_rag_lab.reader.names import is_for_training, names, piece_names, wide_names
from training.reader.check import check, load_reader
from training.reader.data import training_batch
from training.reader.scoring import prefix_ids
from training.reader.tokenizer import UNKNOWN, WordEncoder

HAND_WRITTEN: Final = (
    ("Drenko was founded by Moira Grell.", "Who founded Drenko?", "Moira Grell"),
    ("Velora Tamuk was born in Lispan.", "Where was Velora Tamuk born?", "Lispan"),
    ("Isabel Ortega lives in Zagreb.", "Where does Isabel Ortega live?", "Zagreb"),
    ("The teacher of Bob is Quentin O'Neil.", "Who taught Bob?", "Quentin O'Neil"),
    ("The Mobrit is made by Fennwick.", "Which company makes the Mobrit?", "Fennwick"),
    ("The Zephyr costs 412 euros.", "How much does the Zephyr cost?", "412"),
    ("Ulm has a mayor called Greta Kowalski.", "Who is the mayor of Ulm?", "Greta Kowalski"),
    ("New Elvin lies on the river Drava.", "On which river does New Elvin lie?", "Drava"),
    ("Globex is based in New York.", "Where is Globex based?", "New York"),
    ("Acme Corp is led by Jun-ho Park.", "Who leads Acme Corp?", "Jun-ho Park"),
    ("Priya Raman works for Siemens.", "Which company employs Priya Raman?", "Siemens"),
    ("Uppsala has the postal code 75310.", "What is the postal code of Uppsala?", "75310"),
)
NEVER_SAID: Final = ("Who leads Drenko?", "Where was Bob born?", "Who founded Quillon?")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> WordEncoder:
    return WordEncoder(tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


@lru_cache
def words_of(pool: tuple[str, ...]) -> set[str]:
    return {word.lower() for name in pool for word in name.split()}


def training_words(encoder: WordEncoder) -> set[str]:
    wide = wide_names(training=True) + piece_names(encoder.pieces())
    return words_of(wide) | words_of(names("train"))


@torch.inference_mode()
def answers(tokenizer: Any, model: Any, documents: list[str], questions: list[str]) -> list[str]:
    context = f"<bos>{INSTRUCTION}" + "".join(f"<doc>{text}" for text in documents)
    said = []
    for question in questions:
        prompt = tokenizer(
            f"{context}<q>{question}<a>", add_special_tokens=False, return_tensors="pt"
        )
        ids, mask = prompt.input_ids, prompt.attention_mask
        output = model.generate(ids, attention_mask=mask, max_new_tokens=24)
        said.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return said


def test_measured_names_share_no_word_with_training(encoder: WordEncoder) -> None:
    training = training_words(encoder)
    assert not words_of(wide_names(training=False)) & training
    assert not words_of(names("held_out")) & training
    assert not (training | words_of(wide_names(training=False))) & vocabulary()
    assert all(is_for_training(word) for word in words_of(piece_names(encoder.pieces())))
    assert is_for_training("O'Neil") == is_for_training("oneil")


def test_wide_names_are_always_the_same() -> None:
    code = (
        "from kvcache_rag_lab.reader import make_example\n"
        "from kvcache_rag_lab.reader.names import wide_names\n"
        "print(wide_names(training=True)[:50], wide_names(training=False)[-50:])\n"
        "print(make_example(4, names='wide'))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    pools = wide_names(training=True)[:50], wide_names(training=False)[-50:]
    assert there.stdout == f"{pools[0]} {pools[1]}\n{make_example(4, names='wide')}\n"
    assert make_example(4, names="wide") != make_example(5, names="wide")
    corpus = make_corpus(4, documents=9, questions=6, names="wide")
    assert (len(corpus.documents), len(corpus.questions)) == (9, 6)


def test_wide_names_survive_the_tokenizer(tokenizer: Any, encoder: WordEncoder) -> None:
    for name in wide_names(training=False)[:3000]:
        ids = encoder.encode(name)
        assert tokenizer.decode(ids) == name
        assert UNKNOWN not in ids


def test_training_spells_names_with_every_piece(encoder: WordEncoder, tokenizer: Any) -> None:
    pools = names("train") + wide_names(training=True) + piece_names(encoder.pieces())
    seen = {index for name in pools for index in encoder.encode(name)}
    known = tokenizer.get_vocab()
    ids = {piece: known[piece.replace(" ", "\u2581")] for piece in encoder.pieces()}
    # A name rarely begins in lower case, and then not with every word of the language.
    unseen = [piece for piece, index in ids.items() if index not in seen]
    assert all(piece[0] == " " and piece.strip().islower() for piece in unseen)
    assert len(unseen) < len(ids) / 10


def test_wide_training_batches_hold_small_contexts_too(encoder: WordEncoder) -> None:
    prefix = prefix_ids(encoder)

    def rows(index: int) -> int:
        return len(
            training_batch(
                str(index), READING, (6, 4), encoder, prefix, questions=2, block=False, wide=True
            ).ids
        )

    assert 32 in {rows(index) for index in range(12)}


def test_hand_written_names_are_answered(tokenizer: Any, model: Any, encoder: WordEncoder) -> None:
    statements, questions, wanted = map(list, zip(*HAND_WRITTEN, strict=True))
    spelled = {word.strip(".?").lower() for text in statements for word in text.split()}
    assert not (spelled - vocabulary()) & training_words(encoder)
    documents = [" ".join(statements[start : start + 2]) for start in range(0, 12, 2)]
    said = answers(tokenizer, model, documents, questions)
    assert sum(map(str.__eq__, said, wanted)) >= 10, said
    refused = answers(tokenizer, model, documents, list(NEVER_SAID))
    assert refused.count("not found") >= 2, refused


def test_one_hand_written_document_is_enough(tokenizer: Any, model: Any) -> None:
    said = [
        answers(tokenizer, model, [statement], [question])[0]
        for statement, question, _ in HAND_WRITTEN
    ]
    assert sum(map(str.__eq__, said, (fact[2] for fact in HAND_WRITTEN))) >= 10, said


@pytest.mark.parametrize("documents", range(1, 9))
def test_one_to_eight_documents_are_read(documents: int) -> None:
    network, encoder = load_reader(model_path())
    report = check(
        network,
        encoder,
        questions=24,
        seed=5,
        documents=documents,
        facts=2,
        kinds=("single", "unanswerable"),
        names="wide",
    )
    for shares in report.values():
        for share in shares.values():
            assert share.trials >= 24
    for kind in ("single", "unanswerable"):
        assert all(share.successes / share.trials >= 0.8 for share in report[kind].values()), report
