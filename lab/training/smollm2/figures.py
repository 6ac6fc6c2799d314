"""What the model card shows of `confirm` and `ability`: numbers as sentences and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from training.smollm2.confirm import BARS, CLOSED, Way

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MODELS: Final = {
    "base": "SmolLM2 as it comes",
    "block": "with this adapter",
    "control": "with the control's adapter",
}
_READ: Final = {
    "reuse": "cached chunks, reuse",
    "LegoLink 16": "cached chunks, the first 16 tokens of each computed again",
    "full prefill": "full prefill",
}
_NO_DOCUMENTS: Final = "no documents"

_DESCRIPTION: Final = (
    "Asked once, of the adapter as it is here: the 4,143 questions of SQuAD's development half "
    "(none was trained on), each over its paragraph and four others, two of them of the same "
    "article. F1 and containment in percent, with 95 % intervals by a bootstrap over paragraphs. "
    "The control was trained with as many steps on the same samples, but under full attention. "
    "{measured}."
)
_ABILITY: Final = (
    " On what is not a question about documents, the adapter's next-token distribution is "
    "{mean:.3f} nats from the base's (mean over the base's answers to {n} instructions)."
)


def figures(
    confirmed: Mapping[str, Any], ability: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The part of the card that `publish` takes as its confirmation.

    Args:
        confirmed: What `training.smollm2.confirm` wrote.
        ability: What `training.smollm2.ability` wrote; None where it was not run.
    """
    description = _DESCRIPTION.format(measured=_measured(confirmed["scores"]))
    tables = {"Answers": [_answers(row) for row in confirmed["scores"]]}
    if confirmed["bars"]:
        tables["Differences in points of F1"] = [
            _bar(name, bar) for name, bar in confirmed["bars"].items()
        ]
    if ability is not None:
        description += _ABILITY.format(**ability["divergence"])
        tables["Perplexity with ordinary attention (no more than 3 % worse was asked for)"] = [
            _perplexity(name, found)
            for name, found in ability.items()
            if isinstance(found, dict) and "ratio" in found
        ]
    return {"description": description, "tables": tables}


def _measured(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where and when, each fact once."""
    named = {
        name: ", ".join(dict.fromkeys(row["about"][name] for row in rows))
        for name in ("machine", "versions", "commit", "date")
    }
    return "{machine}; {versions}; commit {commit}; {date}".format(**named)


def _answers(row: Mapping[str, Any]) -> dict[str, Any]:
    way = Way(row["task"], row["model"], row["policy"])
    return {
        "model": _MODELS[way.model],
        "reads": _read(way),
        "questions": row["n"],
        "F1": _interval(row["f1"]),
        "contains an answer": _interval(row["contains"]),
    }


def _bar(name: str, bar: Mapping[str, Any]) -> dict[str, Any]:
    first, second, least = BARS[name]
    return {
        "difference": f"{_said(first)} - {_said(second)}",
        "points": _interval(bar["f1"], "+.2f"),
        "asked for: lower end above": f"{100 * least:g}",
        "holds": bar["holds"],
    }


def _perplexity(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text": name.replace("_", " "),
        "pieces of 512 tokens": found["pieces"],
        "before": f"{found['perplexity before']:.2f}",
        "after": f"{found['perplexity after']:.2f}",
        "change": f"{100 * (found['ratio'] - 1):+.1f} %",
        "holds": found["holds"],
    }


def _said(way: Way) -> str:
    return f"{_MODELS[way.model]}, {_read(way)}"


def _read(way: Way) -> str:
    return _NO_DOCUMENTS if way.task == CLOSED else _READ[way.policy]


def _interval(values: Sequence[float], form: str = ".1f") -> str:
    value, low, high = (f"{100 * one:{form}}" for one in values)
    return f"{value} ({low} to {high})"
