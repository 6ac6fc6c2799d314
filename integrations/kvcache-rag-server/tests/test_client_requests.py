"""What clients really sent (docs/clients.md), with short texts in place of theirs, is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from serve_fakes import data_of
from serve_process import posted

SENT: Final[dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "client_requests.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SENT)
async def test_what_a_client_sent_is_answered(name: str) -> None:
    sent = SENT[name]
    reply, backend = await posted(sent["body"], sent["path"])
    assert reply.status_code == 200, reply.text
    assert len(backend.works) == 1
    if sent["body"].get("stream"):
        assert data_of(reply.text)
