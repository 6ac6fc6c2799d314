"""What a signing key costs: three MACs by themselves, and in the time to the first token.

    python -m benchmarks.signing

Bytes per second of each MAC, and of the checksum that files have anyway, in pieces of 256 KiB as
stores read them.  Then models with random weights answer over 4,096 tokens of chunks whose files
are in the page cache: not signed, signed by the store's own MAC (GMAC), and by the two others in
its place.  The sides take turns in every round, in turning order; the ratio is the median over the
rounds of a side's time against that of the side without a key.  BLAKE3 is measured where the
package `blake3` is installed; nothing else needs it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from benchmarks import machine
from benchmarks.shapes import CHUNK, PREFIX, QUERY, build_model, build_tokenizer, words
from kvcache_rag import DiskStore, Engine, PromptTemplate, Reuse
from kvcache_rag.stores.signing import Authenticator, Mac, SigningKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CONTEXT: Final = 4096
PIECE: Final = 256 << 10  # as `read_views` hands them on
NBYTES: Final = 64 << 20
TARGET: Final = 1.25
RESULTS: Final = Path(__file__).parent / "results" / "signing.json"
UNSIGNED, GMAC, BLAKE3, BLAKE2B = "no key", "GMAC", "BLAKE3 keyed", "BLAKE2b keyed"


# ---------------------------------------------------------------------- the MACs
class _Keyed:
    """A keyed hash in the form of a GCM that only authenticates."""

    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher
        self.authenticate_additional_data = hasher.update
        self.tag = b""

    def finalize(self) -> None:
        """Make the tag, of GMAC's length."""
        self.tag = self._hasher.digest()[:16]


def _keyed() -> dict[str, Callable[[bytes], Any]]:
    """What makes a hash of a key of 32 bytes, by name."""
    keyed: dict[str, Callable[[bytes], Any]] = {BLAKE2B: lambda key: hashlib.blake2b(key=key)}
    try:
        from blake3 import blake3  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return keyed
    return {BLAKE3: lambda key: blake3(key=key), **keyed}


class OtherKey(SigningKey):
    """A key whose MAC is another one; only files of its own are of any use to it."""

    def __init__(self, make: Callable[[bytes], Any]) -> None:
        super().__init__(b"k" * 32)
        self._make = make

    def authenticator(self, mac: Mac, head: Any) -> Authenticator:
        """What takes in the bytes behind `head`."""
        return Authenticator(_Keyed(self._make(b"k" * 32)), mac, head)


# ---------------------------------------------------------------------- by themselves
def rates(rounds: int) -> list[dict[str, Any]]:
    """Bytes per second of each MAC and of the checksum."""
    data = memoryview(secrets.token_bytes(NBYTES))
    key = SigningKey(b"k" * 32)

    def gmac() -> Any:
        mac = key.new_mac()
        return key.authenticator(mac, str(mac).encode())

    sides: dict[str, Callable[[], Any]] = {GMAC: gmac}
    for name, make in _keyed().items():
        sides[name] = partial(make, b"k" * 32)
    sides["xxh3-128 (no MAC)"] = xxhash.xxh3_128
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for name in _turns([*sides], rounds):
        hasher = sides[name]()
        started = time.perf_counter()
        for begin in range(0, len(data), PIECE):
            hasher.update(data[begin : begin + PIECE])
        seconds[name].append(time.perf_counter() - started)
    return [
        {
            "MAC": name,
            "GB per second": NBYTES / statistics.median(found) / 1e9,
            "fastest": NBYTES / min(found) / 1e9,
            "rounds": rounds,
        }
        for name, found in seconds.items()
    ]


def _turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once per round, every second round backwards."""
    for number in range(rounds):
        yield from names if number % 2 == 0 else reversed(names)


# ---------------------------------------------------------------------- the first token
def first_tokens(shape: str, rounds: int) -> list[dict[str, Any]]:
    """Seconds to the first token of each side over one model."""
    model = build_model(shape, torch.bfloat16)
    model.generation_config.eos_token_id = None
    texts = [words(CHUNK, 100 + index) for index in range(CONTEXT // CHUNK)]
    question = words(QUERY, 7)
    keys: dict[str, SigningKey | None] = {UNSIGNED: None, GMAC: SigningKey(b"k" * 32)}
    keys |= {name: OtherKey(make) for name, make in _keyed().items()}
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for number, (name, key) in enumerate(keys.items()):
            store = DiskStore(Path(folder, str(number)), durable=False, signing_key=key)
            sides[name] = _side(model, store, texts, question)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for name in _turns([*sides], rounds + 1):
            gc.collect()
            seconds[name].append(sides[name]())
        nbytes = sum(path.stat().st_size for path in Path(folder, "0").rglob("*.safetensors"))
    return [
        {
            "shape": shape,
            "MB read": nbytes / 1e6,
            "side": name,
            "ms to the first token": statistics.median(found[1:]) * 1e3,
            "of no key": statistics.median(
                own / other for own, other in zip(found[1:], seconds[UNSIGNED][1:], strict=True)
            ),
            "rounds": rounds,
        }
        for name, found in seconds.items()
    ]


def _side(model: Any, store: DiskStore, texts: Sequence[str], question: str) -> Callable[[], float]:
    template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
    engine = Engine(model, build_tokenizer(), store=store, template=template, rotation="copied")
    chunks = engine.add(texts)

    def run() -> float:
        metrics = engine.generate(question, chunks=chunks, max_new_tokens=1, policy=Reuse()).metrics
        if metrics.hits != {"disk": len(texts)}:
            raise RuntimeError(f"not all chunks came from disk: {metrics.hits}")
        return metrics.ttft

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="*", default=["tiny", "qwen2.5-0.5b"])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "command": "python -m benchmarks.signing",
        **machine.described("cpu", 1),
        "context_tokens": CONTEXT,
        "goal": f"the first token with a key takes at most {TARGET} times as long",
        "by_themselves": rates(parsed.rounds),
        "first_token": [
            row for shape in parsed.shapes for row in first_tokens(shape, parsed.rounds)
        ],
    }
    for row in (*found["by_themselves"], *found["first_token"]):
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    parsed.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
