"""The body of a chat, through the whole application over a backend that says yes.

Law: the answer is 200, or a 4xx in OpenAI's form; never a 5xx, a traceback or a broken stream, and
200 only for JSON that names the model and has a message.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.serve_fakes import MODEL, chat, data_of, scripted

_APP, _BACKEND = scripted()
_LOOP = asyncio.new_event_loop()
_INSIDE = ("Traceback", 'File \\"', "site-packages", "kvcache_rag/")
_SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions",
    "query_string": b"",
    "root_path": "",
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 80),
}


def seeds() -> list[bytes]:
    """Bodies that use what the schema has."""
    bodies = [
        chat(),
        chat(
            documents=["a", {"id": "b", "title": "t", "text": "c"}, {"data": {"k": [1, {}]}}],
            kvcache={"policy": "cacheblend", "ratio": 0.2},
            max_tokens=8,
            stop=["x", "y"],
        ),
        chat(stream=True, stream_options={"include_usage": True}, temperature=0.5, top_p=1, seed=3),
        chat(
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "user", "content": "b", "name": "c"},
            ],
            response_format={"type": "text"},
            metadata={"a": None},
            logit_bias={},
            n=1,
        ),
    ]
    return [json.dumps(body).encode() for body in bodies]


def check(data: bytes) -> bool:
    """Whether the body is answered."""
    _BACKEND.works.clear()
    status, headers, body = _LOOP.run_until_complete(_asked(data))
    text = body.decode()
    assert not any(inside in text for inside in _INSIDE if inside.encode() not in data), text
    assert b"x-request-id" in headers
    if status != 200:
        assert 400 <= status < 500, text
        error = json.loads(text)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, text
        assert error["message"]
        return False
    asked = json.loads(data)
    assert asked["model"] == MODEL
    assert asked["messages"]
    if headers[b"content-type"].startswith(b"text/event-stream"):
        assert asked["stream"] is True
        assert data_of(text)[-1] == "[DONE]"
    else:
        assert json.loads(text)["object"] == "chat.completion"
    return True


async def _asked(data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    sent = False
    status, headers, body = 0, {}, bytearray()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client stays
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        body.extend(message.get("body", b""))

    fields = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    fields.append((b"content-length", str(len(data)).encode()))
    await _APP({**_SCOPE, "headers": fields, "state": {}}, receive, send)
    return status, headers, bytes(body)
