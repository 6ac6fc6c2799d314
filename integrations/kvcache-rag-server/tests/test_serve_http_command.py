"""`kvcache-rag serve`: from arguments to a server, and to its end."""

from __future__ import annotations

import argparse
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from serve_fakes import DEADLINE, chat, scripted
from serve_process import CHAT, started, url_of

from kvcache_rag import PromptTemplate
from kvcache_rag.cli import main
from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag_server import startup
from kvcache_rag_server.commands import serve
from kvcache_rag_server.corpus.worker import BuildSettings
from kvcache_rag_server.listening import listening
from kvcache_rag_server.settings import ServerSettings, is_loopback

if TYPE_CHECKING:
    from pathlib import Path

READY_SECONDS = 15.0


def settings_of(*words: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.model = arguments.model or "tiny"
    return serve.settings_of(arguments)


# ---------------------------------------------------------------------- arguments
def test_arguments_become_settings(tmp_path: Path) -> None:
    (tmp_path / "prompt_template.json").write_text("{}")
    assert settings_of() == ServerSettings(model="tiny")
    words = f"""
        some/model --kv-dir kv --kv-codec int8 --port 0 --policy cacheblend:0.2
        --prefetch cpu --prefetch-after 0 --max-batch 4 --max-waiting 9
        --max-documents 5 --max-concurrency 6 --max-body-seconds 8
        --allowed-hosts a --allowed-hosts b --memory-bytes 1kB --served-name m --template {tmp_path}
    """
    given = settings_of(*words.split())
    assert given == ServerSettings(
        model="some/model",
        kv_dir="kv",
        kv_codec="int8",
        port=0,
        policy="cacheblend:0.2",
        prefetch="cpu",
        prefetch_after=0.0,
        max_batch=4,
        max_waiting=9,
        allowed_hosts=("a", "b"),
        memory_bytes=1000,
        served_name="m",
        template=PromptTemplate(),
        max_documents=5,
        max_body_seconds=8,
        max_concurrency=6,
    )
    assert given.name == "m"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--host 0.0.0.0", "--api-keys FILE"),
        ("--host example.org", "--allow-anonymous"),
        ("--max-batch 0", "max_batch"),
        ("--max-documents 0", "documents"),
        ("--prefetch-after -1", "prefetch_after"),
        ("--grace -1", "grace"),
        ("--grace nan", "grace"),
        ("--grace inf", "grace"),
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
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    for level, said in (("warning", ""), ("info", f"{stamp}INFO kvcache_rag_server: opened\n")):
        code = (
            "import logging; from kvcache_rag_server.commands import serve;"
            f"[serve.log_to_stderr('{level}') for _ in '12'];"
            "log = logging.getLogger('kvcache_rag_server');"
            "log.info('opened'); log.warning('%s is full', 'kv')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
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


def test_without_the_extra_the_install_line_is_said(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=re.escape("kvcache-rag[server]")):
        settings_of()


# ---------------------------------------------------------------------- what is opened
def test_a_template_is_named_as_for_build(tmp_path: Path) -> None:
    file = tmp_path / "prompt_template.json"
    with pytest.raises(InvalidInputError, match=r"no prompt_template.json in .*check tem"):
        ServerSettings(model="tiny", template=str(tmp_path))
    file.write_text('{"system": "S ", "chunk_start": "<", "chunk_end": ">"}')
    kv_dir = str(tmp_path / "kv")
    given = PromptTemplate(system="S ", chunk_start="<", chunk_end=">")
    for place in (str(tmp_path), str(file)):
        for prompt in (None, "T "):
            options: dict[str, Any] = {"model": "tiny", "device": "cpu", "system_prompt": prompt}
            served = startup.open_engine(ServerSettings(template=place, **options))
            assert served.template == replace(given, system=prompt or "S ")
            build = BuildSettings(kv_dir=kv_dir, template=given, **options)
            assert served.keys(["a text"]) == build.open_engine().keys(["a text"])


def test_the_revision_reaches_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(name: str, *, options: dict[str, Any], **rest: Any) -> Any:
        asked.append(options)
        raise InvalidInputError("enough")

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    for revision in ("abc", None):
        with pytest.raises(InvalidInputError, match="enough"):
            startup.open_engine(ServerSettings(model="tiny", revision=revision))
    assert asked == [{"revision": "abc"}, {}]


def test_how_requests_wait_reaches_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {
        "prefetch": "same",
        "prefetch_after": 2.0,
        "max_batch": 3,
        "max_waiting": 9,
    }
    monkeypatch.setattr(startup, "open_engine", lambda settings: settings.model)
    monkeypatch.setattr(startup, "LocalBackend", lambda engine, **options: (engine, options))
    opened: Any = startup.local_backend(ServerSettings(model="tiny", served_name="m", **how))
    assert opened == ("tiny", {"name": "m", **how})


def test_a_connection_is_kept_longer_than_clients_keep_it() -> None:
    """Else it is closed in the moment in which a client (httpx: after 5 s) uses it again."""
    app, _ = scripted()
    assert min(startup._PATIENCE, startup.server_of(app).config.timeout_keep_alive) > 10


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tiny --allow-anonymous --host 192.0.2.1", "192.0.2.1 cannot be listened on"),
        ("/no/such/model", "/no/such/model"),
        ("--new-key acme", "--api-keys FILE"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(words: str, says: str, capsys: Any) -> None:
    assert main(["serve", "--port", "0", *words.split()]) == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------------- a process
def seconds_of_children() -> float:
    """CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_server_is_ready_soon_answers_and_ends(tmp_path: Path) -> None:
    """Ready within 15 s where nothing else runs: all that is computed until the end takes less."""
    before = seconds_of_children()
    words = ("tiny", "--kv-dir", str(tmp_path / "kv"), "--port", "0")
    with started(*words) as (process, line, log):
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
        rest, _ = process.communicate(timeout=DEADLINE)
        begun, ended = log.read_text().splitlines()
    assert (process.returncode, rest) == (0, "")
    assert begun == "loading tiny ..."
    assert ended == f"kvcache-rag: stopped; chunks in {tmp_path / 'kv'} are kept"
    assert reply.json()["kvcache"]["policy"].startswith("Reuse")
    assert seconds_of_children() - before < READY_SECONDS


def test_more_connections_than_descriptors_fill_no_log_and_wait(tmp_path: Path) -> None:
    """The log grew by two megabytes a second."""
    with started("tiny", "--port", "0") as (process, line, log), ExitStack() as stack:
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
        process.wait(DEADLINE)
        errors = log.read_text()
    assert errors.count("connections wait until others end") == 1, errors[-2000:]
    assert errors.count("\n") < 5, errors[-2000:]
