"""The body of a chat, through the whole application over a backend that says yes.

Law: the answer is 200, or a 4xx in OpenAI's form; never a 5xx, a traceback or a broken stream, and
200 only for JSON that names the model and has a message.
"""

from __future__ import annotations

import asyncio
import json

from tests.serve_fakes import MODEL, chat, client, data_of, scripted

_APP, _BACKEND = scripted()
_LOOP = asyncio.new_event_loop()
_HTTP = client(_APP)
_INSIDE = ("Traceback", 'File \\"', "site-packages", "kvcache_rag/")


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
    sent = {"content": data, "headers": {"content-type": "application/json"}}
    reply = _LOOP.run_until_complete(_HTTP.post("/v1/chat/completions", **sent))
    text = reply.text
    assert not any(inside in text for inside in _INSIDE if inside.encode() not in data), text
    assert "x-request-id" in reply.headers
    if reply.status_code != 200:
        assert 400 <= reply.status_code < 500, text
        error = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, text
        assert error["message"]
        return False
    asked = json.loads(data)
    assert asked["model"] == MODEL
    assert asked["messages"]
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert asked["stream"] is True
        assert data_of(text)[-1] == "[DONE]"
    else:
        assert reply.json()["object"] == "chat.completion"
    return True
