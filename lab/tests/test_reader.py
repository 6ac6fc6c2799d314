"""The packaged reader: what its corpus holds, and that it reads it, and names of any spelling."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_rag import Engine, FullRecompute, Reuse
from kvcache_rag_lab.reader import KINDS, REFUSAL, collection, examples, model_path

INSTRUCTION: Final = "Answer the question from the documents."
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


# ------------------------------------------------------------------------------- the corpus
@pytest.mark.parametrize("kind", KINDS)
def test_answers_stand_in_the_documents_that_are_named(kind: str) -> None:
    held = examples(kind)
    assert len({example.documents for example in held}) == len(held) == 18
    for example in held:
        assert len(example.documents) == 6
        assert example.questions
        for question in example.questions:
            assert question.kind == kind
            named = [example.documents[place] for place in question.documents]
            if kind == "unanswerable":
                assert (question.answer, named) == (REFUSAL, [])
            else:
                words = re.findall(r"\w+", question.answer)
                assert set(words) <= set(re.findall(r"\w+", " ".join(named)))
                assert (";" in question.answer) == (kind == "two_hop")
                assert ("," in question.answer) == (kind == "multi_value")


def test_a_question_of_the_collection_has_one_document() -> None:
    known = collection()
    assert len(set(known.documents)) == len(known.documents) == 40
    assert len({question.text for question in known.questions}) == len(known.questions) == 120
    for question in known.questions:
        (place,) = question.documents
        assert question.answer in known.documents[place]


def test_the_corpus_is_read_without_torch() -> None:
    code = (
        "import sys\n"
        "import kvcache_rag\n"
        "loaded = 'torch' in sys.modules\n"
        "from kvcache_rag_lab.reader import collection\n"
        "assert collection().questions\n"
        "assert ('torch' in sys.modules) == loaded, 'the reader imports torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -------------------------------------------------------------------------------- the model
@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def test_pieces_encode_like_the_whole(tokenizer: Any) -> None:
    texts = [*collection().documents, *(question.text for question in collection().questions)]
    pieces = ["<bos>" + INSTRUCTION, *(f"<doc>{text}" for text in texts), "<q>Who?<a>"]
    apart = [i for piece in pieces for i in ids_of(tokenizer, piece)]
    assert ids_of(tokenizer, "".join(pieces)) == apart
    assert tokenizer.unk_token_id not in apart
    plain = ids_of(tokenizer, "<doc>Velora was born in Lispan. It rains.")
    assert ids_of(tokenizer, "<doc> Velora  was born\nin Lispan.\n\tIt rains. \n") == plain


def test_chat_template(tokenizer: Any) -> None:
    def render(*messages: tuple[str, str], prompt: bool = True) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt
        )
        return text

    system = ("system", INSTRUCTION)
    assert render(system, ("user", "Q?")) == f"<bos>{INSTRUCTION}<q>Q?<a>"
    assert render(("user", "Q?")) == "<bos><q>Q?<a>"
    turns = render(system, ("user", "Q?"), ("assistant", "A"), ("user", "R?"), prompt=False)
    assert turns == f"<bos>{INSTRUCTION}<q>Q?<a>A<eos><q>R?"


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


@pytest.mark.parametrize("together", [1, 12])
def test_hand_written_names_are_answered(tokenizer: Any, model: Any, together: int) -> None:
    said = []
    for start in range(0, 12, together):
        statements, questions, _ = map(
            list, zip(*HAND_WRITTEN[start : start + together], strict=True)
        )
        documents = [" ".join(statements[place : place + 2]) for place in range(0, together, 2)]
        said += answers(tokenizer, model, documents, questions)
    assert sum(map(str.__eq__, said, (fact[2] for fact in HAND_WRITTEN))) >= 10, said
    if together == 12:
        refused = answers(tokenizer, model, documents, list(NEVER_SAID))
        assert refused.count(REFUSAL) >= 2, refused


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_one_to_eight_documents_are_read(count: int) -> None:
    engine, known = Engine.from_pretrained("tiny"), collection()
    asked = []
    for question in known.questions[:24]:
        (place,) = question.documents
        others = [text for number, text in enumerate(known.documents) if number != place]
        asked.append((question.text, [*others[: count // 2], known.documents[place]]))
        asked[-1][1].extend(others[count // 2 : count - 1])
    for policy in (FullRecompute(), Reuse()):
        said = engine.generate_batch(asked, policy=policy, max_new_tokens=24)
        right = [known.questions[number].answer == one.text for number, one in enumerate(said)]
        assert sum(right) >= 20, [one.text for one in said]
