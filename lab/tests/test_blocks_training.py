"""What block adapters learn from, and the command: nothing leaks, and what was stopped goes on."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from squad_files import ARTICLES, PARAGRAPHS, WORDS, question_of, write_squad
from test_finetune_adapters import control_tokenizer
from zoo import build, byte_tokenizer

from kvcache_rag import InvalidInputError
from kvcache_rag.metrics import Answer
from kvcache_rag.prompt.template import FILE_NAME
from training.blocks import __main__ as command
from training.blocks import own
from training.blocks.data import (
    ANSWERS,
    DOCUMENTS,
    INSTRUCTIONS,
    REFUSAL,
    Likeness,
    Squad,
    is_apart,
    write,
)
from training.blocks.own import BATCH, Speaker, is_new, right, write_answers, write_instructions
from training.blocks.recipe import recipe
from training.smollm2 import instructions as measured

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEIGHTS = {
    question_of(word, article, paragraph): f"{article}x{paragraph}"
    for word in WORDS
    for article in range(ARTICLES)
    for paragraph in range(PARAGRAPHS)
}
CHAT = (
    "{% for m in messages %}<|chat|>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|chat|>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squad(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chat model on disk, with control tokens that its chat does not use."""
    folder = tmp_path_factory.mktemp("model")
    build("qwen2").save_pretrained(folder)
    tokenizer = control_tokenizer()
    tokenizer.add_tokens([f"<|more_{number}|>" for number in range(8)], special_tokens=True)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    (folder / FILE_NAME).write_text(json.dumps({"system": "Read.", "chunk_start": "\n"}))
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, written: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in written))


@pytest.fixture(scope="module")
def learned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is learned from."""
    out = tmp_path_factory.mktemp("learned")
    write(data, out)
    return out


def test_what_is_kept_apart_is_never_learned(data: Path, learned: Path) -> None:
    golds = set(Squad.read(data / "train").contexts)
    apart = {gold for gold in golds if is_apart(gold)}
    assert set() < apart < golds
    asked = {row["question"] for row in rows(learned / "apart.jsonl")}
    assert len(asked) == 3 * len(apart)
    for row in rows(learned / "learned.jsonl"):
        assert not any(question in row["question"] for question in asked)


def test_answers_stand_in_documents_of_which_only_one_holds_them(data: Path, learned: Path) -> None:
    squad = Squad.read(data / "train")
    kinds: Counter[str] = Counter()
    contexts: dict[str, list[str]] = {}
    places = set()
    for row in rows(learned / "learned.jsonl"):
        texts = {one["id"]: one["text"] for one in row["documents"]}
        names = list(texts)
        assert len(names) == len(row["documents"])
        context = row["id"].rpartition("-")[0]
        assert contexts.setdefault(context, names) == names
        given = squad.contexts.get(context, ())
        if not context.startswith("without-"):
            assert {*given} <= {*names}
            places.add(names.index(context))
        if row["answers"] == [REFUSAL]:
            kinds["refused"] += 1
            assert not any(HEIGHTS[row["question"]] in text for text in texts.values())
            continue
        kinds["both" if "; " in row["answers"][0] else "own"] += 1
        for part in row["answers"][0].split("; "):
            holding = {name for name, text in texts.items() if part in text}
            assert holding
            assert holding <= {*given}, "a document that was added holds an answer"
    assert min(kinds.values()) > 5
    assert len(kinds) == 3
    lengths = {len(names) for names in contexts.values()}
    assert {min(lengths), max(lengths)} == {*DOCUMENTS}
    assert places == {*range(max(DOCUMENTS))}, "the gold one has no place of its own"


def test_what_is_added_has_the_rare_words_of_the_questions() -> None:
    texts = {"a": "The keeper of Orrin", "b": "the keeper, the keeper", "c": "of and of", "d": ""}
    likeness = Likeness.of(texts)
    assert likeness.nearest("Who is the keeper of ORRIN?", 3) == ["a", "b", "c"]
    assert likeness.nearest("Nobody", 3) == []


def test_data_are_the_same_each_time_and_block_and_control_see_the_same(
    data: Path, learned: Path, tmp_path: Path
) -> None:
    write(data, tmp_path)
    for path in learned.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    block, control = (
        recipe("m", tmp_path, mask=mask, objective="answers") for mask in ("block", "full")
    )
    changed = {name for name, value in vars(block).items() if vars(control)[name] != value}
    assert changed == {"out", "block_share"}


def test_answers_in_the_models_words_take_the_place_of_short_ones(
    data: Path, tmp_path: Path
) -> None:
    squad = Squad.read(data / "train")
    gold = next(gold for gold in squad.contexts if not is_apart(gold))
    (first, answers), (second, _), _ = squad.asked[gold]
    said = f"The tower is {answers[0]} feet high."
    own_words = {first: said, second: None}
    written = [{"gold": gold, "question": q, "answer": a} for q, a in own_words.items()]
    write_rows(tmp_path / ANSWERS, written)
    write(data, tmp_path)
    found = {
        row["question"]: row["answers"]
        for row in rows(tmp_path / "learned.jsonl")
        if row["id"].startswith(f"{gold}-")
    }
    assert found[first] == [said, *answers]
    assert found[second] == [*answers]


def test_dialogues_come_beside_half_as_many_texts(data: Path, tmp_path: Path) -> None:
    dialogues = [{"question": f"Say {number}!", "answer": f"{number}."} for number in range(20)]
    refused = {"question": "Say nothing!", "answer": None}
    write_rows(tmp_path / INSTRUCTIONS, [*dialogues, dialogues[0], refused])
    write(data, tmp_path)
    plain = rows(tmp_path / "plain.jsonl")
    asked = [row["messages"][0]["content"] for row in plain if "messages" in row]
    assert asked == [row["question"] for row in dialogues]
    assert sum("text" in row for row in plain) == 10


@pytest.mark.parametrize(
    ("text", "reason", "kept"),
    [
        (" It is 8 feet. ", "stop", "It is 8 feet."),
        ("The Tower", "stop", "The Tower"),
        ("It is 18 feet.", "stop", None),
        ("I do not know.", "stop", None),
        ("It is 8 feet, and", "length", None),
        ("It is 8 feet. Yes! And", "length", "It is 8 feet. Yes!"),
        ("It is not 9. But 8", "length", None),
        ("", "stop", None),
    ],
)
def test_an_answer_is_kept_if_its_whole_sentences_are_right(
    text: str, reason: Any, kept: str | None
) -> None:
    assert right(Answer(text, None, finish_reason=reason), ("8", "the", "tower")) == kept  # type: ignore[arg-type]  # not looked at


def test_the_model_is_asked_over_the_gold_paragraph_and_a_stopped_step_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squad = Squad.read(data / "train")
    seen = []
    real = own.Engine.generate_batch

    def generate(self: Any, questions: Any, **options: Any) -> Any:
        seen.extend((question, chunks, str(options["policy"])) for question, chunks in questions)
        return real(self, questions, **options)

    monkeypatch.setattr(own.Engine, "generate_batch", generate)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    write_answers("tiny", squad, whole, 2 * BATCH, "cpu")
    for question, chunks, policy in seen:
        assert policy == "BestFew(count=1)"
        assert HEIGHTS[question] in chunks[0]
        assert len(chunks) == 1
    written = rows(whole / ANSWERS)
    assert len({row["question"] for row in written}) == 2 * BATCH
    assert not any(is_apart(row["gold"]) for row in written)
    write_answers("tiny", squad, stopped, BATCH, "cpu")
    with (stopped / ANSWERS).open("a") as file:
        file.write(json.dumps(written[BATCH]) + '\n{"gold": "A')  # as a crash leaves it
    write_answers("tiny", squad, stopped, 2 * BATCH, "cpu")
    assert (stopped / ANSWERS).read_bytes() == (whole / ANSWERS).read_bytes()
    seen.clear()
    write_answers("tiny", squad, stopped, 2 * BATCH, "cpu")
    assert seen == [], "asked again"


def test_none_of_the_measured_instructions_is_new() -> None:
    for instruction in measured.INSTRUCTIONS:
        assert not is_new(instruction)
        assert not is_new(f"Please: {instruction.upper()} Thank you.")
    assert not is_new("The sky is blue")
    assert not is_new("Hello!")
    assert is_new("Write a function that sorts words by their length.")


def test_dialogues_are_new_and_a_stopped_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Invented:
        """Writes turns by torch's random numbers; every other one was measured with."""

        def turns(self) -> list[str | None]:
            known, drawn = (torch.randint(100, (BATCH // 2,)).tolist() for _ in range(2))
            invented = [f"Tell me about number {number}." for number in drawn]
            return [*invented, *(measured.INSTRUCTIONS[index] for index in known[1:]), None]

        def replies(self, turns: Sequence[str]) -> list[str | None]:
            return [None if "7" in turn else turn.upper() for turn in turns]

    monkeypatch.setattr(Speaker, "load", lambda _model, _device: Invented())
    kept = write_instructions("m", tmp_path / "whole", 3 * BATCH, "cpu")
    written = rows(tmp_path / "whole" / INSTRUCTIONS)
    answered = [row for row in written if row["answer"]]
    assert len(written) == 3 * BATCH
    assert 0 < len(answered) == kept
    assert all(row["question"].startswith("Tell me about") for row in answered)
    for count in (BATCH, 3 * BATCH):
        torch.manual_seed(99)
        write_instructions("m", tmp_path / "stopped", count, "cpu")
    assert rows(tmp_path / "stopped" / INSTRUCTIONS) == written


def test_a_model_speaks_in_both_roles(model: Path) -> None:
    speaker = Speaker.load(str(model), "cpu")
    turns = speaker.turns()
    assert len(turns) == BATCH
    assert None in turns, "a random model seldom ends"
    assert len(speaker.replies(["ab", "a longer one"])) == 2
    with pytest.raises(InvalidInputError, match="no chat template"):
        Speaker(build("qwen2"), byte_tokenizer())


def test_the_command_trains_goes_on_and_compares(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("training.blocks.recipe.HOLDOUT", 1)
    out, travelling = tmp_path / "blocks", tmp_path / "travelling"
    words = [str(model), "--data", str(data), "--out", str(out), "--device", "cpu"]
    options = ["--steps", "1", "--checkpoint", str(travelling)]
    assert command.main([*words, *options]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["lora_modules"] == "attention"
    assert (out / "block-attention-0" / "adapter_model.safetensors").is_file()
    with pytest.raises(SystemExit):
        command.main([*words, *options])
    assert "exists; remove it" in capsys.readouterr().err
    assert command.main([*words, "--steps", "1", "--mask", "full", "--objective", "answers"]) == 0
    assert (out / "full-attention-0").is_dir()
    capsys.readouterr()
    monkeypatch.setattr(command, "COMPARED_STEPS", 1)
    told = []
    for _ in range(2):  # the second time from what is there
        assert command.main([*words, "--compare"]) == 0
        told.append(capsys.readouterr().out.splitlines())
    assert [line.split(":")[0] for line in told[0]] == ["attention", "all-linear", "packet"]
    assert told[0] == told[1], "trained again"
