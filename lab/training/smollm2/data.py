"""What SmolLM2 learns to read from: SQuAD's training half, with questions of our own making.

    python -m training.smollm2.data --data DATA --out build/smollm2/data

`DATA/train` holds `squad_train_corpus.jsonl` and `squad_train_questions.jsonl` (SQuAD v1.1,
CC BY-SA 4.0; five paragraphs a question, all questions of a paragraph have the same five).  Behind
a paragraph's own questions each context gets

- one question that another of its five paragraphs answers,
- for every second one, two questions at once, of two paragraphs: "A; B",
- for every second one, a question whose paragraph is not there: `REFUSAL`,

and one context in `WITHOUT_GOLD` is there a second time without the paragraph of its questions, all
of which are then refused.  One context in `APART`, by hash, is kept apart: recipe and stopping are
chosen on it alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

REFUSAL: Final = "I do not know."

APART: Final = 20  # 5 %

WITHOUT_GOLD: Final = 12

Row = dict[str, Any]


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
    asked: Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]
    contexts: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, folder: Path) -> Squad:
        """Read both files of `folder`.

        Raises:
            OSError: If one is not there.
        """
        corpus = list(_lines(folder / "squad_train_corpus.jsonl"))
        asked: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
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


def learned(squad: Squad) -> Iterator[Row]:
    """Rows to train on; rows of one context have the same documents."""
    golds = [gold for gold in squad.contexts if not is_apart(gold)]
    for number, gold in enumerate(golds):
        rng = random.Random(f"smollm2/{gold}")  # a draw of data, not a secret
        documents = squad.contexts[gold]
        own = squad.asked[gold]
        others = [
            place
            for place in documents
            if place != gold and place in squad.asked and not is_apart(place)
        ]
        asked = list(own)
        if others:
            asked.append(rng.choice(squad.asked[rng.choice(others)]))
        if others and number % 2 == 0:
            asked.append(_both(rng.choice(own), rng.choice(squad.asked[rng.choice(others)])))
        if number % 2 == 1:
            asked.append((_foreign(squad, documents, golds, rng), (REFUSAL,)))
        yield from _rows(squad, documents, asked, gold)
        if number % WITHOUT_GOLD == 0:
            swapped = _without(squad, gold, golds, rng)
            yield from _rows(squad, swapped, [(question, (REFUSAL,)) for question, _ in own], "")


def apart(squad: Squad) -> Iterator[Row]:
    """Rows kept apart: SQuAD's own questions, as the evaluation sets have them."""
    for gold, documents in squad.contexts.items():
        if is_apart(gold):
            yield from _rows(squad, documents, squad.asked[gold], gold)


def _rows(
    squad: Squad,
    documents: Sequence[str],
    asked: Iterable[tuple[str, tuple[str, ...]]],
    gold: str,
) -> Iterator[Row]:
    shown = [
        {"id": place, "text": squad.texts[place], "relevant": place == gold} for place in documents
    ]
    for number, (question, answers) in enumerate(asked):
        name = f"{gold or 'without-' + documents[0]}-{number}"
        yield {"id": name, "question": question, "answers": list(answers), "documents": shown}


def _both(
    one: tuple[str, tuple[str, ...]], other: tuple[str, tuple[str, ...]]
) -> tuple[str, tuple[str, ...]]:
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


def _without(squad: Squad, gold: str, golds: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    """The context with another paragraph, that has no answer, where the gold one was."""
    answers = [answer for _, each in squad.asked[gold] for answer in each]
    documents = squad.contexts[gold]
    while True:
        other = rng.choice(golds)
        if other not in documents and not _says(squad, [other], answers):
            return tuple(other if place == gold else place for place in documents)


def _says(squad: Squad, documents: Sequence[str], answers: Sequence[str]) -> bool:
    texts = [squad.texts[place].lower() for place in documents]
    return any(answer.lower() in text for answer in answers for text in texts)


def write(data: Path, out: Path) -> dict[str, int]:
    """Write `learned.jsonl`, `apart.jsonl` and `plain.jsonl`; the number of rows of each.

    Raises:
        OSError: If the data are not there.
    """
    squad = Squad.read(data / "train")
    out.mkdir(parents=True, exist_ok=True)
    kinds = {"learned": learned(squad), "apart": apart(squad), "plain": _plain(squad)}
    counts = {}
    for name, rows in kinds.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[name] = len(lines)
    return counts


def _plain(squad: Squad) -> Iterator[Row]:
    """Texts under ordinary attention, so that the model keeps what it can do."""
    for gold, documents in squad.contexts.items():
        if not is_apart(gold):
            yield {"text": "\n\n".join(squad.texts[place] for place in documents)}
    yield from _docstrings()


def _docstrings() -> Iterator[Row]:
    """Documentation of numpy's and torch's functions (BSD), in pieces of about as many tokens."""
    import numpy
    import torch

    gathered: list[str] = []
    size = 0
    for module in (numpy, torch, torch.nn, torch.optim):
        for name in sorted(vars(module)):
            known = vars(module)[name]
            text = getattr(known, "__doc__", None)
            # Not the builtins that numpy gives again: those are measured with.
            own = str(getattr(known, "__module__", "")).startswith(("numpy", "torch"))
            if not own or not isinstance(text, str) or len(text) < 400:
                continue
            gathered.append(text)
            size += len(text)
            if size > 3600:
                yield {"text": "\n\n".join(gathered)[:6000]}
                gathered, size = [], 0


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def main() -> int:
    """Write the files and say how many rows they have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train/")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sys.stdout.write(f"{write(arguments.data, arguments.out)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
