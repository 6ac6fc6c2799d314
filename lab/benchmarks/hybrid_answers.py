"""What a policy costs a model with recurrent layers in right answers, on facts of our own.

    python -m benchmarks.hybrid_answers --work answers.work

No trained weights of such models are at hand, so tiny ones are trained here as public weights are:
on whole prompts, every token behind all before it.  What they then answer over stored chunks says
what a policy does to a model that learned to read; how much a public one loses it does not say.

A document has two to four facts, `entity value .`, between other words.  Kinds of questions:

- first, last: the fact stands once, in the first or the last of four documents;
- updated: it stands in two documents, and the later one counts;
- across: a document ends with `see entity`, and the next one says `it value .`: at its beginning,
  or, with `--anywhere`, in models trained so, behind as many words as stand before other facts.

`BestLast` is told which document answers, or a wrong one.  The report is written model by model.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.common import described, read, result_file, write
from kvcache_rag import (
    BestLast,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.prompt.renderer import PromptRenderer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvcache_rag.policies import ReusePolicy

DOCUMENTS: Final = 4
KINDS: Final = ("first", "last", "updated", "across")
ENTITIES: Final = [f"e{number}" for number in range(32)]
VALUES: Final = [f"v{number}" for number in range(32)]
OTHERS: Final = [f"o{number}" for number in range(24)]
GAP: Final = (3, 12)  # other words before a fact

ATTENDS: Final = 2  # of four layers the third, so that a recurrent one stands behind it
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gated delta (qwen3_5)": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "Mamba2 (bamba)": (
        "bamba",
        {
            "attn_layer_indices": [ATTENDS],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
    "short convolution (lfm2)": (
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "Mamba2, no attention (mamba2)": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 1, "chunk_size": 32},
    ),
}
_COMMON: Final = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TEMPLATE: Final = PromptTemplate(
    system="read these documents now ",
    chunk_start="document ",
    chunk_end="",
    question="? {question}",
)

STAGES: Final = (1, 2, DOCUMENTS)  # documents of a prompt, in the order of learning
KNOWN: Final = 0.95  # of the answers of a stage, before the next one begins
ROWS: Final = 16
ASKED: Final = 16  # questions behind the documents of a row
RATE: Final = 3e-3


# --------------------------------------------------------------------------------------- the facts
@dataclass(frozen=True)
class Fact:
    """What a prompt says of an entity in the end.

    Attributes:
        entity: Is the question.
        value: Is the answer.
        kind: One of `KINDS`, or "" for a fact between the first and the last document.
        document: The one that answers.
    """

    entity: str
    value: str
    kind: str
    document: int


def draw(
    rng: random.Random, documents: int, *, anywhere: bool = False
) -> tuple[list[str], list[Fact]]:
    """Documents, and what holds behind them."""
    known: dict[str, Fact] = {}
    texts, pending = [], ""  # an entity that the next document calls "it"
    for document in range(documents):
        words, own = [], set[str]()
        if pending:
            value = rng.choice(VALUES)
            known[pending] = Fact(pending, value, "across", document)
            words += rng.choices(OTHERS, k=rng.randint(*GAP)) if anywhere else []
            words += ["it", value, "."]
            own.add(pending)
        for _ in range(rng.randint(2, 4) - len(own)):
            told = sorted(known.keys() - own)
            is_update = bool(told) and rng.random() < 0.35
            entity = rng.choice(told if is_update else sorted({*ENTITIES} - known.keys()))
            kind = {0: "first", documents - 1: "last"}.get(document, "")
            fact = Fact(entity, rng.choice(VALUES), "updated" if is_update else kind, document)
            known[entity] = fact
            own.add(entity)
            words += [*rng.choices(OTHERS, k=rng.randint(*GAP)), entity, fact.value, "."]
        words += rng.choices(OTHERS, k=rng.randint(*GAP))
        pending = ""
        if document + 1 < documents and rng.random() < 0.5:
            pending = rng.choice(sorted({*ENTITIES} - known.keys()))
            words += ["see", pending]
        texts.append(" ".join(words))
    return texts, list(known.values())


def spread(rng: random.Random, facts: Sequence[Fact], count: int) -> list[Fact]:
    """Facts of all kinds in turn."""
    by_kind = [own for kind in (*KINDS, "") if (own := [one for one in facts if one.kind == kind])]
    found = [rng.choice(by_kind[number % len(by_kind)]) for number in range(count)]
    rng.shuffle(found)
    return found


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; what a prompt is written with beside the template is `<pad>`."""
    written = f"{TEMPLATE.system} {TEMPLATE.chunk_start} ? it see .".split()
    known = ["<pad>", "<bos>", "<eos>", *written, *ENTITIES, *VALUES, *OTHERS]
    words = Words(models.WordLevel({word: place for place, word in enumerate(known)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


# --------------------------------------------------------------------------------------- training
def build(name: str, vocabulary: int) -> Any:
    """A model with the decays at which its authors begin; transformers' own forget at once."""
    model_type, changes = MODELS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**_COMMON, "vocab_size": vocabulary, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 0.5)
        for leaf, parameter in model.named_parameters():
            if leaf.endswith("A_log"):
                parameter.uniform_(1, 16).log_()
            elif leaf.endswith("dt_bias"):
                step = torch.empty_like(parameter).uniform_(-6.9, -2.3).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
    return model


class Lessons:
    """Whole prompts with many questions behind them."""

    def __init__(self, tokenizer: Any, *, anywhere: bool = False) -> None:
        """Bind a tokenizer."""
        self._anywhere = anywhere
        self._rng = random.Random(0)
        self._renderer = PromptRenderer(TEMPLATE, tokenizer)
        self._id_of = tokenizer.convert_tokens_to_ids
        self._asked = cache(self._renderer.query_ids)

    def batch(self, documents: int) -> tuple[Tensor, Tensor]:
        """Ids, and at the end of each question its answer, else -100; both `(rows, tokens)`."""
        ids, labels = [], []
        for _ in range(ROWS):
            texts, facts = draw(self._rng, documents, anywhere=self._anywhere)
            row = [*self._renderer.prefix_ids]
            for text in texts:
                row += self._renderer.chunk_ids(text)
            answers = [-100] * len(row)
            for fact in spread(self._rng, facts, ASKED):
                answer = self._id_of(fact.value)
                row += [*self._asked(fact.entity), answer]
                answers += [-100] * (len(row) - len(answers))
                answers[-2] = answer
            ids.append(torch.tensor(row))
            labels.append(torch.tensor(answers))
        # Behind its end a row has no answers, so padding there does nothing.
        return pad_sequence(ids, True), pad_sequence(labels, True, -100)


def train(model: Any, lessons: Lessons, seconds: float) -> dict[str, Any]:
    """Train for so many seconds of the processor; what it came to."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    stage, steps, tokens = 0, 0, 0
    seen: list[tuple[float, float]] = []  # loss and share of right answers of a stage
    begun = time.process_time()
    model.train()
    while (spent := (time.process_time() - begun) / seconds) < 1:
        # At the latest after a fifth, and two fifths of the time.
        is_known = len(seen) >= 40 and sum(right for _, right in seen[-40:]) / 40 > KNOWN
        if stage + 1 < len(STAGES) and (is_known or spent > (stage + 1) / 5):
            stage, seen = stage + 1, []
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((steps + 1) / 50, max(0.02, min(1.0, (1 - spent) / 0.5)))
        ids, labels = lessons.batch(STAGES[stage])
        is_answer = labels != -100
        said = model(input_ids=ids, use_cache=False).logits[is_answer]  # (answers, vocabulary)
        loss = functional.cross_entropy(said, labels[is_answer])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = float((said.argmax(-1) == labels[is_answer]).float().mean())
        seen.append((float(loss.detach()), right))
        steps, tokens = steps + 1, tokens + ids.numel()
        if steps % 50 == 0:
            mean = [sum(one) / len(seen[-50:]) for one in zip(*seen[-50:], strict=True)]
            print(
                f"{steps}: {STAGES[stage]} documents, loss {mean[0]:.3f}, right {mean[1]:.3f}, "
                f"{spent:.0%}",
                flush=True,
            )
    model.eval()
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "steps": steps,
        "cpu_seconds": round(seconds),
        "million_tokens": round(tokens / 1e6, 2),
        "last_loss": round(sum(loss for loss, _ in seen[-50:]) / len(seen[-50:]), 3),
    }


# --------------------------------------------------------------------------------------- asking
@dataclass(frozen=True)
class Asked:
    """A question over the documents of a prompt."""

    texts: list[str]
    fact: Fact
    wrong: int  # a document that does not answer


def questions(prompts: int, *, anywhere: bool = False) -> Iterator[Asked]:
    """One of each kind that a prompt has; the prompts are none of training's."""
    rng = random.Random(99)
    for _ in range(prompts):
        texts, facts = draw(rng, DOCUMENTS, anywhere=anywhere)
        for kind in KINDS:
            own = [fact for fact in facts if fact.kind == kind]
            if own:
                fact = rng.choice(own)
                wrong = rng.choice([n for n in range(DOCUMENTS) if n != fact.document])
                yield Asked(texts, fact, wrong)


def _best(document: int) -> list[float]:
    return [float(number == document) for number in range(DOCUMENTS)]


def sides(model: Any, tokenizer: Any) -> dict[str, Callable[[Asked], tuple[bool, float]]]:
    """Per way whether it answers, and the share of the documents' tokens that it computed."""

    def way(
        policy: ReusePolicy, scores: Callable[[Asked], list[float] | None] = lambda _: None
    ) -> Callable[[Asked], tuple[bool, float]]:
        engine = Engine(model, tokenizer, template=TEMPLATE, store=MemoryStore(), policy=policy)

        def ask(asked: Asked) -> tuple[bool, float]:
            engine.add(asked.texts)
            answer = engine.generate(
                asked.fact.entity, asked.texts, scores=scores(asked), max_new_tokens=1
            )
            told = answer.metrics
            documents = told.prompt_tokens - told.prefix_tokens - told.query_tokens
            computed = told.recomputed_tokens + told.fresh_tokens + told.prefilled_tokens
            return answer.text.strip() == asked.fact.value, computed / documents

        return ask

    bare = Engine(model, tokenizer, template=TEMPLATE, store=MemoryStore())

    def closed_book(asked: Asked) -> tuple[bool, float]:
        answer = bare.generate(asked.fact.entity, max_new_tokens=1)
        return answer.text.strip() == asked.fact.value, 0.0

    full = way(FullRecompute())

    def best_last(asked: Asked) -> tuple[bool, float]:
        """A full prefill in the order of `BestLast`: what its order alone costs."""
        texts = [text for n, text in enumerate(asked.texts) if n != asked.fact.document]
        return full(replace(asked, texts=[*texts, asked.texts[asked.fact.document]]))

    return {
        "FullRecompute()": full,
        "FullRecompute(), best document last": best_last,
        "Reuse()": way(Reuse()),
        "BestLast(), retriever right": way(BestLast(), lambda asked: _best(asked.fact.document)),
        "BestLast(), retriever wrong": way(BestLast(), lambda asked: _best(asked.wrong)),
        "LegoLink(5)": way(LegoLink(5)),
        "LegoLink(16)": way(LegoLink(16)),
        "closed book": closed_book,
    }


def counted(model: Any, tokenizer: Any, every: Sequence[Asked]) -> list[dict[str, Any]]:
    """Right answers in percent by way and kind."""
    rows = []
    for side, ask in sides(model, tokenizer).items():
        right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
        shares = []
        for asked in every:
            is_right, share = ask(asked)
            right[asked.fact.kind].append(is_right)
            shares.append(share)
        rows.append(
            {
                "policy": side,
                **{kind: round(100 * sum(own) / len(own), 1) for kind, own in right.items()},
                "computed": round(sum(shares) / len(shares), 2),
            }
        )
        print(rows[-1], flush=True)
    return rows


def of_questions(tokenizer: Any, every: Sequence[Asked]) -> dict[str, Any]:
    """How many there are of each kind, and how long their documents are."""
    renderer = PromptRenderer(TEMPLATE, tokenizer)
    lengths = sorted(len(renderer.chunk_ids(text)) for one in every for text in one.texts)
    return {
        **{kind: sum(one.fact.kind == kind for one in every) for kind in KINDS},
        "documents": DOCUMENTS,
        "shortest": lengths[0],
        "middle": lengths[len(lengths) // 2],
        "longest": lengths[-1],
    }


def main() -> None:
    """Train, ask and write `results/hybrid_answers.json`, or the models asked for there anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--anywhere", action="store_true", help='"it" stands behind other words')
    parser.add_argument("--seconds", type=float, default=460, help="of the processor, per model")
    parser.add_argument("--prompts", type=int, default=90)
    parser.add_argument("--work", type=Path, required=True, help="keeps what was trained")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    every = [*questions(parsed.prompts, anywhere=parsed.anywhere)]
    parsed.work.mkdir(parents=True, exist_ok=True)
    for name in parsed.models:
        said = {"model": name, "it": "anywhere" if parsed.anywhere else "first"}
        model, file = build(name, len(tokenizer)), parsed.work / f"{name}, {said['it']}.pt"
        if file.is_file():
            kept = torch.load(file, weights_only=True)
            model.load_state_dict(kept["weights"])
            model.eval()
        else:
            lessons = Lessons(tokenizer, anywhere=parsed.anywhere)
            kept = {"about": train(model, lessons, parsed.seconds), "weights": model.state_dict()}
            torch.save(kept, file)
        tables = {
            "trained": [kept["about"]],
            "questions": [of_questions(tokenizer, every)],
            "rows": counted(model, tokenizer, every),
        }
        before = read(result_file("hybrid_answers"))
        report: dict[str, Any] = {"about": {"benchmark": "hybrid_answers", **described("cpu", 1)}}
        for table, rows in tables.items():
            others = [row for row in before.get(table, []) if said.items() - row.items()]
            report[table] = [*others, *({**said, **row} for row in rows)]
        write(result_file("hybrid_answers"), report)


if __name__ == "__main__":
    main()
