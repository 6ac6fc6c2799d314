"""A question service for two tenants: one model, and nothing else in common.

    python examples/two-tenants/service.py [--port 8080] [--model smollm2] [--data tenants]

The first start makes a key for each tenant and prints it once; `keys.json` keeps only its digest.
"""

import argparse
import hashlib
import json
import secrets
import socket
from pathlib import Path
from typing import Annotated, Any

import chromadb
import uvicorn
from fastapi import Body, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import Field

from kvcache_rag import DiskStore, Engine, KVCacheRagError
from langchain_kvcache_rag import ChatKVCache, HashEmbeddings, KVCacheChroma, KVCacheRAG

Text = Annotated[str, Field(min_length=1, max_length=4000)]
Texts = Annotated[list[Text], Body(embed=True, min_length=1, max_length=100)]


class Tenant:
    """Documents, chunks and chat model of one tenant."""

    def __init__(self, name: str, engine: Engine, client: Any) -> None:
        # What another tenant has cached is computed anew: no answer comes sooner by it.
        self.engine = engine.in_namespace(name)
        self.llm = ChatKVCache(engine=self.engine, max_tokens=64)
        self.store = KVCacheChroma(f"docs-{name}", HashEmbeddings(), client=client, llm=self.llm)

    def add(self, texts: list[str]) -> None:
        self.store.add_texts(texts, ids=[_digest(text) for text in texts])  # once each

    def ask(self, question: str) -> dict[str, Any]:
        found = self.store.similarity_search(question, k=3)
        message = KVCacheRAG(self.llm).invoke({"question": question, "context": found})
        (cost,) = message.response_metadata["kv_cache"]["answers"]
        costs = {name: cost[name] for name in ("reused_tokens", "prefilled_tokens", "ttft")}
        return {"answer": message.text, "sources": [one.page_content for one in found], **costs}

    def forget(self) -> None:
        self.store.reset_collection()
        self.engine.delete_namespace()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def tenant_keys(file: Path) -> dict[str, str]:
    """Tenants by the digest of their key; keys are made and printed if there is no file."""
    if not file.exists():
        keys = {name: secrets.token_urlsafe(24) for name in ("acme", "globex")}
        file.touch(mode=0o600)
        file.write_text(json.dumps({_digest(key): name for name, key in keys.items()}))
        print(*(f"key of {name}: {key}" for name, key in keys.items()), sep="\n", flush=True)
    try:
        return dict(json.loads(file.read_text()))
    except ValueError as error:
        raise SystemExit(f"service: {file} is damaged ({error}); remove it for new keys") from None


def build(model: str, data: Path) -> FastAPI:
    """The service; keys, documents and chunks lie in the folder `data`."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A limit for each tenant: nobody's chunks push out another's.
    engine = Engine.from_pretrained(model, store=DiskStore(data / "kv", quota=2 << 30))
    client = chromadb.PersistentClient(str(data / "db"))
    keys = tenant_keys(data / "keys.json")  # none for a service that does not start
    tenants = {name: Tenant(name, engine, client) for name in keys.values()}
    app = FastAPI(title="two tenants")

    def caller(sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> Tenant:
        if (name := keys.get(_digest(sent.credentials))) is None:
            raise HTTPException(401, "this API key is not known here")
        return tenants[name]  # the tenant is the key's, whatever a body says

    Caller = Annotated[Tenant, Depends(caller)]

    @app.post("/documents")
    def add(texts: Texts, tenant: Caller) -> dict[str, int]:
        tenant.add(texts)
        return {"added": len(texts)}

    @app.delete("/documents")
    def forget(tenant: Caller) -> None:
        tenant.forget()

    @app.post("/ask")
    def ask(question: Annotated[Text, Body(embed=True)], tenant: Caller) -> dict[str, Any]:
        return tenant.ask(question)

    @app.exception_handler(KVCacheRagError)
    async def refuse(_: Request, error: KVCacheRagError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--model", default="smollm2", help="hub id, folder or GGUF file")
    parser.add_argument("--data", type=Path, default=Path("tenants"), help="folder of everything")
    arguments = parser.parse_args()
    try:
        # Whether the port is free is seen before a model is loaded and keys are made.
        with socket.create_server(("127.0.0.1", arguments.port)):
            app = build(arguments.model, arguments.data)
    except (KVCacheRagError, OSError) as error:
        raise SystemExit(f"service: {error}; see --port, --data and --model") from None
    uvicorn.run(app, port=arguments.port)
