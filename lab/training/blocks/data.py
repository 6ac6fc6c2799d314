"""What an adapter learns to read from: SQuAD's training half, with questions of our own making.

`DATA/train` holds `squad_train_corpus.jsonl` and `squad_train_questions.jsonl` (SQuAD v1.1,
CC BY-SA 4.0; five paragraphs a question, all questions of a paragraph have the same five).  Each
context gets further paragraphs, 5 to 10 in all, of which none holds an answer, in an order of its
own.  They are those most like the questions, as a retriever's are: from some drawn at random an
adapter learned nothing that helps there.  Behind a paragraph's own questions follow

- up to `OTHERS` questions that others of its five paragraphs answer,
- two questions at once, of two paragraphs: "A B", answered "a; b",
- for every second one, a question whose paragraph is not there: `REFUSAL`.

One context in `WITHOUT_GOLD` is there a second time without the paragraph of its questions, all of
which are then refused.  One context in `APART`, by hash, is kept apart: recipe and stopping are
chosen on it alone.  A question that the model answered right itself (`own`) is answered in its
words, the others are as short as SQuAD has them; where there are such answers, only contexts of
paragraphs that the model was right about are learned.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.prompt.words import normalised

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

REFUSAL: Final = "I do not know."

APART: Final = 20  # 5 %

WITHOUT_GOLD: Final = 12

OTHERS: Final = 16

DOCUMENTS: Final = (5, 10)
"""Of a context, at least and at most."""

NEAREST: Final = 100
"""Paragraphs that are looked at, of which some hold an answer."""

ANSWERS: Final = "answers.jsonl"
INSTRUCTIONS: Final = "instructions.jsonl"
"""Files of what the model itself said (`own`)."""

LONGEST: Final = 2000  # characters of a plain text

Row = dict[str, Any]
Asked = tuple[str, tuple[str, ...]]  # a question and its answers
Own = dict[tuple[str, str], tuple[str]]
"""The answer of the model itself by paragraph and question."""


@dataclass(frozen=True)
class Squad:
    """SQuAD's training half as `DATA/train` has it.

    Attributes:
        texts: Of paragraphs, by id.
        articles: Title of each paragraph's article.
        asked: Questions of each paragraph, `(question, answers)`.
        contexts: The five paragraphs, in prompt order, of each paragraph that is asked about.
    """

    texts: Mapping[str, str]
    articles: Mapping[str, str]
    asked: Mapping[str, Sequence[Asked]]
    contexts: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, folder: Path) -> Squad:
        """Read both files of `folder`.

        Raises:
            OSError: If one is not there.
        """
        corpus = list(_lines(folder / "squad_train_corpus.jsonl"))
        asked: dict[str, list[Asked]] = {}
        contexts: dict[str, tuple[str, ...]] = {}
        for row in _lines(folder / "squad_train_questions.jsonl"):
            gold = row["gold"]
            asked.setdefault(gold, []).append((row["question"], tuple(row["answers"])))
            contexts[gold] = tuple(row["documents"])
        return cls(
            {row["id"]: row["text"] for row in corpus},
            {row["id"]: row["title"] for row in corpus},
            asked,
            contexts,
        )


def is_apart(gold: str) -> bool:
    """Whether a paragraph's context is kept out of training."""
    return int(hashlib.sha256(gold.encode()).hexdigest(), 16) % APART == 0


def golds_of(squad: Squad) -> list[str]:
    """Paragraphs whose questions are trained on."""
    return [gold for gold in squad.contexts if not is_apart(gold)]


def learned(squad: Squad, own: Own) -> Iterator[Row]:
    """Rows to train on; rows of one context have the same documents."""
    golds = golds_of(squad)
    likeness = Likeness.of({gold: squad.texts[gold] for gold in golds})
    own_golds = {gold for gold, _ in own}
    for number, gold in enumerate(one for one in golds if not own or one in own_golds):
        rng = random.Random(f"blocks/{gold}")  # a draw of data, not a secret
        mine = squad.asked[gold]
        others = [
            place
            for place in squad.contexts[gold]
            if place != gold and place in squad.asked and not is_apart(place)
        ]
        asked = [_in_own_words(own, gold, each) for each in mine]
        if others:
            further = [
                _in_own_words(own, place, each) for place in others for each in squad.asked[place]
            ]
            asked += rng.sample(further, min(OTHERS, len(further)))
            asked.append(_both(rng.choice(mine), rng.choice(squad.asked[rng.choice(others)])))
        answers = [one for _, each in asked for part in each for one in part.split("; ")]
        likely = likeness.nearest(" ".join(question for question, _ in asked), NEAREST)
        documents = _longer(squad, squad.contexts[gold], answers, likely, rng)
        if number % 2 == 1:
            asked.append((_foreign(squad, documents, golds, rng), (REFUSAL,)))
        yield from _rows(squad, documents, asked, gold)
        if number % WITHOUT_GOLD == 0:
            swapped = _without(squad, gold, documents, golds, rng)
            yield from _rows(squad, swapped, [(question, (REFUSAL,)) for question, _ in mine], "")


@dataclass(frozen=True)
class Likeness:
    """Which texts have the rare words of another one.

    Attributes:
        holding: Names of the texts that hold a word.
        count: How many texts there are.
    """

    holding: Mapping[str, Sequence[str]]
    count: int

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Likeness:
        """Of texts by their names."""
        holding: dict[str, list[str]] = {}
        for name, text in texts.items():
            for word in sorted({*normalised(text).split()}):
                holding.setdefault(word, []).append(name)
        return cls(holding, len(texts))

    def nearest(self, text: str, count: int) -> list[str]:
        """The names of so many texts, the likest first: by the rareness of words in common."""
        scores: dict[str, float] = {}
        for word in sorted({*normalised(text).split()}):
            names = self.holding.get(word, ())
            for name in names:
                scores[name] = scores.get(name, 0.0) + math.log(self.count / len(names))
        return heapq.nsmallest(count, scores, key=lambda name: (-scores[name], name))


def _in_own_words(own: Own, gold: str, asked: Asked) -> Asked:
    text, answers = asked
    return text, (*own.get((gold, text), ()), *answers)


def _longer(
    squad: Squad,
    documents: Sequence[str],
    answers: Sequence[str],
    likely: Sequence[str],
    rng: random.Random,
) -> tuple[str, ...]:
    """The documents and the likeliest that hold none of the answers, in an order of their own."""
    wanted, found = rng.randint(*DOCUMENTS), [*documents]
    for place in likely:
        if len(found) >= wanted:
            break
        if place not in found and not _says(squad, [place], answers):
            found.append(place)
    rng.shuffle(found)
    return tuple(found)


def apart(squad: Squad) -> Iterator[Row]:
    """Rows kept apart: SQuAD's own questions, as the evaluation sets have them."""
    for gold, documents in squad.contexts.items():
        if is_apart(gold):
            yield from _rows(squad, documents, squad.asked[gold], gold)


def _rows(
    squad: Squad,
    documents: Sequence[str],
    asked: Iterable[Asked],
    gold: str,
) -> Iterator[Row]:
    shown = [
        {"id": place, "text": squad.texts[place], "relevant": place == gold} for place in documents
    ]
    for number, (question, answers) in enumerate(asked):
        name = f"{gold or 'without-' + documents[0]}-{number}"
        yield {"id": name, "question": question, "answers": list(answers), "documents": shown}


def _both(one: Asked, other: Asked) -> Asked:
    return f"{one[0]} {other[0]}", (f"{one[1][0]}; {other[1][0]}",)


def _foreign(
    squad: Squad, documents: Sequence[str], golds: Sequence[str], rng: random.Random
) -> str:
    """A question of another article that none of the documents answers."""
    near = {squad.articles[place] for place in documents}
    while True:
        gold = rng.choice(golds)
        question, answers = rng.choice(squad.asked[gold])
        if squad.articles[gold] not in near and not _says(squad, documents, answers):
            return question


def _without(
    squad: Squad, gold: str, documents: Sequence[str], golds: Sequence[str], rng: random.Random
) -> tuple[str, ...]:
    """The context with another paragraph, that has no answer, where the gold one was."""
    answers = [answer for _, each in squad.asked[gold] for answer in each]
    while True:
        other = rng.choice(golds)
        if other not in documents and not _says(squad, [other], answers):
            return tuple(other if place == gold else place for place in documents)


def _says(squad: Squad, documents: Sequence[str], answers: Sequence[str]) -> bool:
    texts = [squad.texts[place].lower() for place in documents]
    return any(answer.lower() in text for answer in answers for text in texts)


def write(data: Path, out: Path) -> dict[str, int]:
    """Write `learned.jsonl`, `apart.jsonl` and `plain.jsonl`; the number of rows of each.

    What the model itself said is read from `out`, as far as it is there (`own`).

    Raises:
        OSError: If the data are not there.
    """
    squad = Squad.read(data / "train")
    out.mkdir(parents=True, exist_ok=True)
    said = {
        (row["gold"], row["question"]): (row["answer"],)
        for row in lines(out / ANSWERS)
        if row["answer"]
    }
    dialogues = {
        row["question"]: row["answer"] for row in lines(out / INSTRUCTIONS) if row["answer"]
    }
    kinds = {
        "learned": learned(squad, said),
        "apart": apart(squad),
        "plain": _plain(squad, dialogues),
    }
    counts = {}
    for name, rows in kinds.items():
        written = [json.dumps(row, ensure_ascii=False) for row in rows]
        (out / f"{name}.jsonl").write_text("\n".join(written) + "\n", encoding="utf-8")
        counts[name] = len(written)
    return counts


def _plain(squad: Squad, dialogues: Mapping[str, str]) -> Iterator[Row]:
    """What is read under ordinary attention, so that the model keeps what it can do.

    Texts, and with dialogues half as many texts as those.
    """
    texts = [squad.texts[gold] for gold in golds_of(squad)] + [*_docstrings()]
    random.Random("blocks/plain").shuffle(texts)
    for text in texts[: max(2, len(dialogues) // 2)] if dialogues else texts:
        yield {"text": text}
    for question, answer in dialogues.items():
        turns = (("user", question), ("assistant", answer))
        yield {"messages": [{"role": role, "content": text} for role, text in turns]}


def _docstrings() -> Iterator[str]:
    """Documentation of numpy's and torch's functions (BSD)."""
    import numpy
    import torch

    for module in (numpy, torch, torch.nn, torch.optim):
        for name in sorted(vars(module)):
            known = vars(module)[name]
            text = getattr(known, "__doc__", None)
            # Not the builtins that numpy gives again: those are measured with.
            own = str(getattr(known, "__module__", "")).startswith(("numpy", "torch"))
            if own and isinstance(text, str) and len(text) >= 400:
                yield text[:LONGEST]


def lines(path: Path) -> Iterator[Row]:
    """Rows of a file that may not be there yet."""
    if path.exists():
        yield from _lines(path)


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
