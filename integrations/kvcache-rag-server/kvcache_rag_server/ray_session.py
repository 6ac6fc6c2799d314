"""Ray for the duration of a `with` block: on loopback, with a token, and nothing left behind.

A Ray that anybody can reach runs whatever anybody sends (CVE-2023-48022, CVE-2025-62593), and Ray
asks for no token unless it is told to.  So a Ray that is started here listens on loopback only and
refuses calls without a token, which lies in a private folder together with Ray's sockets and logs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LOOPBACK: Final = "127.0.0.1"
_LONGEST_PLACE: Final = 40  # characters, of the 107 that the path of a socket in it may have
_PREFIX: Final = "ray-"
_ALIVE: Final = "alive"  # a file that is locked as long as the session lasts
_LOCK: Final = fcntl.LOCK_EX | fcntl.LOCK_NB  # refused where another session holds it
_YOUNG: Final = 60.0  # seconds in which a session may not have locked it yet, or Ray still ends
# Ray reads some of it when it is imported, all of it in each of its processes.
_SETTINGS: Final = {
    "RAY_AUTH_MODE": "token",
    # As on systems where Ray has no clusters: "127.0.0.1" then means just that.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's metrics know no token.  Ports that cannot be are how it is told to open none.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
_TOKEN: Final = secrets.token_hex(32)  # Ray remembers the first that it read, for the whole process
_imported_here = False


@contextmanager
def ray_session(
    *,
    address: str | None = None,
    cpus: float | None = None,
    environment: Mapping[str, str],
    **options: Any,
) -> Iterator[Any]:
    """Start Ray on this machine, or join a cluster; it is left, and what was started stopped.

    Enter it in a thread that stays: what Ray starts ends with the thread that started it.

    Args:
        address: `host:port` of a running cluster, whose `RAY_AUTH_MODE` and token come from the
            environment as Ray documents; None starts one on loopback.
        cpus: Places for actors and tasks that a started Ray has; None for the machine's cores.
        environment: Further variables for Ray and its processes, meanwhile.
        options: Further arguments of `ray.init`.

    Yields:
        The module `ray`, initialised.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidInputError: If it cannot be started or reached, runs already in this process, or was
            imported before this could ask for a token.
    """
    if address is not None:
        with _environment({"RAY_USAGE_STATS_ENABLED": "0", **environment}, ()):
            ray = _import()
            with _initialised(ray, address, {"log_to_driver": False, **options}):
                yield ray
        return
    with _folder() as own:
        token = Path(own, "token")
        token.touch(0o600)
        token.write_text(_TOKEN, encoding="ascii")
        settings = {**_SETTINGS, **environment, "RAY_AUTH_TOKEN_PATH": str(token)}
        with _environment(settings, ("RAY_AUTH_TOKEN", "RAY_ADDRESS")):
            ray = _import(needs_token=True)
            own_options = {
                "num_cpus": cpus,
                "_node_ip_address": _LOOPBACK,
                # Not `own` itself: Ray lets everybody write to its folder, so ours lies around it.
                "_temp_dir": os.path.join(own, "r"),
                "include_dashboard": False,
                "log_to_driver": False,
                **options,
            }
            with _initialised(ray, "local", own_options):
                yield ray


@contextmanager
def _folder() -> Iterator[str]:
    """A private folder for one session; those of sessions that were killed are removed."""
    place = _place()
    _remove_dead(place)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True) as own,
        open(os.path.join(own, _ALIVE), "wb") as file,
    ):
        fcntl.flock(file, _LOCK)  # until this process ends, however that is
        yield own


def _remove_dead(place: str) -> None:
    """Remove private folders of this user that no process holds any more."""
    with suppress(OSError):
        for entry in os.scandir(place):
            with suppress(OSError):
                if entry.name.startswith(_PREFIX) and _is_private(entry.path):
                    with open(os.path.join(entry.path, _ALIVE), "rb") as file:
                        fcntl.flock(file, _LOCK)
                        if time.time() - os.fstat(file.fileno()).st_mtime > _YOUNG:
                            shutil.rmtree(entry.path, ignore_errors=True)


def _is_private(path: str) -> bool:
    status = os.lstat(path)
    return (
        status.st_uid == os.getuid()
        and stat.S_ISDIR(status.st_mode)
        and not stat.S_IMODE(status.st_mode) & 0o077
    )


def _place() -> str:
    folder = tempfile.gettempdir()
    if len(folder) <= _LONGEST_PLACE or not os.path.isdir("/tmp"):
        return folder
    return "/tmp"  # sockets lie in it


@contextmanager
def _environment(settings: Mapping[str, str], without: tuple[str, ...]) -> Iterator[None]:
    names = [*settings, *without]
    before = {name: os.environ.get(name) for name in names}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _import(*, needs_token: bool = False) -> Any:
    """The module; a started Ray needs that its settings were there when it was first imported."""
    global _imported_here
    if needs_token and "ray" in sys.modules and not _imported_here:
        raise InvalidInputError(
            "Ray was imported before it could be told to ask for a token; start this in a process "
            "of its own, or give the address of your cluster"
        )
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    _imported_here = _imported_here or needs_token
    if ray.is_initialized():
        raise InvalidInputError("Ray runs in this process already; call ray.shutdown() first")
    return ray


@contextmanager
def _initialised(ray: Any, address: str, options: Mapping[str, Any]) -> Iterator[None]:
    handlers = _handlers()
    try:
        try:
            ray.init(address=address, logging_level=logging.WARNING, **options)
        except Exception as error:  # ConnectionError, TimeoutError, RuntimeError and others
            place = "on this machine" if address == "local" else f"at {address}"
            verb = "started" if address == "local" else "reached"
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InvalidInputError(f"Ray cannot be {verb} {place}: {reason}") from error
        yield
    finally:
        ray.shutdown()
        _restore(handlers)


def _handlers() -> dict[int, Any]:
    """Ray takes the handlers of signals over in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        with suppress(TypeError, ValueError):  # None: not made by Python
            signal.signal(number, handler)
