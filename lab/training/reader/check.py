"""Check a reader on names and contexts it never saw.

    python -m training.reader.check MODEL_DIR --n 1000 --names wide

Prints exact match with 95 % Wilson intervals per kind of question, with full prefill and with
stitched chunks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerFast

from kvcache_rag_lab.reader.generator import KINDS
from kvcache_rag_lab.scoring.statistics import Share
from training.reader.network import Network, NetworkConfig
from training.reader.scoring import answer_outcomes, held_out_examples
from training.reader.tokenizer import WordEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.reader.generator import NamePool


_COMPUTATIONS: Final = {"full": False, "stitched": True}

_ANSWERABLE: Final = ("single", "same_relation")

Shares = dict[str, dict[str, Share]]


def load_reader(directory: Path) -> tuple[Network, WordEncoder]:
    """Return network (float32) and tokenizer of a model directory."""
    config = NetworkConfig.from_transformers(AutoConfig.from_pretrained(directory))
    state = load_file(directory / "model.safetensors")
    network = Network.from_transformers_state(config, state).eval()
    return network, WordEncoder(PreTrainedTokenizerFast.from_pretrained(directory))


def check(
    network: Network,
    encoder: WordEncoder,
    *,
    questions: int,
    seed: int,
    documents: int = 6,
    facts: int = 4,
    kinds: Sequence[str] = KINDS,
    names: NamePool = "held_out",
) -> Shares:
    """Return per measure and per computation ("full", "stitched") how often it held.

    Measures are the kinds of questions (for "unanswerable": refused) and, for answerable kinds,
    "false refusals, KIND".
    """
    report: Shares = {}
    for kind in kinds:
        examples = held_out_examples(
            kind, questions, encoder, seed=seed, documents=documents, facts=facts, names=names
        )
        for computation, block in _COMPUTATIONS.items():
            outcomes = answer_outcomes(network, examples, encoder, block=block)
            right = Share.of(outcome.right for outcome in outcomes)
            report.setdefault(kind, {})[computation] = right
            if kind in _ANSWERABLE:
                refused = Share.of(outcome.refused for outcome in outcomes)
                report.setdefault(f"false refusals, {kind}", {})[computation] = refused
    return report


def as_table(report: Shares) -> str:
    """Return `report` as a Markdown table."""
    lines = ["| measure | full prefill | reuse |", "|---|---|---|"]
    for measure, shares in report.items():
        lines.append(f"| {measure} | {shares['full']} | {shares['stitched']} |")
    return "\n".join(lines) + "\n"


def as_json(report: Shares) -> str:
    """Return `report` as JSON: successes and trials."""
    plain = {
        measure: {name: [share.successes, share.trials] for name, share in shares.items()}
        for measure, shares in report.items()
    }
    return json.dumps(plain, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.reader.check", description=__doc__)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--n", type=int, default=1000, help="questions per kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--names", choices=("held_out", "wide"), default="held_out")
    parser.add_argument("--json", action="store_true", help="print counts as JSON")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        report = check(
            *load_reader(options.model),
            questions=options.n,
            seed=options.seed,
            documents=options.documents,
            facts=options.facts,
            names=options.names,
        )
    sys.stdout.write(as_json(report) if options.json else as_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
