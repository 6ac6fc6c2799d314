"""What can go wrong between this process and a replica, as a client reads it.

No exception of Ray reaches a client: its text holds tracebacks, addresses and paths.
"""

from __future__ import annotations

import logging

from kvcache_rag.errors import KVCacheRagError
from kvcache_rag.serve.errors import ApiError
from kvcache_rag.serve.serving import failure
from kvcache_rag.serve.work import (
    NOT_READY,
    OVERLOADED,
    SERVER_ERROR,
    SERVER_FAULT,
    Failed,
)

LOG = logging.getLogger(__name__)

RETRY_AFTER, START = 1.0, 10.0
"""Seconds after which to repeat a request: another replica takes it; or one has to start."""
LOST = "the replica that was answering has ended; repeat the request"
NONE = "no replica is running; repeat the request later"
LATE = "the documents were not retrieved in time; repeat the request later"
FULL = "too many requests wait; repeat the request later"


class LostError(Exception):
    """What a replica was doing was cancelled with it."""


class NoReplicaError(LostError):
    """No replica has been running for as long as a request is made to wait for one."""


def cause_of(error: BaseException) -> BaseException:
    """What a replica raised, without Ray's wrapping; `error` itself if it is not wrapped.

    Args:
        error: As it came from a handle.
    """
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException) and cause is not error:
            return cause_of(cause)
    return error


def is_lost(error: BaseException) -> bool:
    """Whether the replica, or the way to it, has gone; what it was asked is not to blame."""
    from ray import exceptions
    from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

    gone = (
        LostError,
        DeploymentUnavailableError,
        ReplicaUnavailableError,
        exceptions.RayActorError,  # died, or cannot be reached
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,  # an event went with the process that held it
        exceptions.WorkerCrashedError,
        exceptions.TaskCancelledError,  # with the replica: nobody awaits what we cancel
        exceptions.RaySystemError,
    )
    return isinstance(cause_of(error), gone)


def failed_of(error: BaseException) -> Failed:
    """One sentence for the client; what is nobody's fault but ours is logged in full.

    Args:
        error: As it came from a handle.
    """
    from ray.serve.exceptions import BackPressureError

    cause = cause_of(error)
    if is_lost(error):
        LOG.warning("a request was lost: %s", type(cause).__name__)
        if isinstance(cause, NoReplicaError):
            return Failed(NOT_READY, OVERLOADED, NONE, START)
        return Failed(NOT_READY, OVERLOADED, LOST, RETRY_AFTER)
    if isinstance(cause, BackPressureError):
        return Failed(NOT_READY, OVERLOADED, FULL, RETRY_AFTER)
    if isinstance(cause, ApiError):
        return Failed(cause.status, cause.kind, cause.message, cause.retry_after)
    if isinstance(cause, KVCacheRagError):  # the user's mistakes are told, as in one process
        return failure(cause, "a replica")
    LOG.error("a replica failed", exc_info=error)
    return Failed(SERVER_FAULT, SERVER_ERROR, "the server failed to answer; its log says why")


def raised_of(error: BaseException) -> KVCacheRagError:
    """The same as an exception, for calls that answer with a value."""
    cause = cause_of(error)
    if isinstance(cause, KVCacheRagError):
        return cause
    failed = failed_of(error)
    return ApiError(failed.status, failed.message, kind=failed.kind, retry_after=failed.retry_after)
