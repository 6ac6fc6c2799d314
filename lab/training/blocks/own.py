"""What the untrained model itself says, to be learned beside SQuAD's short answers.

Its answers to questions of SQuAD over the paragraph alone, which is exact (`BestFew(1)`), where
they are right; and plain dialogues: behind the chat template's beginning of a user's turn the model
writes that turn itself (Magpie, arXiv 2406.08464), and then answers it.  Rows are written in whole
batches, each with a seed of its own, so a stopped step goes on and gives the same.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.engine import Engine
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.adapters import NO_ADAPTER
from kvcache_rag.models.pretrained import load
from kvcache_rag.policies import BestFew
from kvcache_rag.progress import progress_bar
from kvcache_rag.prompt.words import normalised
from training.blocks.data import ANSWERS, INSTRUCTIONS, Squad, golds_of, lines
from training.smollm2 import instructions as measured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvcache_rag.metrics import Answer
    from training.blocks.data import Row

BATCH: Final = 16
ANSWER_TOKENS: Final = 48
TURN_TOKENS: Final = 64
REPLY_TOKENS: Final = 320
TOP_P: Final = 0.9
SHORTEST: Final = 3  # words of a user's turn

_MARK: Final = "@@kvcache-rag-turn@@"

_SENTENCES: Final = re.compile(r".*[.!?](?=\s|$)", re.DOTALL)

_MEASURED: Final = tuple(map(normalised, measured.INSTRUCTIONS))


def write_answers(model: str, squad: Squad, out: Path, count: int, device: str | None) -> int:
    """Ask the model about `count` paragraphs' questions, drawn by seed; how many answers are kept.

    Args:
        model: As the engine takes it.
        squad: Where questions are from.
        out: Folder of the data.
        count: How many are asked, at most all; rounded up to whole batches.
        device: As the engine takes it.
    """
    golds = golds_of(squad)
    random.Random("blocks/own").shuffle(golds)
    # Those of a paragraph one behind the other: it is prefilled once.
    asked = [(gold, question, answers) for gold in golds for question, answers in squad.asked[gold]]
    engine = cache(partial(Engine.from_pretrained, model, device=device, adapter=NO_ADAPTER))

    def ask(number: int) -> list[Row]:
        some = asked[number * BATCH : (number + 1) * BATCH]
        given = engine().generate_batch(
            [(question, [squad.texts[gold]]) for gold, question, _ in some],
            policy=BestFew(1),
            max_new_tokens=ANSWER_TOKENS,
        )
        return [
            {"gold": gold, "question": question, "answer": right(answer, answers)}
            for (gold, question, answers), answer in zip(some, given, strict=True)
        ]

    return _in_batches(out / ANSWERS, min(count, len(asked)), ask)


def right(answer: Answer, answers: Sequence[str]) -> str | None:
    """The text of an answer that contains a right one, as far as its sentences are whole."""
    text = answer.text.strip()
    if answer.finish_reason == "length":
        whole = _SENTENCES.match(text)
        text = whole.group() if whole else ""
    wanted = [known for one in answers if (known := normalised(one))]
    # Whole words: "8" is a part of other numbers.
    is_right = any(f" {one} " in f" {normalised(text)} " for one in wanted)
    return text if is_right else None


def write_instructions(model: str, out: Path, count: int, device: str | None) -> int:
    """Let the model write `count` dialogues; how many are kept.

    Args:
        model: As the engine takes it.
        out: Folder of the data.
        count: How many turns are drawn; rounded up to whole batches.
        device: As the engine takes it.

    Raises:
        InvalidInputError: If its tokenizer has no chat template.
    """
    speaker = cache(partial(Speaker.load, model, device))

    def draw(number: int) -> list[Row]:
        torch.manual_seed(number)
        turns = speaker().turns()
        kept = [turn for turn in turns if turn is not None and is_new(turn)]
        replies = dict(zip(kept, speaker().replies(kept), strict=True))
        return [{"question": turn, "answer": replies.get(turn or "")} for turn in turns]

    return _in_batches(out / INSTRUCTIONS, count, draw)


def is_new(turn: str) -> bool:
    """Whether a turn is some words long and none of the instructions that are measured with."""
    said = normalised(turn)
    return len(said.split()) >= SHORTEST and not any(
        f" {known} " in f" {said} " or f" {said} " in f" {known} " for known in _MEASURED
    )


class Speaker:
    """A chat model in both roles."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Bind a model and its tokenizer.

        Raises:
            InvalidInputError: If it has no chat template.
        """
        if not tokenizer.chat_template:
            raise InvalidInputError(
                "the tokenizer has no chat template, so the model cannot write a user's turn; "
                "leave out --instructions"
            )
        self._model, self._tokenizer = model.eval(), tokenizer

    @classmethod
    def load(cls, name: str, device: str | None) -> Speaker:
        """By name."""
        model, tokenizer, _ = load(name, dtype="auto", device=device, options={})
        return cls(model, tokenizer)

    def turns(self) -> list[str | None]:
        """A batch of user's turns; None for one that does not end."""
        opened = self._written(_MARK, add_generation_prompt=False).partition(_MARK)[0]
        options = {"do_sample": True, "temperature": 1.0, "top_p": TOP_P, "top_k": 0}
        return self._continued([opened] * BATCH, max_new_tokens=TURN_TOKENS, **options)

    def replies(self, turns: Sequence[str]) -> list[str | None]:
        """The greedy answer to each turn; None for one that does not end."""
        prompts = [self._written(turn, add_generation_prompt=True) for turn in turns]
        return self._continued(prompts, max_new_tokens=REPLY_TOKENS, do_sample=False)

    def _written(self, turn: str, **options: Any) -> str:
        said = [{"role": "user", "content": turn}]
        text: str = self._tokenizer.apply_chat_template(said, tokenize=False, **options)
        return text

    def _continued(self, prompts: Sequence[str], **options: Any) -> list[str | None]:
        if not prompts:
            return []
        tokenizer, end = self._tokenizer, self._tokenizer.eos_token_id
        given = tokenizer(
            [*prompts],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self._model.device)
        with torch.inference_mode():
            rows = self._model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                eos_token_id=end,
                pad_token_id=end,
                **options,
            )[:, given["input_ids"].shape[1] :].tolist()
        return [
            tokenizer.decode(row[: row.index(end)], skip_special_tokens=True).strip() or None
            if end in row
            else None
            for row in rows
        ]


def _in_batches(path: Path, count: int, make: Callable[[int], list[Row]]) -> int:
    """Append the batches of rows that are not there yet; how many rows have an answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _whole(path)
    wanted = -(-count // BATCH)
    with (
        path.open("a", encoding="utf-8") as file,
        progress_bar(wanted, path.stem, "batch", show=True) as bar,
    ):
        bar.update(min(done, wanted))
        for number in range(done, wanted):
            batch = [json.dumps(row, ensure_ascii=False) for row in make(number)]
            file.write("\n".join(batch) + "\n")
            file.flush()
            bar.update(1)
    return sum(1 for row in lines(path) if row["answer"])


def _whole(path: Path) -> int:
    """How many batches are there; what a crash left of another one is cut off."""
    if not path.exists():
        return 0
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    # The last batch of all questions may be a short one; it is made again.
    done = len(whole) // BATCH
    path.write_text("".join(f"{line}\n" for line in whole[: done * BATCH]), encoding="utf-8")
    return done
