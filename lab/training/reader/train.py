"""Train the reader from nothing, on CPU, with one command.

    python -m training.reader.train --out reader-model

Workers of one thread each train on their own data and average their parameters now and then. The
run resumes from its checkpoints in `--work` when it is started again with the same settings.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from training.reader.card import model_card
from training.reader.check import as_table, check
from training.reader.loop import Trainer
from training.reader.network import Network
from training.reader.publish import publish
from training.reader.settings import TrainConfig
from training.reader.tokenizer import WordEncoder, build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag_lab.reader.generator import NamePool


_TIMEOUT: Final = timedelta(minutes=30)

_CHECK_SEED: Final = 1

_NAMES: Final[dict[str, NamePool]] = {"syllable names": "held_out", "wide names": "wide"}

_MEASURED: Final = {
    "After phase 1": "before-block.pt",
    "After phase 2": "before-names.pt",
    "After phase 3": "before-links.pt",
    "After phase 4, as published": "finished.pt",
}


def train(
    config: TrainConfig, out: Path, work: Path, *, check_questions: int = 1000
) -> dict[str, Any]:
    """Train a reader, measure it and write its model directory to `out`.

    Args:
        config: The run.
        out: Directory of the finished model; replaced as a whole if it exists.
        work: Directory of checkpoints and log; an interrupted run goes on from there.
        check_questions: Questions of each kind to measure the reader with; 0 to skip.

    Returns:
        The facts of the run as written to `training.json`.

    Raises:
        ValueError: If `work` belongs to a run with other settings.
    """
    work.mkdir(parents=True, exist_ok=True)
    settings = work / "config.json"
    wanted = json.loads(json.dumps(asdict(config)))
    if settings.exists() and json.loads(settings.read_text()) != wanted:
        raise ValueError(f"{work} holds a run with other settings; use another --work")
    settings.write_text(json.dumps(wanted, indent=2) + "\n")
    rendezvous = work / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    if config.workers == 1:
        _work(0, config, work)
    else:
        start: Any = spawn  # untyped in torch
        start(_work, args=(config, work), nprocs=config.workers)
    facts: dict[str, Any] = json.loads((work / "facts.json").read_text())
    if check_questions:
        facts["figures"] = _measure(config, work, check_questions)
    publish(_load(config, work / "finished.pt"), out, facts)
    return facts


def _load(config: TrainConfig, path: Path) -> Network:
    network = Network(config.network)
    network.load_state_dict(torch.load(path))
    return network.eval()


def _measure(config: TrainConfig, work: Path, questions: int) -> dict[str, Any]:
    """Return figures, as tables, of the run at the end of each phase, in published precision."""
    encoder = WordEncoder(build_tokenizer())
    tables = {}
    for title, name in _MEASURED.items():
        network = _load(config, work / name)
        for parameter in network.parameters():  # and not the rotary frequencies
            parameter.data = parameter.data.bfloat16().float()
        for kind, names in _NAMES.items():
            report = check(network, encoder, questions=questions, seed=_CHECK_SEED, names=names)
            tables[f"{title}, {kind}"] = as_table(report)
    return {"documents": 6, "facts": 4, "seed": _CHECK_SEED, "tables": tables}


def _work(rank: int, config: TrainConfig, work: Path) -> None:
    """Be worker `rank`; worker 0 leaves the weights and the facts of the run in `work`."""
    torch.set_num_threads(1)
    if config.workers > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{(work / 'rendezvous').resolve()}",
            rank=rank,
            world_size=config.workers,
            timeout=_TIMEOUT,
        )
    trainer = Trainer(config, rank, work)
    trainer.run()
    if rank == 0:
        facts = {
            "settings": asdict(config),
            "command": _command(config),
            "parameters": sum(value.numel() for value in trainer.network.parameters()),
            "steps": trainer.progress.step,
            "tokens": trainer.progress.tokens * config.workers,
            "seconds": round(trainer.progress.seconds, 1),
            "machine": f"{config.workers} CPU threads, {platform.machine()}",
            "torch": torch.__version__,
        }
        torch.save(trainer.network.state_dict(), work / "finished.pt")
        (work / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    if config.workers > 1:
        dist.destroy_process_group()


def _command(config: TrainConfig) -> str:
    """Return the command that repeats the run."""
    defaults = TrainConfig()
    parts = ["python -m training.reader.train --out DIR"]
    for name in ("seed", "steps", "block_steps", "name_steps", "link_steps", "workers"):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            parts.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(parts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(prog="python -m training.reader.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished model")
    parser.add_argument("--work", type=Path, help="checkpoints and log (default: OUT.work)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps, help="under full attention")
    parser.add_argument("--block-steps", type=int, default=defaults.block_steps)
    parser.add_argument("--name-steps", type=int, default=defaults.name_steps)
    parser.add_argument("--link-steps", type=int, default=defaults.link_steps)
    parser.add_argument("--workers", type=int, default=defaults.workers)
    parser.add_argument("--check", type=int, default=1000, help="questions per kind to measure")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    config = replace(
        TrainConfig(),
        seed=options.seed,
        steps=options.steps,
        block_steps=options.block_steps,
        name_steps=options.name_steps,
        link_steps=options.link_steps,
        workers=options.workers,
    )
    work = options.work or options.out.with_name(options.out.name + ".work")
    facts = train(config, options.out, work, check_questions=options.check)
    sys.stdout.write(model_card(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
