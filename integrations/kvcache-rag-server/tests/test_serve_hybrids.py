"""The server over models with recurrent layers: the engine's answers, also after a restart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hybrid_reader import FOLDER, IS_READ
from hybrid_reader import asked as read
from serve_fakes import chat, client, data_of, settings
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, Reuse, TieredStore
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = ["The lighthouse keeper is Marlow.", "The harbour was built in 1911.", "It is wet."]
KINDS = [name for name in ("qwen3_5", "mamba2") if name in HYBRIDS]
TEMPLATE = PromptTemplate(system="Read.\n")


async def asked(backend: LocalBackend, documents: list[str], **fields: Any) -> Any:
    body = chat("Who?", documents=documents, max_tokens=6, **fields)
    async with client(build_app(backend, settings())) as http:
        reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return data_of(reply.text) if fields.get("stream") else reply.json()


@pytest.mark.parametrize("name", KINDS)
async def test_answers_come_from_stored_chunks_in_any_order(name: str, tmp_path: Path) -> None:
    model, tokenizer = build(name), byte_tokenizer()
    reference = Engine(model, tokenizer, template=TEMPLATE, store=MemoryStore())
    orders = [DOCUMENTS, DOCUMENTS[::-1], [DOCUMENTS[1], DOCUMENTS[2]]]
    expected = [
        reference.generate("Who?", texts, policy=Reuse(), max_new_tokens=6) for texts in orders
    ]
    tiers = ("", "disk", "memory")
    for restart in range(2):
        store = TieredStore(MemoryStore(), DiskStore(tmp_path, durable=False))
        engine = Engine(model, tokenizer, template=TEMPLATE, store=store)
        backend = LocalBackend(engine, name=name)
        try:
            for number, (texts, answer) in enumerate(zip(orders, expected, strict=True)):
                body = await asked(backend, texts)
                assert body["choices"][0]["message"]["content"] == answer.text
                tier = tiers[2 if number else restart]
                assert body["kvcache"]["hits"] == ({tier: len(texts)} if tier else {})
                usage = body["usage"]
                assert usage["prompt_tokens"] == answer.metrics.prompt_tokens
            at_once = await asyncio.gather(*(asked(backend, texts) for texts in orders * 2))
            for body, answer in zip(at_once, expected * 2, strict=True):
                assert body["choices"][0]["message"]["content"] == answer.text
            *pieces, _, done = await asked(backend, orders[1], stream=True)
            assert done == "[DONE]"
            said = [one["choices"][0]["delta"].get("content") or "" for one in pieces]
            assert "".join(said) == expected[1].text
        finally:
            await backend.close()


@pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")
async def test_a_trained_one_answers_right_in_any_order_after_a_restart(tmp_path: Path) -> None:
    for restart in range(2):
        store = DiskStore(tmp_path, durable=False)
        backend = LocalBackend(Engine.from_pretrained(FOLDER, store=store), name="reader")
        try:
            async with client(build_app(backend, settings())) as http:
                for documents, entity, value in read():
                    body = chat(entity, documents=documents, max_tokens=1)
                    told = (await http.post("/v1/chat/completions", json=body)).json()
                    assert told["choices"][0]["message"]["content"].strip() == value
                    if restart:  # further ones are computed with the question
                        assert told["kvcache"]["hits"] == {"disk": 1}
        finally:
            await backend.close()
