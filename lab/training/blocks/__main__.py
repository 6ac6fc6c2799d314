"""Train an adapter that reads stitched chunks: one resumable command.

    python -m training.blocks MODEL.gguf --data DATA --out build/blocks
    python -m training.blocks MODEL.gguf --data DATA --out build/blocks --compare
    python -m training.blocks MODEL.gguf --data DATA --out build/blocks --answers 2000
    python -m training.blocks MODEL.gguf --data DATA --out build/blocks --instructions 2000
    python -m training.blocks MODEL.gguf --data DATA --out build/blocks --objective answers
    python -m training.blocks MODEL.gguf --data DATA ... --objective answers --mask full

The first trains by distillation: what the model itself answers over all documents is learned over
chunks that do not see each other (TurboRAG's block mask, arXiv 2410.07590, section 3.3).  With
`--objective answers` the data's answers are learned, where the third and fourth command wrote them
in the model's own words, and `--mask full` is the control: equal steps on equal samples under full
attention.  A stopped run goes on when it is called again, and with `--checkpoint FOLDER --resume`
on another machine, to which FOLDER and `OUT/data` were copied.  `--compare` trains each kind of
adapter for 60 steps and prints the loss on stitched contexts that were kept out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from kvcache_rag.errors import KVCacheRagError
from kvcache_rag_lab.finetune import Report, finetune
from kvcache_rag_lab.finetune.config import LoraTokens, Objective
from training.blocks.data import Squad, write
from training.blocks.own import write_answers, write_instructions
from training.blocks.recipe import COMPARED_STEPS, STEPS, Mask, Train, recipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NOT_OF_A_RUN: Final = ("model", "data", "out", "answers", "instructions", "compare")
_NOT_OF_A_COMPARISON: Final = ("train", "steps", "checkpoint", "resume")


def train(model: str, data: Path, out: Path, **options: Any) -> Report:
    """Write the data, if they are not there, and train.

    Args:
        model: As the engine takes it.
        data: Folder that holds `train`.
        out: As for `recipe`.
        options: As for `recipe`.

    Raises:
        OSError: If the data are missing.
        InvalidInputError: If the adapter is there already, or the model cannot be trained so.
    """
    config = recipe(model, out, **options)
    config.check_folders()
    if not (out / "data" / "plain.jsonl").exists():
        write(data, out / "data")
    return finetune(config, show_progress=sys.stderr.isatty())


def compare(model: str, data: Path, out: Path, **options: Any) -> Iterator[str]:
    """A line about each kind of adapter: its loss on stitched contexts, before and after."""
    for kind in get_args(Train):
        name = f"compare-{kind}-{options.get('tokens', 'all')}"
        report = out / name / "report.json"
        if not report.exists():
            train(model, data, out, train=kind, steps=COMPARED_STEPS, name=name, **options)
        measured = json.loads(report.read_text(encoding="utf-8"))["measures"]["block"]
        before, after = measured["loss"]
        yield f"{kind}: {before:.4f} before, {after:.4f} after ({measured['n']} answers)"


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m training.blocks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF file, folder or name")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mask", choices=get_args(Mask), default="block", help="full: the control")
    parser.add_argument("--train", choices=get_args(Train), default="attention")
    parser.add_argument(
        "--tokens",
        choices=get_args(LoraTokens),
        default="all",
        help="where LoRA acts: on questions and answers, or on documents, too",
    )
    parser.add_argument("--objective", choices=get_args(Objective), default="distillation")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="such as cpu (default: CUDA if there is one)")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="less memory, a third more time"
    )
    parser.add_argument("--checkpoint", type=Path, help="folder that travels to another machine")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    step = parser.add_mutually_exclusive_group()
    for name, text in (("answers", "questions of SQuAD"), ("instructions", "turns of its own")):
        step.add_argument(
            f"--{name}", type=int, metavar="N", help=f"have the model answer N {text}, no training"
        )
    step.add_argument("--compare", action="store_true", help="each kind of adapter, 60 steps")
    arguments = parser.parse_args(words)
    try:
        for line in _done(arguments):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except (KVCacheRagError, OSError) as error:
        parser.error(str(error))
    return 0


def _done(given: argparse.Namespace) -> Iterator[str]:
    place = given.out / "data"
    options = {name: value for name, value in vars(given).items() if name not in _NOT_OF_A_RUN}
    if given.answers:
        squad = Squad.read(given.data / "train")
        kept = write_answers(given.model, squad, place, given.answers, given.device)
        yield f"{kept} answers are kept; rows: {write(given.data, place)}"
    elif given.instructions:
        kept = write_instructions(given.model, place, given.instructions, given.device)
        yield f"{kept} dialogues are kept; rows: {write(given.data, place)}"
    elif given.compare:
        for name in _NOT_OF_A_COMPARISON:
            del options[name]
        yield from compare(given.model, given.data, given.out, **options)
    else:
        report = train(given.model, given.data, given.out, **options)
        yield json.dumps(report.to_json(), indent=1)


if __name__ == "__main__":
    sys.exit(main())
