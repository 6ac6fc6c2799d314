"""Write the adapter's package: weights in bfloat16, what they are, and the model card.

    python -m training.smollm2.publish --adapter ADAPTER --facts FACTS \
        --confirmation CONFIRMATION --out integrations/kvcache-rag-smollm2

`ADAPTER` is the folder that `kvcache-rag finetune smollm2 --lora RANK --keep-adapter` (or
`training.blocks`) wrote.  `FACTS` is JSON of what its report does not say, `NEEDED`, and if
wanted of `FURTHER`.  `CONFIRMATION` is JSON of what was measured, see `publish`; without it the
card says that nothing was.  What measured SmolLM2's adapter is at commit 00c4d022.

Written below `--out`: `README.md` (the card) and `kvcache_rag_smollm2/block`.  The rest of the
package is written by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors.torch import load_file, save_file

from kvcache_rag.errors import InvalidInputError, KVCacheRagError
from kvcache_rag.models.adapters import (
    BASE,
    CONFIG,
    WEIGHTS,
    base_of,
    trained_on_questions,
    write_training,
)
from kvcache_rag.models.model_names import PACKAGED
from kvcache_rag.prompt.template import FILE_NAME, PromptTemplate, text_fields
from training.smollm2.card import model_card

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

MODEL: Final = "smollm2"

PLACE: Final = Path("kvcache_rag_smollm2", "block")
"""Folder of the adapter in its package; the entry point leads there."""

TRAINING: Final = "training.json"

LIMIT: Final = 12_000_000
"""Bytes of the adapter's folder."""

NEEDED: Final = ("command", "device")
"""Facts of the run that its report does not hold."""

FURTHER: Final = ("hours", "commit", "note")
"""Facts that may be added; `hours` stands in place of the report's."""

_RECIPE: Final = (
    "lora", "positions", "block_share", "plain_share", "batch_tokens", "accumulate", "rate",
    "precision",
)  # fmt: skip

# An absolute path, but no part of a URL or of a word such as "and/or".
_PATH: Final = re.compile(r"(?<![\w./:-])/[\w.-]+(?:/[\w.-]+)+")


def publish(
    adapter: Path,
    out: Path,
    facts: Mapping[str, Any],
    confirmation: Mapping[str, Any] | None = None,
) -> Path:
    """Write the generated files of the package; the folder of the adapter.

    That folder appears as a whole, in place of an existing one.

    Args:
        adapter: Folder that fine-tuning wrote.
        out: Of the package.
        facts: `NEEDED`, and some of `FURTHER`.
        confirmation: What was measured: `description`, a sentence, and `tables`, by title a list of
            rows, which are objects of equal keys; None for nothing.

    Raises:
        InvalidInputError: If it is no adapter of the base, a fact is missing, a path of this
            machine would be published, or the result is too large.
    """
    report = _object(adapter / "report.json")
    weights = _rounded(adapter)
    target = out / PLACE
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        partial.chmod(0o755)
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod(0o644)
        _write(partial / CONFIG, _config(adapter))
        _write(partial / BASE, {"model": MODEL, "sha256": PACKAGED[MODEL].sha256})
        write_training(partial, on_question=trained_on_questions(adapter))
        _write(partial / FILE_NAME, text_fields(PromptTemplate.load(adapter) or PromptTemplate()))
        described = {
            **_from_report(report),
            **_checked_facts(facts),
            "base": {"model": MODEL, "sha256": PACKAGED[MODEL].sha256, **_package()},
            "parameters": sum(value.numel() for value in weights.values()),
            "bytes": (partial / WEIGHTS).stat().st_size,
            "sha256": hashlib.sha256((partial / WEIGHTS).read_bytes()).hexdigest(),
            "confirmation": _checked_confirmation(confirmation),
        }
        _write(partial / TRAINING, described)
        _check_size(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    (out / "README.md").write_text(model_card(described), encoding="utf-8")
    return target


def _rounded(adapter: Path) -> dict[str, torch.Tensor]:
    """The weights in bfloat16, as the base model computes."""
    base = base_of(adapter)
    if base != MODEL:
        raise InvalidInputError(f"{adapter} is an adapter for {base!r}, not for {MODEL!r}")
    if not (adapter / WEIGHTS).is_file():
        raise InvalidInputError(
            f"{adapter} has no {WEIGHTS}; save it with safetensors, as pickle is not published"
        )
    weights = {name: value.bfloat16() for name, value in load_file(adapter / WEIGHTS).items()}
    spoilt = [name for name, value in weights.items() if not bool(value.isfinite().all())]
    if spoilt:
        raise InvalidInputError(f"{adapter} holds infinite weights, such as {spoilt[0]}")
    return weights


def _config(adapter: Path) -> dict[str, Any]:
    """PEFT's settings, in the same order each time."""
    config = {**_object(adapter / CONFIG), "inference_mode": True}
    if isinstance(config.get("target_modules"), list):  # of a set
        config["target_modules"] = sorted(config["target_modules"])
    return dict(sorted(config.items()))


def _package() -> dict[str, str]:
    known = PACKAGED[MODEL]
    names = {"package": known.package, "version": known.version}
    return {**names, "file": Path(known.file).name, "install": f"{known.package}=={known.version}"}


def _from_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the report of the run says, without the places where its data lay."""
    settings = report["settings"]
    measures = [
        {
            "kept apart": measure["what"],
            "n": measure["n"],
            "loss before": measure["loss"][0],
            "after": measure["loss"][1],
            "right before": measure["exact_match"][0],
            "right after": measure["exact_match"][1],
        }
        for measure in report["measures"].values()
    ]
    return {
        "seed": settings["seed"],
        "steps": report["steps"],
        "tokens": report["tokens"],
        "hours": report["seconds"] / 3600,
        "recipe": {name: settings[name] for name in _RECIPE},
        "measures": measures,
    }


def _checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in NEEDED if not facts.get(name)]
    unknown = sorted(facts.keys() - {*NEEDED, *FURTHER})
    if missing or unknown:
        problem = f"do not say {missing[0]!r}" if missing else f"hold {unknown[0]!r}"
        raise InvalidInputError(
            f"the facts {problem}; they are {', '.join(NEEDED)}, and may be {', '.join(FURTHER)}"
        )
    for name, value in facts.items():
        kind = (int, float) if name == "hours" else str
        if not isinstance(value, kind):
            raise InvalidInputError(f"the fact {name!r} cannot be {value!r}")
    return dict(facts)


def _checked_confirmation(confirmation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if confirmation is None:
        return None
    tables = confirmation.get("tables")
    if not isinstance(confirmation.get("description"), str) or not isinstance(tables, dict):
        raise InvalidInputError("the confirmation needs a description and tables by their titles")
    for title, rows in tables.items():
        if not rows or any(row.keys() != rows[0].keys() for row in rows):
            raise InvalidInputError(f"rows of the table {title!r} have not all the same keys")
    return {"description": confirmation["description"], "tables": tables}


def _check_size(folder: Path) -> None:
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    if nbytes > LIMIT:
        raise InvalidInputError(
            f"the adapter takes {nbytes / 1e6:.1f} MB, and {LIMIT / 1e6:.0f} MB is the limit; "
            "train one of a lower rank"
        )


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path} is not a JSON object")
    return values


def _write(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False)
    found = _PATH.search(text)
    if found:
        raise InvalidInputError(f"{path.name} would name the path {found.group()}; leave it out")
    path.write_text(f"{text}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m training.smollm2.publish", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--adapter", type=Path, required=True, help="folder of fine-tuning")
    parser.add_argument("--out", type=Path, required=True, help="folder of the package")
    parser.add_argument("--facts", type=Path, required=True, help=f"JSON of {', '.join(NEEDED)}")
    parser.add_argument("--confirmation", type=Path, help="JSON of what was measured")
    given = parser.parse_args(arguments)
    try:
        confirmation = _object(given.confirmation) if given.confirmation else None
        place = publish(given.adapter, given.out, _object(given.facts), confirmation)
    except KVCacheRagError as error:
        parser.error(str(error))
    sys.stdout.write(f"{place}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
