"""Ways to answer that are compared: a policy on a model, over chunks kept in some form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_rag.evaluation.records import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.policies import ReusePolicy


@dataclass(frozen=True)
class Cell:
    """One way to answer.

    Attributes:
        label: Of the policy.
        policy: What is reused; the label alone tells cells apart.
        model: Label of the model.
        codec: Name of the codec, whose files chunks go through; "" keeps them in memory as they
            were computed.
        k: Documents per question; None for all there are.
    """

    label: str
    policy: ReusePolicy = field(compare=False)
    model: str = "tiny"
    codec: str = ""
    k: int | None = None

    def place(self, task: str, question: str) -> Place:
        """Where the answer to a question belongs."""
        return Place(task, question, self.model, self.label, self.codec, self.k)


def make_cells(
    policies: Mapping[str, ReusePolicy],
    models: Sequence[str] = ("tiny",),
    codecs: Sequence[str] = ("",),
    ks: Sequence[int | None] = (None,),
) -> tuple[Cell, ...]:
    """All combinations; a full prefill reads no chunks, so it is asked with the first codec only.

    Args:
        policies: By label.
        models: Labels.
        codecs: Names, "" for memory.
        ks: Numbers of documents, None for all.
    """
    return tuple(
        Cell(label, policy, model, codec, k)
        for model in models
        for k in ks
        for codec in codecs
        for label, policy in policies.items()
        if codec == codecs[0] or not policy.is_full
    )


def reference_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """What a cell's first tokens are compared with.

    That is the same policy over the first codec, and for the first codec itself the full prefill;
    None for a full prefill, or if it is not among `cells`.
    """
    if cell.policy.is_full:
        return None
    same = [one for one in cells if (one.model, one.k) == (cell.model, cell.k)]
    first = next(one for one in same if one.label == cell.label)
    return first if first != cell else next((one for one in same if one.policy.is_full), None)
