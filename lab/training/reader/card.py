"""The model card: what the reader is, how it was trained, its figures and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvcache_rag_lab.reader.language import RELATIONS
from kvcache_rag_lab.reader.names import (
    HELD_OUT_NAMES,
    TRAIN_NAMES,
    WIDE_HELD_OUT_NAMES,
    WIDE_TRAIN_NAMES,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


_CARD: Final = """---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# A tiny reader for KV-cache reuse

A Llama-architecture model of {parameters:,} parameters that answers questions from documents in
controlled English. It was trained from nothing by this project, so that the quality of reuse
policies can be measured offline: names and numbers are invented anew in every example, so a right
answer was read and not remembered. It knows nothing else and is of no use as a general model.

## Model

| | |
|---|---|
| architecture | Llama with attention biases, {layers} layers, width {width}, {heads} heads |
| parameters | {parameters:,} (embedding tied), {megabytes:.2f} MB in bfloat16 |
| rotary base | {theta:.0e} |
| vocabulary | {vocabulary} byte-pair tokens that never cross a word; printable ASCII |
| layout | `<bos>` instruction, then `<doc>` text per document, then `<q>` question `<a>` |
| answers | the exact value; "bridge; final" for two hops; "A, B" for several; "not found" |

The output bias of attention is zero throughout; it is there because Llama has all four or none.

## Data

Generated: {relations} relations of people, companies, products and towns, each with two sentences
and one or two questions. Six forms of contexts: profiles, mixed facts, one relation of many
entities, one shared relation among other facts, chained facts, several values; and linked ones,
in which a document begins with what the one before explains: a pronoun, an alias, a unit. No list
of real names is used; names are of two makes, and no name for measuring occurs in training:

- syllable names: {train_names:,} for training and {held_out:,} for measuring, of one inventory of
  syllables;
- wide names: {wide_train:,} and {wide_held_out:,}, of other syllables, the letter pairs of the
  language's words, and random letters; one in seven has two or three words, one word in eight a
  hyphen, an apostrophe, digits, a prefix or another case. Training adds names put together from the
  vocabulary's pieces made of letters. A hash of its letters decides on which side a word is.

## Recipe

1. Full attention, {full_steps} steps: from one document of four facts to six documents. Before the
   last stage three quarters of the contexts state one or two relations of many entities, because
   a reader that meets mixed relations first learns to tell relations apart and not entities. Most
   refusals, chains and questions for several values come with the last stage. Muon for matrices,
   AdamW for the rest; the learning rate falls linearly from {decay_from:.0%} of these steps on.
2. Block mask, {block_steps} steps at a quarter of the rate: half of the batches are the stitched
   computation (each chunk prefilled behind the shared prefix, which is kept once, positions
   reordered).
3. Wide names, {name_steps} steps from {name_rate:g} of the rate down to a twentieth of that. In
   four of five contexts all or most names are wide, a quarter of the batches has contexts of at
   most 24 facts in one to eight documents, and half of the batches use the block mask. Before this
   phase the reader cannot copy pieces of words that its syllable names never use.
4. Linked facts, {link_steps} steps from {link_rate:g} of the rate down to a twentieth of that, full
   attention only. {link_share:.0%} of the contexts are linked.

Heads of the first three layers start wired to look back and copy. {workers} worker(s) of one thread
average their parameters every {average_every} steps. Seed {seed}.

Measured: {tokens:.1f} million tokens in {minutes:.0f} minutes of wall time on {machine}, shared
with other work. {note}

    {command}

## Figures

Names not in training, fresh contexts of {documents} documents of {facts} facts; exact match of the
whole answer (for "unanswerable": refused), 95 % Wilson intervals, which take questions as
independent though up to four share a context. "noise_80": 80 % of the documents state the relation
of another entity. In "same_relation" every document states the asked
relation, each of another entity. Reuse: each document prefilled apart behind the prefix, nothing
recomputed. Weights as published (bfloat16), computed in float32.

{figures}
## Limits

- Names are copied piece by piece, so long ones (several words, hyphens, random letters) fail more
  often than short ones. Letters outside ASCII cannot be read or written.
- It reads the sentence forms it was trained on. Other wording and other relations are outside what
  it can do; a pronoun or an alias is understood at the start of a document and nowhere else.
- But for the linked kinds (`pronoun`, `alias`, `unit`) every fact stands in one sentence of one
  document, so there is little for stitching to lose there: where the figures show no gap, the
  reader cannot show either what a policy gains over `Reuse`.
- Two-hop questions name the chain in one fixed way and are answered with the bridge first; asked
  for the end alone (`two_hop_direct`) it mostly fails.
- Questions for several values are its weakest kind; their values must come in reading order.
- One seed; nobody has measured how much another seed differs.
- The figures are for contexts of {documents} documents; trained with one to eight.
"""


def model_card(facts: Mapping[str, Any]) -> str:
    """Return the model card of a run as Markdown.

    Args:
        facts: What `train` wrote to `training.json`; without `figures` the card says that none
            were measured.
    """
    settings: dict[str, Any] = facts["settings"]
    network: dict[str, Any] = settings["network"]
    measured: dict[str, Any] = facts.get("figures", {})
    tables = [f"{title}:\n\n{table}" for title, table in measured.get("tables", {}).items()]
    return _CARD.format(
        **{**network, **settings},
        full_steps=settings["steps"],
        note=facts.get("note", ""),
        parameters=facts["parameters"],
        megabytes=2 * facts["parameters"] / 1e6,
        relations=len(RELATIONS),
        train_names=TRAIN_NAMES,
        held_out=HELD_OUT_NAMES,
        wide_train=WIDE_TRAIN_NAMES,
        wide_held_out=WIDE_HELD_OUT_NAMES,
        tokens=facts["tokens"] / 1e6,
        minutes=facts["seconds"] / 60,
        machine=facts["machine"],
        command=facts["command"],
        documents=measured.get("documents", 6),
        facts=measured.get("facts", 4),
        figures="\n".join(tables) or "None measured.\n",
    )
