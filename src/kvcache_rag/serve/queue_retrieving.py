"""Retrieval for requests with a query, in threads of its own, while they wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.serve.serving import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvcache_rag.serve.work import Failed, Retriever, Source, Work

    Retrieved = Callable[[Sequence[Source], Failed | None], None]

# At a time: they wait for a database more than they compute.
AT_ONCE = 4


class Retrievals:
    """Retrieves for several requests at a time.  Not thread-safe, but what it calls back is."""

    def __init__(self, retriever: Retriever | None) -> None:
        """Retrieve with `retriever`, or refuse; threads start when they are needed."""
        self._retriever = retriever
        self._pool: ThreadPoolExecutor | None = None

    def refusal(self, work: Work) -> Failed | None:
        """Why nothing can be retrieved for a request."""
        if self._retriever is not None or not work.query:
            return None
        error = InvalidInputError("this server retrieves nothing; send the documents along")
        return failure(error, "retrieval")

    def begin(self, work: Work, done: Retrieved) -> Future[None]:
        """Retrieve for a request; `done` is called in another thread, unless it is cancelled."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, "kvcache-rag-retrieve")
        return self._pool.submit(self._retrieve, work, done)

    def _retrieve(self, work: Work, done: Retrieved) -> None:
        found: Sequence[Source] = ()
        failed = None
        try:
            if self._retriever is not None:
                found = self._retriever.retrieve(work.query, work.top_k, work.namespace)
        except Exception as error:
            failed = failure(error, f"retrieval for request {work.id}")
        done(found, failed)

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
