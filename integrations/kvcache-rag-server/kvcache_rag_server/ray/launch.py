"""`kvcache-rag serve --replicas N`: start Ray and the replicas, give a backend, end everything.

The HTTP layer runs here, in the process that was started, under uvicorn, and reaches the replicas
through a handle of Ray Serve; Serve's own HTTP proxy is not started.  So authentication, limits,
host checks, metrics and what happens when a client goes away are the same code as in a server of
one process, there is no second open port that knows none of them, and a request crosses one process
border instead of two.  What this costs: one process parses all requests.  It needs a small part of
what a replica needs for them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.pretrained import resolve
from kvcache_rag_server.ray.backend import RayBackend, RemotePrefetcher
from kvcache_rag_server.ray.replica import Replica
from kvcache_rag_server.ray_session import ray_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag_server.backend import Retriever
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.settings import ServerSettings


OBJECT_STORE_BYTES: Final = 256 << 20
"""Of Ray's shared memory; only requests and answers above 100 kB pass through it."""

HERE: Final = ("off", "same")
"""Values of `prefetch` that need no process of their own."""

HEALTH_PERIOD, HEALTH_WAIT = 5.0, 60.0
"""Seconds between two questions whether a replica is well, and for its answer: a long prefill on a
busy machine is no illness; a process that died is seen at once."""


@dataclass(frozen=True)
class Shares:
    """What each process is given of the machines.

    Attributes:
        threads: Of PyTorch on the CPU; 0 leaves it to Ray.
        answering: GPUs of a replica.
        generating: GPUs of the generator.
    """

    threads: int
    answering: float
    generating: float

    @classmethod
    def of(cls, settings: ServerSettings, cores: int, gpus: float) -> Shares:
        """Equal parts, of GPUs at most one each.

        Args:
            settings: How many processes, on which devices.
            cores: Of this machine; 0 if the processes run elsewhere.
            gpus: Of the cluster.
        """
        replicas, apart = settings.replicas or 1, is_apart(settings)
        answers_there = gpus > 0 and (settings.device or "cuda").startswith("cuda")
        generates_there = gpus > 0 and apart and settings.prefetch.startswith("cuda")
        users = replicas * answers_there + generates_there
        # Rounded down: Ray knows four decimals.
        each = min(1.0, int(gpus / users * 10_000) / 10_000) if users else 0.0
        on_cpu = replicas * (not answers_there) + (apart and not generates_there)
        threads = max(1, cores // max(1, on_cpu)) if cores else 0
        return cls(threads, each * answers_there, each * generates_there)


def is_apart(settings: ServerSettings) -> bool:
    """Whether chunks of waiting requests are computed by a process of its own."""
    return settings.prefetch not in HERE


@contextmanager
def launch(
    settings: ServerSettings,
    make: Callable[[ServerSettings], LocalBackend],
    *,
    retriever: Retriever | None = None,
) -> Iterator[RayBackend]:
    """Run replicas as long as the context lasts.

    Enter it in a thread that outlives it: Ray's processes end with the thread that started them.

    Args:
        settings: Of the server.  With `ray_address` the replicas are deployed on a cluster that
            runs, by whatever `RAY_AUTH_*` says; else a cluster of this machine's own is started,
            with a fresh token, on loopback.
        make: Loads the model in the process of a replica; a function of a module.
        retriever: Finds documents, in threads of this process; None for none.

    Yields:
        A backend whose replicas have loaded the model.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidInputError: If there is no such model, or the replicas cannot start, with the reason
            that they give.
    """
    replicas, address = settings.replicas or 1, settings.ray_address
    if address is None:
        resolve(settings.model)  # a folder that is not there needs no cluster to be told
    cores = 0 if address else _cores()
    options: dict[str, Any] = {} if address else {"object_store_memory": OBJECT_STORE_BYTES}
    # A process reserves one CPU; Ray's own number of them is only what can be reserved.
    cpus = None if address else max(cores, replicas + 1)
    with ray_session(address=address, cpus=cpus, **options) as ray:
        from ray import serve
        from ray.serve.schema import LoggingConfig

        logs = LoggingConfig(log_level="WARNING", enable_access_log=False)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=logs)
        shares = Shares.of(settings, cores, ray.cluster_resources().get("GPU", 0))
        names = _run(settings, make, shares)
        try:
            yield _backend(settings, names, retriever)
        finally:
            # A cluster of our own ends with the session: at once, as nothing runs any more.
            for name in names if address is not None else ():
                serve.delete(name)


def _run(
    settings: ServerSettings, make: Callable[[ServerSettings], LocalBackend], shares: Shares
) -> list[str]:
    """Start all processes, wait until they have loaded the model, and name what was deployed."""
    from ray import serve

    # Not a fixed name: a cluster may serve several models.
    name = f"kvcache-rag-{secrets.token_hex(4)}"
    alone = replace(_absolute(settings), replicas=None, ray_address=None, chroma=None)
    generating = "off" if is_apart(settings) else settings.prefetch
    device = _visible(settings.device, shares.answering)
    answering = replace(alone, prefetch=generating, device=device)
    targets = [(name, answering, settings.replicas or 1, shares.answering)]
    if is_apart(settings):
        there = _visible(settings.prefetch, shares.generating)
        generator = replace(alone, prefetch="off", device=there)
        targets.append((f"{name}-generator", generator, 1, shares.generating))
    at_once = 2 * (settings.max_waiting + settings.max_batch)
    try:
        serve.run_many(
            [
                serve.RunTarget(
                    target=_deployment(count, gpus, at_once).bind(one, make, shares.threads),
                    name=named,
                    route_prefix=None,
                )
                for named, one, count, gpus in targets
            ]
        )
    except RuntimeError as error:
        raise InvalidInputError(_reason(str(error))) from None
    return [named for named, *_ in targets]


def _deployment(count: int, gpus: float, at_once: int) -> Any:
    from ray import serve

    return serve.deployment(
        Replica,
        num_replicas=count,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        # All that may wait and all that may be answered, and calls that only count: Serve never
        # holds a request back, the replica's own queue does, and refuses what is too much.
        max_ongoing_requests=at_once,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_WAIT,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2.0,
        max_constructor_retry_count=1,  # until one has started; then without end
    )


def _backend(settings: ServerSettings, names: list[str], retriever: Retriever | None) -> RayBackend:
    from ray import serve

    name, *generator = names

    def running() -> int:
        application = serve.status().applications.get(name)
        if application is None:
            return 0
        states: Any = application.deployments[Replica.__name__].replica_states
        return int(states.get("RUNNING", 0))

    ahead = None
    if generator:
        ahead = RemotePrefetcher(serve.get_app_handle(generator[0]), settings.prefetch_after)
    return RayBackend(
        serve.get_app_handle(name),
        name=settings.name,
        replicas=settings.replicas or 1,
        running=running,
        ahead=ahead,
        retriever=retriever,
    )


def _absolute(settings: ServerSettings) -> ServerSettings:
    """The same in a process that works in another folder."""
    store, model, gate = settings.store, settings.model, settings.gate
    auxiliary, template = settings.auxiliary, settings.template
    signing_key = settings.signing_key
    return replace(
        settings,
        store=os.path.abspath(store) if store and "://" not in store else store,
        model=os.path.abspath(model) if os.path.isdir(model) else model,
        gate=os.path.abspath(gate) if gate else gate,
        template=os.path.abspath(template) if template else template,
        signing_key=os.path.abspath(signing_key) if signing_key else signing_key,
        auxiliary=os.path.abspath(auxiliary)
        if auxiliary and os.path.isdir(auxiliary)
        else auxiliary,
    )


def _visible(device: str | None, gpus: float) -> str | None:
    """The device as a process sees it that Ray has given some GPU: the only one it sees."""
    return "cuda" if gpus and (device is None or device.startswith("cuda")) else device


def _cores() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reason(message: str) -> str:
    """What a replica raised when it was made, out of the tracebacks that Ray wraps it in."""
    known = re.findall(r"kvcache_rag\.errors\.\w+: (.+)", message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return known[-1] if known else f"the replicas did not start: {lines[-1] if lines else message}"
