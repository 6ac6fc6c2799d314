"""What is frozen in `tests/golden`: cases, and how today's code says each of them.

`tools/freeze.py` writes what these functions return, `tests/test_golden.py` compares it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from prometheus_client.parser import text_string_to_metric_families

from kvcache_rag import Answer, DiskStore, Engine, Metrics, PromptTemplate
from kvcache_rag.codecs import CODECS, Codec
from kvcache_rag.codecs import by_name as codec_by_name
from kvcache_rag.kv import ChunkKV
from kvcache_rag.kv.chunk import ChunkKey, ChunkLayout, GroupLayout, chunk_key
from kvcache_rag.policies import policy_by_name
from kvcache_rag_lab.finetune.config import FinetuneConfig, JsonlData
from kvcache_rag_lab.scoring.ask import Place, Record
from kvcache_rag_lab.scoring.question import Question
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import BackendRequest, Event, Failed, Finished, Piece, Started
from kvcache_rag_server.keys import Caller
from tests.serve_fakes import Scripted, chat, client, settings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from fastapi import FastAPI

ROOT: Final = Path(__file__).resolve().parent.parent
GOLDEN: Final = Path(__file__).resolve().parent / "golden"


def to_json(values: Any) -> str:
    """JSON as it stands in the golden files."""
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------------- chunks
TEXTS: Final = ("The staff size of Skonhi is 3874.", "Bekli was born in Vegruwu.")
QUESTION: Final = "What is the staff size of Skonhi?"
TENANT: Final = "acme"
VARIANTS: Final = {
    "native-bfloat16": ("native", "bfloat16"),
    "native-float32": ("native", "float32"),
    "int8-bfloat16": ("int8", "bfloat16"),
    "int4-bfloat16": ("int4", "bfloat16"),
}
"""Codec and dtype of the engines that wrote `tests/golden/store`."""
MAIN: Final = "native-bfloat16"
"""The variant that the Chroma collections refer to."""
MADE_SPEC: Final = "5b" * 32
MADE_NAMESPACE: Final = "made"
_MADE_GROUPS: Final = (
    GroupLayout(layers=(0, 2), key_shape=(2, 8), value_shape=(2, 8)),
    GroupLayout(layers=(1,), key_shape=(2, 6), value_shape=(3, 4)),
)


def open_engine(folder: Path, variant: str = MAIN) -> Engine:
    """The packaged reader over a folder of chunks."""
    codec, dtype = VARIANTS[variant]
    store = DiskStore(folder, codec=codec_by_name(codec), durable=False)
    return Engine.from_pretrained("tiny", store=store, dtype=dtype, device="cpu")


def layout_of(description: Mapping[str, Any]) -> ChunkLayout:
    """The layout that a `spec.json` tells of; its layers are numbered from 0."""
    groups = tuple(
        GroupLayout(tuple(range(one["layers"])), (*one["key_shape"],), (*one["value_shape"],))
        for one in description["groups"]
    )
    return ChunkLayout(groups, getattr(torch, description["stored_dtype"].removeprefix("torch.")))


def tensors_digest(chunk: ChunkKV) -> str:
    """SHA-256 of tokens, keys and values, bit by bit."""
    state = hashlib.sha256()
    for tensor in (chunk.tokens, *(one for group in chunk.tensors for one in group)):
        state.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def made_chunks() -> Iterator[tuple[str, Codec, ChunkKey, ChunkKV]]:
    """Chunks of no model, by name: every codec and dtype, two groups, K and V of unequal shape."""
    for short in sorted(CODECS):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = f"{short}-{str(dtype).removeprefix('torch.')}"
            tokens = 67  # one group of the int4 codec and a rest
            ids = [(len(name) * 31 + 7 * index) % 1000 for index in range(tokens)]
            key = chunk_key(ids, prefix_ids=[1, 2, 3], spec=MADE_SPEC, namespace=MADE_NAMESPACE)
            layout = ChunkLayout(_MADE_GROUPS, dtype)
            tensors = tuple(
                tuple(_numbers(shape, dtype) for shape in group.shapes(tokens))
                for group in layout.groups
            )
            chunk = ChunkKV(layout, torch.tensor(ids, dtype=torch.int32), key.start, tensors)
            yield name, codec_by_name(short), key, chunk


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of no pattern that every dtype holds exactly."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((index * 7919 + index * index % 101) % 255 - 127) / 32).to(dtype).reshape(shape)


def tree(folder: Path) -> list[str]:
    """Files below a folder but locks, which come and go."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if path.suffix != ".lock")


# ---------------------------------------------------------------------- Chroma
COLLECTIONS: Final = ("llama", "langchain")
DIMENSIONS: Final = 16
LLAMA_METADATA: Final = {"source": "golden.txt"}
"""Of the first LlamaIndex row: it is part of the text that stands in prompts."""


# ---------------------------------------------------------------------- settings
TEMPLATE: Final = PromptTemplate(
    system="Read.\n", chunk_start="[", chunk_end="]\n", question="Q: {question}"
)
API_KEYS: Final = {
    "a-key-in-clear-of-16-letters": Caller("globex", "globex-web"),
    "kv-frozen-key-of-a-tenant": Caller("acme", "key-971df475"),
    "kv-frozen-key-of-the-metrics": Caller("@metrics", "scraper"),
}
FINETUNES: Final = {
    "jsonl": FinetuneConfig(
        model="tiny",
        out=Path("out"),
        data=JsonlData(Path("questions.jsonl"), questions=3),
        plain=Path("plain.jsonl"),
        positions="composite",
        both_masks=True,
        plain_share=0.25,
        steps=7,
        rate=3e-4,
        lora=4,
        precision="bf16",
        attention="sdpa",
        seed=11,
        device="cpu",
        work=Path("work"),
    ),
}
RECORDS: Final = (
    Record(
        Place("reader_single", "q-1", "tiny", "reuse", "", None),
        digest="0a" * 8,
        cluster="c-1",
        scores={"exact_match": 1.0, "f1": 0.5},
        answer="Zürich 442",
        chunk_tokens=91,
        reused_tokens=80,
        recomputed_tokens=11,
        generated_tokens=4,
        times={"ttft": 0.125, "load": 0.5},
        divergence=0.0625,
    ),
    Record(
        Place("reader_single", "q-2", "tiny", "full", "int8", 4),
        digest="0b" * 8,
        cluster="c-1",
        scores={"exact_match": 0.0},
        answer="",
        chunk_tokens=91,
        reused_tokens=0,
        recomputed_tokens=91,
        generated_tokens=0,
    ),
)
NOTES: Final = {"seed": "7", "policies": "reuse, full"}
QUESTIONS: Final = (
    Question("own", "Where?", ("A text.", "Another."), ("here", "there")),
    Question("line 2", "Both?", ("One.",), (), (("a", "b"), ("c",))),
)
INGEST: Final = {
    "model": "tiny",
    "embed": "hash",
    "collection": "docs",
    "chunk_size": 128,
    "chunk_overlap": 8,
    "spec": "5ec0",
}
FULL: Final = (500, 1.25, "a processor, 2 thread(s)")


QUESTION_ROWS: Final[tuple[dict[str, Any], ...]] = (
    {
        "id": "own",
        "question": "Where?",
        "documents": ["A text.", {"text": "Another."}],
        "answers": ["here", "there"],
    },
    {"question": "Both?", "documents": ["One."], "answer_groups": [["a", "b"], ["c"]]},
)
"""As somebody writes `QUESTIONS` down."""


def api_keys_text() -> str:
    """As somebody writes `API_KEYS` down: one in clear, the others as digests."""
    clear, *others = API_KEYS
    tenant, metrics = (hashlib.sha256(key.encode()).hexdigest() for key in others)
    return (
        "# key namespace [name]\n"
        f"{clear} globex globex-web # in clear\n\n"
        f"sha256:{tenant} acme\n"
        f"sha256:{metrics} @metrics scraper\n"
    )


_OF_BOTH: Final[dict[str, Any]] = {
    "context_window": 512,
    "kv_dir": "kv",
    "kv_max_bytes": 1 << 20,
    "gate": "verdict.json",
    "rotation": "copied",
    "system_prompt": "Be brief.",
}


def llama_index_objects() -> dict[str, Any]:
    """Objects whose `to_dict` people keep, with settings that are not the defaults."""
    import chromadb

    from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM, KVCacheVectorStore

    llm = KVCacheLLM(
        model_name="tiny",
        device_map="cpu",
        max_new_tokens=9,
        generate_kwargs={"do_sample": False},
        model_kwargs={"dtype": torch.float32},
        stopping_ids=[5],
        is_chat_model=False,
        **_OF_BOTH,
    )

    rows = chromadb.EphemeralClient().get_or_create_collection("frozen")
    store = KVCacheVectorStore(rows, collection_kwargs={"metadata": {"a": 1}}, show_progress=True)
    return {"embedding": HashEmbedding(dimensions=64, ngrams=(2, 3)), "llm": llm, "store": store}


def langchain_values() -> dict[str, Any]:
    """What a chat model with other settings than the defaults says, and LangChain's cache keeps."""
    from langchain_kvcache_rag import ChatKVCache

    model = ChatKVCache(
        temperature=0.5,
        max_tokens=9,
        stop=["."],
        top_p=0.75,
        top_k=4,
        generate_kwargs={"num_beams": 1},
        overflow="error",
        policy=policy_by_name("legolink:4"),
        max_batch_size=2,
        device="cpu",
        model_kwargs={"dtype": "float32"},
        model="tiny",
        **_OF_BOTH,
    )
    return {
        "identifying": dict(model._identifying_params),
        "ls_params": dict(model._get_ls_params()),
        "settings": model.model_dump(mode="json"),
        "type": model._llm_type,
    }


# ---------------------------------------------------------------------- the server
async def _says(work: BackendRequest) -> AsyncGenerator[Event, None]:
    """Start, say a piece, end; or fail, if that is what is asked for."""
    yield Started(0.25, prefetched=True, batch=2, replica="r1")
    if work.question == "fail":
        yield Failed(503, "server_error", "It is down.")
        return
    yield Piece("yes")
    metrics = Metrics(policy="Reuse()", generated_tokens=1, hits={"memory": 1})
    yield Finished(Answer("yes", metrics, (1,)))


class _Counting(Scripted):
    async def stats(self) -> Mapping[str, Any]:
        """Every counter that a replica can have."""
        states = ("waiting", "running", "answered", "failed", "cancelled", "refused")
        tier = (
            *("bytes", "hits", "misses", "seconds", "bytes_read", "bytes_written", "puts"),
            *("evictions", "corrupt", "put_failures", "failures", "declined"),
        )
        replica = {"replica": "r1", **dict.fromkeys(states, 1)}
        replica["prefetch"] = {"waiting": 1, "prefilled": 2}
        replica["tiers"] = [{"tier": "memory", **dict.fromkeys(tier, 1)}]
        return {"replicas": [replica]}


def build_server(keys: Path | None) -> FastAPI:
    """The server's application, with API keys or without."""
    return build_app(_Counting(_says), settings(api_keys=keys))


def openapi(keys: Path | None) -> dict[str, Any]:
    """The schema without the version."""
    schema: dict[str, Any] = build_server(keys).openapi()
    del schema["info"]["version"]
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    return plain


async def metric_families() -> dict[str, Any]:
    """Type, help and label names of everything at `/metrics`, after one answer and one failure."""
    async with client(build_server(None)) as http:
        for question, status in (("Where?", 200), ("fail", 503)):
            answered = await http.post("/v1/chat/completions", json=chat(question))
            if answered.status_code != status:
                raise RuntimeError(answered.text)
        text = (await http.get("/metrics")).text
    # Metrics with labels have no samples, and so no names of labels, before their first use.
    return {
        family.name: {
            "type": family.type,
            "help": family.documentation,
            "labels": sorted({label for one in family.samples for label in one.labels}),
        }
        for family in text_string_to_metric_families(text)
    }
