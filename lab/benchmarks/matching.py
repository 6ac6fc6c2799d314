"""What finding the chunks of a packed prompt costs: `python -m benchmarks.matching`.

Prompts of 10 chunks among 100,000 known texts of about 600 characters, whose beginnings differ or
are the same (a folder's path, as LlamaIndex writes it before a node); and one with no known text.
"""

from __future__ import annotations

import random
import time
from statistics import median

from kvcache_rag.integration import KnownTexts

TEXTS, CHUNKS, ROUNDS = 100_000, 10, 50
BEGINNINGS = {"own beginnings": "", "one beginning": "file_path: documents/handbook/volume-1/"}


def _text(rng: random.Random, beginning: str) -> str:
    words = ("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(100))
    return f"{beginning}{' '.join(words)}."


def _median(known: KnownTexts, prompts: list[str], found: int) -> float:
    times = []
    for prompt in prompts:
        started = time.perf_counter()
        count = len(known.find(prompt))
        times.append(time.perf_counter() - started)
        if count != found:
            raise RuntimeError(f"{count} texts were found, not {found}")
    return median(times)


def main() -> None:
    """Measure both, and print milliseconds."""
    rng = random.Random(0)
    for name, beginning in BEGINNINGS.items():
        texts = [_text(rng, beginning) for _ in range(TEXTS)]
        known = KnownTexts()
        started = time.perf_counter()
        for text in texts:
            known.note(text)
        noting = (time.perf_counter() - started) / TEXTS
        prompts = ["\n\n".join(rng.sample(texts, CHUNKS)) for _ in range(ROUNDS)]
        others = ["\n\n".join(text[:-1] for text in prompt.split("\n\n")) for prompt in prompts]
        print(
            f"{name}: {CHUNKS} of {TEXTS:,} found in {1e3 * _median(known, prompts, CHUNKS):.3f} "
            f"ms, as many cut ones refused in {1e3 * _median(known, others, 0):.3f} ms; "
            f"noting one takes {1e6 * noting:.1f} us"
        )


if __name__ == "__main__":
    main()
