"""`kvcache-rag serve`: from arguments to a server, and to its end."""

from __future__ import annotations

import argparse
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from serve_fakes import DEADLINE, chat

from kvcache_rag import PromptTemplate
from kvcache_rag.cli import main
from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag_server import startup
from kvcache_rag_server.commands import serve
from kvcache_rag_server.listening import listening
from kvcache_rag_server.settings import ServerSettings, is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = "/v1/chat/completions"
READY_SECONDS = 15.0


def settings_of(*words: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.model = arguments.model or "tiny"
    return serve.settings_of(arguments)


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, once it has said that it is there; and what it said."""
    command = [sys.executable, "-m", "kvcache_rag.cli", "serve", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        killer = threading.Timer(DEADLINE * 2, process.kill)
        killer.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise AssertionError(process.stderr.read() if process.stderr else "")
            yield process, line
        finally:
            killer.cancel()
            if process.poll() is None:
                process.kill()


def url_of(line: str) -> str:
    found = re.search(r" at (http://[^ ]+)/v1,", line)
    assert found, line
    return found[1]


# ---------------------------------------------------------------------- arguments
def test_arguments_become_settings(tmp_path: Path) -> None:
    (tmp_path / "prompt_template.json").write_text("{}")
    assert settings_of() == ServerSettings(model="tiny")
    words = """
        some/model --kv-dir kv --port 0 --policy cacheblend:0.2
        --prefetch cpu --prefetch-after 0 --max-batch 4 --max-waiting 9
        --kv-codec int8
        --max-documents 5 --max-concurrency 6 --max-total-concurrency 7
        --allowed-hosts a --allowed-hosts b --memory-bytes 1kB --served-name m
        --template {folder} --revision v2 --max-body-seconds 8
    """
    given = settings_of(*words.format(folder=tmp_path).split())
    assert given == ServerSettings(
        model="some/model",
        kv_dir="kv",
        port=0,
        policy="cacheblend:0.2",
        prefetch="cpu",
        prefetch_after=0.0,
        max_batch=4,
        max_waiting=9,
        kv_codec="int8",
        allowed_hosts=("a", "b"),
        memory_bytes=1000,
        served_name="m",
        template=PromptTemplate(),
        revision="v2",
        max_documents=5,
        max_body_seconds=8,
        max_concurrency=6,
        max_total_concurrency=7,
    )
    assert given.name == "m"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--host 0.0.0.0", "--api-keys FILE"),
        ("--host example.org", "--allow-anonymous"),
        ("--port 70000", "port cannot be used: must be less"),
        ("--policy cacheblnd", "did you mean cacheblend"),
        ("--max-batch 0", "max_batch"),
        ("--max-documents 0", "documents"),
        ("--prefetch-after -1", "prefetch_after"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(says)):
        settings_of(*words.split())


def test_beyond_loopback_somebody_has_to_have_said_so(tmp_path: Path) -> None:
    assert settings_of("--host", "0.0.0.0", "--allow-anonymous").host == "0.0.0.0"
    assert settings_of("--host", "::", "--api-keys", str(tmp_path / "keys")).host == "::"
    for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        assert settings_of("--host", host).host == host
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        assert not is_loopback(host)


def test_what_is_logged_has_time_level_and_logger() -> None:
    code = (
        "import logging; from kvcache_rag_server.commands import serve;"
        "serve.log_to_stderr('{level}');"
        "serve.log_to_stderr('{level}'); log = logging.getLogger('kvcache_rag_server');"
        "log.info('opened'); log.warning('%s is full', 'kv')"
    )
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    for level, said in (("warning", ""), ("info", f"{stamp}INFO kvcache_rag_server: opened\n")):
        command = [sys.executable, "-c", code.format(level=level)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        pattern = f"{said}{stamp}WARNING kvcache_rag_server: kv is full\n"
        assert re.fullmatch(pattern, done.stderr), done.stderr


def test_a_store_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    startup._check_store(settings_of("--kv-dir", "/proc/1/kv"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("the store /proc/1/kv cannot be written (No such file or dir")
    for words in ((), ("--kv-dir", "."), ("--kv-dir", "s3://bucket/kv")):
        startup._check_store(settings_of(*words))
    assert len(caplog.records) == 1


def test_a_key_is_made_and_shown_once(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "keys"
    assert main(["serve", "--api-keys", str(file), "--new-key", "acme"]) == 0
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert key not in file.read_text()
    assert "acme" in file.read_text()
    assert str(file) in shown.err
    assert main(["serve", "--new-key", "acme"]) == 2
    assert "--api-keys FILE" in capsys.readouterr().err


def test_without_the_extra_the_install_line_is_said(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=re.escape("kvcache-rag[server]")):
        settings_of()


# ---------------------------------------------------------------------- what is opened
def test_a_store_is_memory_before_what_was_named(tmp_path: Path) -> None:
    plain = startup.open_store(ServerSettings(model="tiny", memory_bytes=5))
    assert isinstance(plain, MemoryStore)
    assert plain.max_bytes == 4, "the rest is for combinations"
    folder = startup.open_store(
        ServerSettings(model="tiny", kv_dir=str(tmp_path / "kv"), kv_max_bytes=7, kv_codec="int8")
    )
    assert isinstance(folder, TieredStore)
    memory, disk = folder.tiers
    assert isinstance(memory, MemoryStore)
    assert isinstance(disk, DiskStore)
    assert (disk.max_bytes, disk.codec.name) == (6, "int8-kc-vt")
    remote = startup.open_store(ServerSettings(model="tiny", kv_dir="memory://bucket/kv"))
    assert isinstance(remote, TieredStore)
    assert isinstance(remote.tiers[1], RemoteStore)


def test_a_template_is_named_as_for_build(tmp_path: Path) -> None:
    file = tmp_path / "prompt_template.json"
    with pytest.raises(InvalidInputError, match=r"no prompt_template.json in .*check tem"):
        ServerSettings(model="tiny", template=str(tmp_path))
    file.write_text('{"system": "S ", "chunk_start": "<", "chunk_end": ">"}')
    assert ServerSettings(model="tiny").template is None
    for place in (tmp_path, file):
        given = ServerSettings(model="tiny", template=str(place))
        found = given.template
        assert found is not None
        assert found.wrap("a") == "<a>"
    assert startup.open_engine(given.model_copy(update={"device": "cpu"})).template == found
    told = given.model_copy(update={"device": "cpu", "system_prompt": "T "})
    assert startup.open_engine(told).template == replace(found, system="T ")


def test_the_instruction_before_the_chunks_is_the_servers() -> None:
    own = startup.open_engine(ServerSettings(model="tiny", device="cpu"))
    told = startup.open_engine(
        ServerSettings(model="tiny", device="cpu", system_prompt="Be brief. ")
    )
    assert told.template.system == "Be brief. "
    assert told.template.chunk_start == own.template.chunk_start
    assert told.keys(["a"]) != own.keys(["a"])


# ---------------------------------------------------------------------- the socket
def test_a_port_in_use_is_said_before_torch_is_imported() -> None:
    with listening("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        script = (
            "import sys; from kvcache_rag.cli import main; "
            f"print(main(['serve', 'tiny', '--port', '{port}']), 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert f"port {port} of 127.0.0.1 is in use" in done.stderr
    assert "--port" in done.stderr
    assert done.stderr.count("\n") == 1


def test_localhost_is_the_address_that_clients_try() -> None:
    with listening("localhost", 0) as listener:
        host, port = listener.getsockname()
        assert (host, port > 0) == ("127.0.0.1", True)
        with pytest.raises(InvalidInputError, match="in use"), listening("127.0.0.1", port):
            pass
    with pytest.raises(InvalidInputError, match="no address"), listening("no host", 0):
        pass


def test_an_address_of_another_machine_is_no_place_to_listen(capsys: Any) -> None:
    assert main(["serve", "tiny", "--allow-anonymous", "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "192.0.2.1 cannot be listened on" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_sentence(capsys: Any) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_the_line_says_what_is_served(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    settings = ServerSettings(model="tiny", kv_dir="kv", api_keys=keys)
    assert startup.announcement(settings, "http://h:1") == (
        "serving tiny at http://h:1/v1, chunks in kv, API keys"
    )
    assert startup.announcement(ServerSettings(model="tiny"), "http://h:1") == (
        "serving tiny at http://h:1/v1, chunks in memory only, no API keys"
    )


# ---------------------------------------------------------------------- a process
def test_a_server_is_ready_soon_answers_and_ends(tmp_path: Path) -> None:
    """Ready within 15 s where nothing else runs: all that is computed until the end takes less."""
    before = _seconds_of_children()
    with started("tiny", "--kv-dir", str(tmp_path / "kv"), "--port", "0") as (process, line):
        assert line.startswith("kvcache-rag: serving tiny at http://127.0.0.1:")
        url = url_of(line)
        assert line.endswith(f"; look at {url}/\n")
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        body = chat(documents=["The red lamp stands in the hall."])
        reply = httpx.post(url + CHAT, json=body, timeout=DEADLINE)
        assert reply.status_code == 200, reply.text
        body = chat("Tell a long story.", stream=True, max_tokens=60, temperature=2, seed=1)
        with httpx.stream("POST", url + CHAT, json=body, timeout=DEADLINE) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            process.send_signal(signal.SIGINT)
            assert [one for one in lines if one][-1] == "data: [DONE]", "it may end before"
        rest, complaints = process.communicate(timeout=DEADLINE)
    assert (process.returncode, rest) == (0, "")
    begun, ended = complaints.splitlines()
    assert begun == "loading tiny ..."
    assert ended == f"kvcache-rag: stopped; chunks in {tmp_path / 'kv'} are kept"
    assert reply.json()["kvcache"]["policy"].startswith("Reuse")
    assert _seconds_of_children() - before < READY_SECONDS


def _seconds_of_children() -> float:
    """CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_more_connections_than_descriptors_fill_no_log_and_wait(tmp_path: Path) -> None:
    """The log grew by two megabytes a second."""
    with started("tiny", "--port", "0") as (process, line), ExitStack() as stack:
        url = url_of(line)
        address = httpx.URL(url).host, httpx.URL(url).port
        with httpx.Client(base_url=url) as client:
            assert client.get("/health").status_code == 200
        most = psutil.Process(process.pid).num_fds() + 8
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        time.sleep(3)  # in which it tries three times, of which each was told two thousand times
        for one in idle:
            one.close()
        with httpx.Client(base_url=url, timeout=DEADLINE) as client:
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE)
    assert errors.count("connections wait until others end") == 1, errors[-2000:]
    assert errors.count("\n") < 5, errors[-2000:]
