"""The section about locality of docs/serving-benchmarks.md, from `benchmarks.locality`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.report_tables import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping


def section(found: Mapping[str, Any]) -> str:
    """Figure 1 of Shared RAG-DCache, as tables beside the uniform null."""
    rows = []
    for row in found["rows"]:
        cells = [row["retriever"], f"{row['top']}", f"{100 * row['right']:.1f} %"]
        for percent, share in row["shares"].items():
            null = row["null_shares"][percent]
            low, high = 100 * null["low"], 100 * null["high"]
            cells += [f"{100 * share:.1f}", f"{100 * null['value']:.1f} [{low:.1f}, {high:.1f}]"]
        rows.append(cells)
    header = ["retrieval", "documents per question", "own document found"]
    for percent in found["rows"][0]["shares"]:
        header += [f"% of documents for {percent} %", f"null for {percent} %"]
    hot = []
    for row in found["rows"]:
        cells = [row["retriever"], f"{row['top']}"]
        for percent, share in row["hottest"].items():
            null = row["null_hottest"][percent]
            low, high = 100 * null["low"], 100 * null["high"]
            cells.append(f"{100 * share:.1f} ({100 * null['value']:.1f} [{low:.1f}, {high:.1f}])")
        hot.append(cells)
    percents = [f"hottest {percent} %" for percent in found["rows"][0]["hottest"]]
    text = (
        f"{found['questions']:,} questions of `{found['queries']}` over {found['documents']:,} "
        f"paragraphs of `{found['corpus']}` ({found['date']}; development data). Which share of "
        "the documents serves half, 80 and 90 % of the retrievals, and beside it the **null**: the "
        f"same number of questions thrown at the documents uniformly, median and 95 % range of "
        f"{found['draws']:,} draws. Only a share below the null's range is skew; the rest is that "
        "there are few questions per document. A retriever that often misses a question's own "
        "document prefers some documents whatever is asked; that, too, looks like skew. The paper "
        "states 3.1 % of SQuAD's documents for "
        "half of the queries.\n\n![Locality](locality.svg)\n\n"
    )
    second = (
        "Share of the retrievals, in %, that the hottest documents serve: a cache of so many "
        "documents can hit no more. In brackets the null.\n\n"
    )
    tables = f"{markdown(header, rows)}\n\n{second}{markdown(['retrieval', 'top', *percents], hot)}"
    return f"## Locality of real questions (figure 1)\n\n{text}{tables}\n\n"
