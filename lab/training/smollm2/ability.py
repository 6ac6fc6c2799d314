"""What fine-tuning for stitching costs elsewhere: perplexity and divergence from the base.

    python -m training.smollm2.ability --data DATA --adapter FOLDER --out FILE

Perplexity with ordinary attention on docstrings of Python's standard library and on paragraphs of
`squad_corpus`, in pieces of `PIECE` tokens; and the mean divergence of the base's next-token
distribution from the adapter's, over the base's own answers to `INSTRUCTIONS` (as chat, greedy).
Nothing here was trained on.  Asked for: perplexities at most 3 % higher.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from benchmarks.common import commit, described
from kvcache_rag.models.adapters import with_adapter
from kvcache_rag.models.pretrained import load
from training.smollm2.instructions import INSTRUCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

PIECE: Final = 512
PIECES: Final = 60  # of each kind: about 30,000 tokens
ANSWER_TOKENS: Final = 32
MOST: Final = 1.03

MODULES: Final = (
    *("argparse", "asyncio", "calendar", "collections", "csv", "datetime", "decimal", "difflib"),
    *("email", "fractions", "functools", "heapq", "html", "http.client", "imaplib", "inspect"),
    *("itertools", "json", "logging", "mailbox", "os", "pathlib", "pickle", "random", "re"),
    *("shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile", "tempfile"),
    *("textwrap", "threading", "turtle", "typing", "unittest", "urllib.request", "zipfile"),
)


def docstrings() -> Iterator[str]:
    """Of the standard library's public classes and functions, longest first in each module."""
    for name in MODULES:
        module = importlib.import_module(name)
        texts = {
            text
            for key, value in vars(module).items()
            if not key.startswith("_")
            and isinstance(text := getattr(value, "__doc__", None), str)
            and len(text) > 200
        }
        yield from sorted(texts, key=lambda text: (-len(text), text))


def paragraphs(data: Path) -> Iterator[str]:
    """Of SQuAD's development half, every fourteenth.

    Raises:
        OSError: If the data are missing.
    """
    with (data / "squad_corpus.jsonl").open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number % 14 == 0:
                yield json.loads(line)["text"]


def pieces(texts: Iterable[str], tokenizer: Any) -> list[Tensor]:
    """At most `PIECES` rows of `PIECE` ids, texts one after the other."""
    ids: list[int] = []
    found: list[Tensor] = []
    for text in texts:
        ids += tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"]
        while len(ids) >= PIECE and len(found) < PIECES:
            found.append(torch.tensor(ids[:PIECE]))
            ids = ids[PIECE:]
        if len(found) == PIECES:
            break
    return found


@torch.no_grad()
def losses(model: Any, rows: Sequence[Tensor]) -> list[float]:
    """Mean cross-entropy of each row, in nats a token."""
    found = []
    for ids in rows:
        logits = model(ids[None]).logits[0, :-1].float()
        found.append(float(functional.cross_entropy(logits, ids[1:])))
    return found


@torch.no_grad()
def divergence(base: Any, tuned: Callable[[], Any], tokenizer: Any) -> list[float]:
    """Nats a token of each of the base's answers, by instruction."""
    asked = []
    for instruction in INSTRUCTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": instruction}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = base.generate(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
        )[0]
        expected = base(whole[None]).logits[0, len(ids) - 1 : -1].double().log_softmax(-1)
        asked.append((whole, len(ids), expected))
    other = tuned()
    found = []
    for whole, start, expected in asked:
        given = other(whole[None]).logits[0, start - 1 : -1].double().log_softmax(-1)
        found.append(float((expected.exp() * (expected - given)).sum(-1).mean()))
    return found


def measure(data: Path, adapter: Path) -> dict[str, Any]:
    """Everything, base first.

    Raises:
        OSError: If the data are missing.
        InvalidInputError: If the model or its adapter cannot be loaded.
    """
    base, tokenizer, _ = load("smollm2", dtype=torch.float32, device="cpu", options={})
    kinds = {
        "docstrings": pieces(docstrings(), tokenizer),
        "squad_corpus": pieces(paragraphs(data), tokenizer),
    }
    before = {name: losses(base, rows) for name, rows in kinds.items()}
    tuned: list[Any] = []

    def adapted() -> Any:
        tuned.append(with_adapter(base, adapter, "smollm2").eval())
        return tuned[0]

    nats = divergence(base, adapted, tokenizer)
    found: dict[str, Any] = {"divergence": {"mean": sum(nats) / len(nats), "n": len(nats)}}
    for name, rows in kinds.items():
        after = losses(tuned[0], rows)
        change = [late - early for late, early in zip(after, before[name], strict=True)]
        mean = sum(change) / len(change)
        found[name] = {
            "pieces": len(rows),
            "perplexity before": math.exp(sum(before[name]) / len(rows)),
            "perplexity after": math.exp(sum(after) / len(rows)),
            "ratio": math.exp(mean),
            "holds": math.exp(mean) <= MOST,
        }
    return found


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = {**described("cpu", arguments.threads), "commit": commit()}
    found = {**about, **measure(arguments.data, arguments.adapter)}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
