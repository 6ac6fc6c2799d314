"""What a Ray that is started here is told, and what is left of it; with a stand-in for Ray."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
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
    with ray_session(environment={}):
        first = ray.folder
        assert not dead.exists()
        os.utime(first / "alive", (0, 0))
        with ray_session(environment={}):
            assert first.is_dir(), "a session that lasts was removed"
    assert all(one.is_dir() for one in others)
    assert not first.exists()


def test_a_cluster_is_joined_with_the_users_own_token(ray: Ray) -> None:
    with ray_session(address="head:6379", environment={}):
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
    with pytest.raises(InvalidInputError, match=said), ray_session(address=address, environment={}):
        pytest.fail("it was not started")
    assert ray.stopped == 1
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        (module, "_imported_here", False, "in a process of its own"),
        (Ray, "is_initialized", lambda _: True, "runs in this process already"),
    ],
    ids=["imported without a token", "started before"],
)
def test_a_ray_that_is_there_already_is_not_started(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any, said: str
) -> None:
    monkeypatch.setattr(place, name, value)
    with pytest.raises(InvalidInputError, match=said), ray_session(environment={}):
        pytest.fail("it was started")
    assert not ray.options


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(module, "_imported_here", True)
    with pytest.raises(MissingExtraError, match=r"kvcache-rag\[ray\]"), ray_session(environment={}):
        pytest.fail("it was started")


# ---------------------------------------------------------------------- Ray itself
SESSION = """
import sys
from kvcache_rag_server.ray_session import ray_session

class Actor:
    def there(self):
        return 1

with ray_session(cpus=1, environment={}) as ray:
    actor = ray.remote(Actor).remote()
    print(ray.get(actor.there.remote()), flush=True)
    sys.stdin.readline()
"""
METHODS = (
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetSystemConfig",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
def test_no_port_of_rays_answers_without_its_token_or_can_be_reached_from_elsewhere() -> None:
    pytest.importorskip("grpc")
    if importlib.util.find_spec("ray") is None:  # importing it would be too early for other tests
        pytest.skip("the extra ray is not installed")
    with subprocess.Popen(
        [sys.executable, "-c", SESSION], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "1\n"
        processes = psutil.Process(session.pid).children(recursive=True)
        tokens, places = set[str](), set[tuple[str, int]]()
        for process in (*processes, psutil.Process(session.pid)):
            if path := process.environ().get("RAY_AUTH_TOKEN_PATH"):
                tokens.add(Path(path).read_text("ascii"))
            places |= {
                (one.laddr.ip, one.laddr.port)
                for one in process.net_connections()
                if one.status == psutil.CONN_LISTEN
            }
        (token,) = tokens
        assert {ip for ip, _ in places} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, places
        known = dict.fromkeys(METHODS, 0)
        answered = {}
        for _, port in places:
            for method in METHODS:
                right, none, wrong = (_code(port, method, each) for each in (token, "", "0" * 64))
                if right not in ("UNAVAILABLE", "UNIMPLEMENTED"):
                    known[method] += 1
                    assert (none, wrong) == ("UNAUTHENTICATED", "UNAUTHENTICATED"), (method, port)
            try:
                url = f"http://127.0.0.1:{port}/metrics"
                answered[port] = httpx.get(url, timeout=10.0).status_code
            except httpx.RemoteProtocolError:  # gRPC, which was asked above
                continue
        assert all(known.values()), known
        assert set(answered.values()) == {401}, answered
        session.communicate("\n", timeout=60.0)
    _, left = psutil.wait_procs(processes, timeout=30.0)
    assert not left


def _code(port: int, method: str, token: str) -> str:
    """Name of the status by which a port answers a call with a token; "" for none."""
    import grpc

    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", metadata=metadata, timeout=5.0)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
