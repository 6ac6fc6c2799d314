"""Fine-tune SmolLM2 for stitching, and its control, on a CPU: one resumable command each.

The same recipe for another model, on whose size the time depends: `--model MODEL.gguf --steps N`.

    python -m training.smollm2.train block --data DATA --out build/smollm2
    python -m training.smollm2.train full --data DATA --out build/smollm2

`block` trains LoRA under the block mask (TurboRAG, arXiv 2410.07590, section 3.3); `full` is the
control: equal steps on equal samples under full attention.  A stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData, Report, finetune
from training.smollm2.data import write

STEPS: Final = 360


def recipe(
    mask: str, out: Path, *, model: str = "smollm2", steps: int = STEPS, seed: int = 0
) -> FinetuneConfig:
    """The run whose adapter is published, or its control.

    Args:
        mask: "block", or "full" for the control.
        out: Folder that holds `data` (`training.smollm2.data`) and takes the adapter.
        model: As the engine takes it.
        steps: Of the optimiser, of 5,632 tokens each.
        seed: Of data order and adapters.
    """
    return FinetuneConfig(
        model=model,
        out=out / f"{mask}-{seed}",
        data=JsonlData(out / "data" / "learned.jsonl", questions=12),
        plain=out / "data" / "plain.jsonl",
        block_share=1.0 if mask == "block" else 0.0,
        plain_share=0.1,
        steps=steps,
        batch_tokens=2816,
        accumulate=2,
        rate=5e-4,
        lora=16,
        keep_adapter=True,
        precision="bf16",
        seed=seed,
        holdout=24,
        save_every=30,
        device="cpu",
    )


def train(mask: str, data: Path, out: Path, **options: Any) -> Report:
    """Write the data, if they are not there, and train.

    Raises:
        OSError: If the data are missing.
        InvalidInputError: If the adapter is there already.
    """
    if not (out / "data" / "plain.jsonl").exists():
        write(data, out / "data")
    return finetune(recipe(mask, out, **options), show_progress=sys.stderr.isatty())


def main() -> int:
    """Train one of both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mask", choices=("block", "full"))
    parser.add_argument("--data", type=Path, required=True, help="folder that holds train/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    report = train(given.pop("mask"), given.pop("data"), given.pop("out"), **given)
    sys.stdout.write(json.dumps(report.to_json(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
