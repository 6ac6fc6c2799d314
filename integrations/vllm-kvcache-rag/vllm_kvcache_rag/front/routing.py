"""Choose the server for a request: the one that has computed most of its chunks.

Rendezvous hashing (Thaler and Ravishankar 1998): every chunk has a server of its own, the same in
every front end, and a server that comes or goes moves its own chunks only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from kvcache_rag.kv.chunk import digest, packed_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def home_of(chunk: Sequence[int], namespace: str, servers: Sequence[str]) -> str:
    """The server of a chunk, given its ids, its tenant and the URLs of all servers."""
    name = digest("kvcache-rag-home", namespace.encode(), packed_ids(chunk))

    def weight(server: str) -> bytes:
        return hashlib.blake2b(f"{name}{server}".encode(), digest_size=16).digest()

    return max(servers, key=weight)


class Routing:
    """Counts what each server has to do.

    Attributes:
        running: Requests that each server answers.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        """Of URLs, one or more."""
        self.servers = tuple(dict.fromkeys(servers))
        self.running: Counter[str] = Counter()

    def choose(
        self, chunks: Sequence[Sequence[int]], namespace: str, without: Collection[str] = ()
    ) -> str | None:
        """The server of most of the chunks' tokens, of equal ones the least busy; None for none."""
        left = [server for server in self.servers if server not in without]
        if not left:
            return None
        tokens: Counter[str] = Counter()
        for chunk in chunks:
            tokens[home_of(chunk, namespace, left)] += len(chunk)
        return max(left, key=lambda server: (tokens[server], -self.running[server]))
