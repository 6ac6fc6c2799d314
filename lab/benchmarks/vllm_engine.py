"""First tokens and throughput of vLLM with the connector and by its own prefill, in turns.

    python -m benchmarks.vllm_engine --venv .venv-vllm
    python -m benchmarks.vllm_engine --venv .venv-vllm --quick --json build/vllm.json

SmolLM2-135M-Instruct, greedy, prompts of exact length (`peers_prompts`), one server.  Every request
has a salt of its own, so no side finds pages of a request before: "stitched" loads every chunk from
the store, in a new order each time; "plain" is the same prompt without boundaries, which vLLM
prefills.  Streams begin together; a stream's first token and the tokens a second of all of them are
measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.common import ROOT, described, load, result_file, write
from benchmarks.peers_prompts import CHUNK, LONGEST, Material, material
from benchmarks.stock import checkpoint
from kvcache_rag.models.pretrained import load_tokenizer
from kvcache_rag_server.http import LostError
from vllm_kvcache_rag.front.client import EngineClient
from vllm_kvcache_rag.transfer.grants import ENVIRONMENT, GrantKey
from vllm_kvcache_rag.transfer.params import FIELD, TransferParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PORT: Final = 8917
NEW: Final = 32
CONTEXTS: Final = (1024, 2048, 4096)
STREAMS: Final = (1, 4, 8)
ROUNDS: Final = {1: 5, 4: 2, 8: 2}
PLAIN, STITCHED = "plain", "stitched"
_START: Final = 180.0


@dataclass(frozen=True)
class Row:
    """One side at one load.

    Attributes:
        side: "plain" or "stitched".
        context: Tokens of the chunks.
        streams: Requests at a time.
        first: Median seconds to the first token, over streams and rounds.
        first_lowest: Of all.
        first_highest: Of all.
        tokens_per_second: Of all streams together, median of the rounds.
        cached: Prompt tokens that were not computed, the fewest of any stream.
        rounds: How many.
    """

    side: str
    context: int
    streams: int
    first: float
    first_lowest: float
    first_highest: float
    tokens_per_second: float
    cached: int
    rounds: int


@contextmanager
def server(venv: Path, model: Path, store: Path, key: str, log: Path) -> Iterator[str]:
    """A server of vLLM with the connector, until the end of the block."""
    transfer = {
        "kv_connector": "KVCacheRAGConnector",
        "kv_connector_module_path": "vllm_kvcache_rag",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_dir": str(store)},
    }
    command = [
        str(venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "smollm2", "--host", "127.0.0.1",
        "--port", str(PORT), "--max-model-len", "8192", "--enforce-eager",
        "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    paths = (ROOT / "src", ROOT / "integrations" / "vllm-kvcache-rag")
    environment = {
        **os.environ, ENVIRONMENT: key, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4", "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }  # fmt: skip
    with log.open("w") as told:
        process = subprocess.Popen(command, env=environment, stdout=told, stderr=told)
        try:
            yield f"http://127.0.0.1:{PORT}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


class Asking:
    """Asks one server."""

    def __init__(self, client: EngineClient, key: GrantKey, made: Material) -> None:
        """Ask about `made`."""
        self._client, self._key, self._made = client, key, made
        self._orders = itertools.count(1)

    async def begin(self) -> None:
        """Wait for the server, let it measure its rotation, and store all chunks."""
        until = time.monotonic() + _START
        while not await self._client.is_healthy():
            if time.monotonic() > until:
                raise RuntimeError("the server of vLLM does not start; its log says why")
            await asyncio.sleep(1)
        law = [self._made.chunks[0][-1]] * 768
        params = TransferParams(0, (768,), mode="law")
        while (reply := await self._whole(law, params)).get("law", "none") is None:
            pass  # it ended before the workers had told
        if reply.get("law") != "":
            raise RuntimeError(f"nothing would be reused: {reply}")
        prefix = list(self._made.prefix)
        for chunk in self._made.chunks[: LONGEST // CHUNK]:
            wanted = TransferParams(len(prefix), (len(chunk),), mode="store")
            while not (await self._whole([*prefix, *chunk], wanted)).get("reused"):
                await asyncio.sleep(0.1)

    async def _whole(self, ids: Sequence[int], params: TransferParams) -> dict[str, Any]:
        body = self._body(list(ids), params, 1)
        found = (await self._client.complete(body)).get("kv_transfer_params") or {}
        return dict(found.get(FIELD, {}))

    def _body(self, ids: list[int], params: TransferParams | None, new: int) -> dict[str, Any]:
        body = {
            "model": "smollm2", "prompt": ids, "max_tokens": new, "temperature": 0.0,
            "ignore_eos": True, "cache_salt": secrets.token_hex(16),
        }  # fmt: skip
        if params is not None:
            granted = replace(params, grant=self._key.issue("", params.digest(ids)))
            body["kv_transfer_params"] = granted.body()
        return body

    async def one(self, side: str, context: int) -> tuple[float, int]:
        """Seconds to the first token of an answer, and prompt tokens that were not computed."""
        number = next(self._orders)
        prompt = self._made.prompt(context, number, number % len(self._made.questions))
        ids = [*prompt["context"], *prompt["query"]]
        chunks = (CHUNK,) * (context // CHUNK)
        params = TransferParams(len(prompt["prefix"]), chunks) if side == STITCHED else None
        body = {**self._body(ids, params, NEW), "stream_options": {"include_usage": True}}
        begun, first, cached = time.perf_counter(), 0.0, 0
        async for part in self._client.stream(body, {}):
            if not first and any(choice.get("text") for choice in part.get("choices", ())):
                first = time.perf_counter() - begun
            usage = part.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        return first, cached

    async def round(self, side: str, context: int, streams: int) -> tuple[list[float], float, int]:
        """First tokens of streams that begin together, tokens a second, and the least cached."""
        begun = time.perf_counter()
        found = await asyncio.gather(*(self.one(side, context) for _ in range(streams)))
        seconds = time.perf_counter() - begun
        return [first for first, _ in found], streams * NEW / seconds, min(c for _, c in found)


async def measured(asking: Asking, contexts: Sequence[int], streams: Sequence[int]) -> list[Row]:
    """All sides at all loads, in turns."""
    await asking.begin()
    rows = []
    for context, count in itertools.product(contexts, streams):
        samples: dict[str, list[Any]] = {PLAIN: [], STITCHED: []}
        for number in range(ROUNDS[count] + 1):
            for side, found in samples.items():
                if not number and (side == PLAIN or count > 1):
                    continue  # the first round is not counted, and need not be long
                sample = await asking.round(side, context, count)
                if number:
                    found.append(sample)
        for side, found in samples.items():
            firsts = [first for one, _, _ in found for first in one]
            row = Row(
                side, context, count, statistics.median(firsts), min(firsts), max(firsts),
                statistics.median(rate for _, rate, _ in found), min(c for *_, c in found),
                len(found),
            )  # fmt: skip
            print(
                f"{context:>5} x {count}  {side:<9}{row.first:8.3f} s "
                f"({row.first_lowest:.3f}-{row.first_highest:.3f})  "
                f"{row.tokens_per_second:7.1f} tokens/s  {row.cached} cached",
                flush=True,
            )
            if side == STITCHED and row.cached < context:
                raise RuntimeError("a stitched prompt was not stitched")
            rows.append(row)
    return rows


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start a server, measure, and say what was measured."""
    dtype = getattr(torch, options.dtype)
    model = checkpoint("smollm2", options.work / f"smollm2-{options.dtype}", dtype)
    made = material(load_tokenizer("smollm2", {}))
    key = secrets.token_hex(32)
    contexts = (1024,) if options.quick else CONTEXTS
    streams = (1, 4) if options.quick else STREAMS
    before = load()
    with server(options.venv, model, folder / "kv", key, options.work / "vllm.log") as url:
        client = EngineClient(url)
        try:
            rows = await measured(Asking(client, GrantKey(key.encode()), made), contexts, streams)
            version = (await client.describe()).version
        finally:
            await client.close()
    return {
        "about": {
            "benchmark": "vllm_engine", **described("cpu", 2), "vllm": version,
            "dtype": options.dtype, "new": NEW, "load_before": before, "load_after": load(),
        },
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--venv", type=Path, required=True, help="an environment with vLLM")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "vllm")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, 1 and 4 streams")
    parser.add_argument("--json", type=Path, default=result_file("vllm_engine"))
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as fresh:
            report = asyncio.run(run(options, Path(fresh)))
    except (RuntimeError, LostError) as error:
        print(f"{error}: {options.work / 'vllm.log'}", file=sys.stderr)
        return 1
    write(options.json, report)
    print(f"wrote {options.json.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
