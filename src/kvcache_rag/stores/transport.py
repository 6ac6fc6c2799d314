"""Talking to a remote through fsspec: in time or not at all, and never with a secret in a message.

A driver may hang, wait through retries of its own, or raise anything.  So every call runs in a
thread of its own that is given up on when its time is over, and a remote that failed is left alone
for a while.
"""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.forks import new_lock, new_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


T = TypeVar("T")

_EXTRAS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
}

# Here a PUT shows the whole object or none; elsewhere it has to be renamed into place.
_ATOMIC = {*_EXTRAS, "memory"}

_FOLDERS = {"file", "local"}

_IN_A_ROW = 3  # failures after which a remote is left alone

_AT_ONCE = 32  # calls that may be under way, hung ones among them

_SECRET = re.compile(r"(?i)((?:sig|signature|token|key|secret|password|credential)=)[^&\s'\"]+")


class RemoteFailedError(OSError):
    """The remote failed, ran out of time, or is left alone after such."""


class Breaker:
    """Skips a remote for `pause` seconds after failures in a row, or after one that took too long.

    Then one call at a time tries again.
    """

    def __init__(self, pause: float) -> None:
        """Start with a remote that is believed to work."""
        self.pause = pause
        self._lock = new_lock()
        self._failures = 0
        self._until: float | None = None

    def admits(self) -> bool:
        """Whether the remote may be called now; a call that is admitted after a pause is alone."""
        with self._lock:
            if self._until is None:
                return True
            now = time.monotonic()
            if now < self._until:
                return False
            self._until = now + self.pause
            return True

    def is_open(self) -> bool:
        """Whether the next call would be skipped."""
        with self._lock:
            return self._until is not None and time.monotonic() < self._until

    def succeeded(self) -> None:
        """Note an answer in time."""
        with self._lock:
            self._failures, self._until = 0, None

    def failed(self, *, late: bool) -> None:
        """Note a failure; `late` ones are dear, so one of them is enough."""
        with self._lock:
            self._failures += 1
            if late or self._failures >= _IN_A_ROW:
                self._until = time.monotonic() + self.pause


class Transport:
    """A file system of fsspec at one URL.

    Attributes:
        url: Where, without credentials.
        root: The path of the URL, as the file system names it.
        renames: Whether a file must be renamed into place to appear whole.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        timeout: float,
        retries: int,
        pause: float,
    ) -> None:
        """Find the driver; the remote is not called.

        Raises:
            InvalidInputError: If the URL names no protocol that fsspec knows.
            MissingExtraError: If the driver is not installed.
        """
        self._protocol, driver = _driver(url)
        self._options = {**_defaults(self._protocol, timeout), **options}
        self.url, hidden = _public(url)
        self._hidden = sorted({*hidden, *_leaves(options)}, key=len, reverse=True)
        self.root = str(driver._strip_protocol(url)).rstrip("/")
        if self._protocol in _FOLDERS:
            self._options["root"] = self.root or "/"
        self.renames = self._protocol not in _ATOMIC
        self._driver = driver
        self._timeout = timeout
        self._retries = retries
        self.breaker = Breaker(pause)
        self._lock = new_lock()
        self._slots = new_slots(_AT_ONCE)
        self._opened: tuple[int, Any] = (0, None)

    def run(self, call: Callable[[Any], T], *, timeout: float | None = None) -> T:
        """Call the file system and wait for the answer.

        Args:
            call: Gets the file system; may go on after this method gave up on it.
            timeout: Seconds instead of the usual ones; such a call is made in any case.

        Raises:
            FileNotFoundError: If that is the answer.
            RemoteFailedError: If there was no answer in time, or an error; its text is safe to log.
        """
        if timeout is None and not self.breaker.admits():
            raise RemoteFailedError(
                f"{self.url} failed and is skipped for {self.breaker.pause:g} s after that"
            )
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        answer = self._begun(lambda: self._attempt(call, deadline), deadline)
        try:
            error = answer.exception(max(0.0, deadline - time.monotonic()))
        except (FutureTimeoutError, CancelledError):
            self.breaker.failed(late=True)
            raise RemoteFailedError(f"{self.url} gave no answer in time") from None
        if error is None or isinstance(error, FileNotFoundError):
            self.breaker.succeeded()
        else:
            self.breaker.failed(late=False)
        if error is not None:
            raise self._safe(error) from None
        return answer.result()

    def _begun(self, call: Callable[[], T], deadline: float) -> Future[T]:
        """One call in a daemon thread: a hung one must not keep the process from ending.

        It begins when there is a slot before the deadline, which the thread frees; else never.
        """
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # whatever a driver raises is the caller's to judge
                answer.set_exception(error)
            finally:
                self._slots.release()

        if self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                threading.Thread(target=work, name="kvcache-rag-remote", daemon=True).start()
            except RuntimeError:  # no more threads
                self._slots.release()
                answer.cancel()
        return answer

    def _attempt(self, call: Callable[[Any], T], deadline: float, attempt: int = 0) -> T:
        pause = 0.05 * 4**attempt
        try:
            return call(self._filesystem())
        except FileNotFoundError:
            raise
        except Exception:
            if attempt == self._retries or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        return self._attempt(call, deadline, attempt + 1)

    def _filesystem(self) -> Any:
        """The driver's file system, made here because some ask the network when they are made."""
        with self._lock:
            process, filesystem = self._opened
            if process != os.getpid():  # connections do not survive a fork
                filesystem = self._driver(**self._options)
                self._opened = (os.getpid(), filesystem)
            return filesystem

    def _safe(self, error: BaseException) -> OSError:
        text = type(error).__name__
        with suppress(Exception):  # an error's own text may be one
            text = f"{text}: {error}"
        for secret in self._hidden:
            text = text.replace(secret, "***")
        text = _SECRET.sub(r"\1***", " ".join(text.split()))[:300]
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else RemoteFailedError
        return kind(f"{self.url}: {text}")


def _driver(url: str) -> tuple[str, Any]:
    protocol, separator, _ = url.partition("://")
    if not separator:
        raise InvalidInputError(
            f"{_public(url)[0]!r} is not a URL; write s3://bucket/folder or file:///folder"
        )
    package, extra = _EXTRAS.get(protocol, ("fsspec", "s3"))
    if protocol in _FOLDERS:
        from kvcache_rag.stores.local import PrivateFiles  # fsspec is slow to import

        return protocol, PrivateFiles
    try:
        return protocol, import_module("fsspec").get_filesystem_class(protocol)
    except ImportError:
        raise MissingExtraError(package, extra) from None
    except ValueError:
        raise InvalidInputError(
            f"fsspec knows no protocol {protocol!r}; use s3, gs, az or file"
        ) from None


def _defaults(protocol: str, timeout: float) -> dict[str, Any]:
    # Nobody else's connections, and no listing from before another process wrote.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        # Its own retries would outlast ours, in a thread that nobody waits for.
        options["config_kwargs"] = {
            "connect_timeout": timeout,
            "read_timeout": timeout,
            "retries": {"max_attempts": 0},
        }
    return options


def _public(url: str) -> tuple[str, list[str]]:
    """The URL without user, password and query, and what was taken out."""
    parts = urlsplit(url)
    hidden = [text for text in (parts.username, parts.password, parts.query) if text]
    if parts.query:
        url = url.replace(f"?{parts.query}", "?***")
    user, at, _ = parts.netloc.rpartition("@")
    return (url.replace(f"{user}@", "***@", 1) if at else url), hidden


def _leaves(value: Any) -> Iterator[str]:
    """Every text in nested options that is long enough to be told from a common word."""
    if isinstance(value, str) and len(value) >= 4:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
