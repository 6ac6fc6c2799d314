"""The top-k section of docs/quality.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.evaluation.report import Group, PolicyRow

_TOP_K: Final = """
## Top-k

Exact match in %, of k documents; \\* where the 95 % interval of the difference from full prefill of
the same model and k excludes 0. Documents that hold the answer are always among them, so a pair of
documents needs k = 2. The kinds with noise have five documents by definition, and needles six.

"""


def sweeps(swept: Sequence[Group], shown: Sequence[Group]) -> list[str]:
    """The section about k: one table per kind of question.

    Args:
        swept: With k limited.
        shown: Of the main table, where nothing limits it.
    """
    tasks = dict.fromkeys(one.task for one in swept)
    # Asked without a limit, a question has six documents.
    models = {one.model for one in swept}
    whole = [(6, one) for one in shown if one.task in tasks and one.model in models]
    found = [*((one.k, one) for one in swept), *whole]
    return [
        _TOP_K,
        *(_sweep(task, [(k, one) for k, one in found if one.task == task]) for task in tasks),
    ]


def _sweep(task: str, groups: Sequence[tuple[int | None, Group]]) -> str:
    ks = sorted({k for k, _ in groups if k is not None})
    sizes = dict(sorted((found.n, k) for k, found in groups))
    parts = [f"{n} (k = {k})" if k == 6 else f"{n}" for n, k in sizes.items()]
    asked = " and ".join(parts) if len(parts) > 1 else f"{groups[0][1].n}, the same at every k"
    lines = [f"### {task.removeprefix('reader_')}\n\nn = {asked}.\n\n"]
    lines.append(f"| model | policy | {' | '.join(f'k = {k}' for k in ks)} |\n")
    lines.append(f"|---|---|{'---|' * len(ks)}\n")
    for model in dict.fromkeys(found.model for _, found in groups):
        mine = {
            k: {row.policy: row for row in found.rows}
            for k, found in groups
            if found.model == model
        }
        for policy in next(iter(mine.values())):
            cells = [_short(mine[k][policy]) if k in mine else "" for k in ks]
            lines.append(f"| {model} | {policy} | {' | '.join(cells)} |\n")
    return "".join([*lines, "\n"])


def _short(row: PolicyRow) -> str:
    mark = "\\*" if row.difference is not None and row.difference.ranked else ""
    return f"{100 * row.quality.value:.1f}{mark}"
