"""Carry trace contexts of requests from their headers through the queue to the answer.

What spans are made of is the core's (`kvcache_rag.generation.telemetry`).
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache_rag.generation.telemetry import API, CARRIED, Clock, traced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def carried(headers: Mapping[str, str]) -> dict[str, str]:
    """What of a request its spans go on from, as plain values; {} where nobody makes spans.

    A span that is current, as of an instrumented HTTP server, comes before the request's headers.
    """
    if API not in sys.modules:
        return {}
    from opentelemetry import propagate, trace

    if trace.get_current_span().get_span_context().is_valid:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier
    names = sorted(propagate.get_global_textmap().fields)
    return {name: headers[name] for name in names if name in headers}


@contextmanager
def continued(requests: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[None]:
    """Spans of answers go on from where their requests come from.

    Args:
        requests: Of each that is answered within, in order, what `carried` gave, and the seconds
            for which it waited until now.
    """
    made = traced() if any(carrier for carrier, _ in requests) else None
    if made is None:
        yield
        return
    from opentelemetry import propagate

    clock, now = Clock(), time.perf_counter()
    contexts = [propagate.extract(carrier) for carrier, _ in requests]
    for (carrier, waited), context in zip(requests, contexts, strict=True):
        if carrier:
            begin = clock.at(now - waited)
            made.start_span("kvcache_rag.queue", context, start_time=begin).end()
    token = CARRIED.set(contexts)
    try:
        yield
    finally:
        CARRIED.reset(token)


@contextmanager
def attached(carrier: Mapping[str, str]) -> Iterator[None]:
    """Spans that begin within go on from where a request comes from.

    Args:
        carrier: What `carried` gave.
    """
    if not carrier:
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)
