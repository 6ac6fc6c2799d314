"""What a Ray that is started here is told, and what is left of it; with a stand-in for Ray."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag_server import ray_session as module
from kvcache_rag_server.ray_session import ray_session


class Ray(SimpleNamespace):
    """Notes how it was started, and under which environment."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        self.token = ""
        self.error: Exception | None = None
        self.stopped = 0

    def init(self, **options: Any) -> None:
        self.options, self.environment = options, dict(os.environ)
        if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
            self.token = Path(path).read_text()
            self.mode = stat.S_IMODE(Path(path).stat().st_mode)
            self.folder = Path(path).parent
            self.folder_mode = stat.S_IMODE(self.folder.stat().st_mode)
        signal.signal(signal.SIGTERM, lambda *_: None)
        if self.error:
            raise self.error

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.stopped += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    monkeypatch.setitem(sys.modules, "ray", stand_in)  # type: ignore[arg-type]  # a stand-in
    monkeypatch.setattr(module, "_imported_here", True)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return stand_in


def test_a_started_ray_asks_for_a_token_and_is_not_reached_from_elsewhere(ray: Ray) -> None:
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    with ray_session(cpus=2, environment={"RAY_X": "1"}, object_store_memory=99) as found:
        assert found is ray
        assert ray.options["address"] == "local"
        assert ray.options["_node_ip_address"] == "127.0.0.1"
        assert (ray.options["num_cpus"], ray.options["object_store_memory"]) == (2, 99)
        assert ray.options["include_dashboard"] is False
        assert ray.environment["RAY_AUTH_MODE"] == "token"
        assert ray.environment["RAY_X"] == "1"
        assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & ray.environment.keys()
        assert len(ray.token) == 64
        assert (ray.mode, ray.folder_mode) == (0o600, 0o700)
        assert Path(ray.options["_temp_dir"]).parent == ray.folder
    assert ray.stopped == 1
    assert not ray.folder.exists()
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_folders_of_killed_sessions_go_and_no_others(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_place", lambda: str(tmp_path))

    def make(name: str, *, mode: int = 0o700, age: float = 3600.0, mark: str = "alive") -> Path:
        folder = tmp_path / name
        (folder / "r").mkdir(parents=True)
        (folder / mark).touch()
        os.utime(folder / mark, (time.time() - age,) * 2)
        folder.chmod(mode)
        return folder

    dead = make("ray-dead")
    others = [
        make("ray-public", mode=0o755),
        make("ray-young", age=1.0),
        make("ray-unmarked", mark="other"),
        make("other-dead"),
    ]
    with ray_session():
        first = ray.folder
        assert not dead.exists()
        os.utime(first / "alive", (0, 0))
        with ray_session():
            assert first.is_dir(), "a session that lasts was removed"
    assert all(one.is_dir() for one in others)
    assert not first.exists()


def test_a_cluster_is_joined_with_the_users_own_token(ray: Ray) -> None:
    with ray_session(address="head:6379"):
        assert ray.options["address"] == "head:6379"
        assert ray.environment["RAY_AUTH_TOKEN"] == "the user's"
        assert "RAY_AUTH_MODE" not in ray.environment
        assert not ray.token
        assert "_temp_dir" not in ray.options
    assert ray.stopped == 1


@pytest.mark.parametrize(
    ("address", "said"),
    [(None, "Ray cannot be started on this machine: no room"), ("a:1", "reached at a:1: no room")],
)
def test_a_ray_that_does_not_come_is_one_sentence(ray: Ray, address: str | None, said: str) -> None:
    ray.error = ConnectionError("no\nroom")
    before = dict(os.environ)
    with pytest.raises(InvalidInputError, match=said), ray_session(address=address):
        pytest.fail("it was not started")
    assert ray.stopped == 1
    assert dict(os.environ) == before


def test_a_ray_that_was_imported_without_a_token_is_not_started(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_imported_here", False)
    with pytest.raises(InvalidInputError, match="in a process of its own"), ray_session():
        pytest.fail("it was started")
    assert not ray.options
    monkeypatch.setattr(module, "_imported_here", True)
    monkeypatch.setattr(Ray, "is_initialized", lambda _: True)
    with pytest.raises(InvalidInputError, match="runs in this process already"), ray_session():
        pytest.fail("it was started twice")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(module, "_imported_here", True)
    with pytest.raises(MissingExtraError, match=r"kvcache-rag\[ray\]"), ray_session():
        pytest.fail("it was started")
