"""What is planted in a store's folder where a file or a folder belongs: it is neither opened nor
waited for, what it points to stays as it is, and no call of the store hangs or fails a question.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from kvcache_rag.cli import main
from kvcache_rag.errors import ChunkNotFoundError, KVCacheRagError
from kvcache_rag.stores import DiskStore, RemoteStore, filesystem, locks
from tests.contracts import LAYOUT, key_of, make_chunk, same
from tools.scripted import opens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.stores import ChunkStore

pytestmark = pytest.mark.timeout(8)  # a hang fails one case and not the run

CHUNK, OTHER = make_chunk(1), make_chunk(2)
KEY, OTHER_KEY = key_of(CHUNK), key_of(OTHER)


# ---------------------------------------------------------------------- what is planted
def _socket(path: Path, _: Path) -> None:
    place = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(place)


def _device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # zeros without end
    except PermissionError:  # not root
        path.symlink_to("/dev/zero")


def _folder(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "mine").write_bytes(b"mine")


def _huge(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


FORMS: dict[str, Callable[[Path, Path], Any]] = {
    "second name of a file": lambda path, outside: os.link(outside / "twice", path),
    "noise": lambda path, _: path.write_bytes(bytes(range(256))[::-1]),
    "half a number": lambda path, _: path.write_bytes(b"00000000\xff\xfe\x80\x00"),
    "number without end": lambda path, _: path.write_bytes(b"9" * 20),
    "number below zero": lambda path, _: path.write_bytes(b"-" + b"9" * 19),
    "empty file": lambda path, _: path.touch(),
    "huge file": _huge,
}
"""Files, but not those that belong there."""

KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": _socket,
    "device": _device,
    "folder": _folder,
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside / "folder"),
    "link to a pipe": lambda path, outside: path.symlink_to(outside / "pipe"),
    "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "new"),
    "link to itself": lambda path, _: path.symlink_to(path),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What links point to."""
    outside = tmp_path / "outside"
    (outside / "folder" / "below").mkdir(parents=True)
    (outside / "file").write_bytes(b"precious")
    (outside / "twice").write_bytes(b"precious")
    os.link(outside / "twice", outside / "folder" / "twice")
    (outside / "folder" / "file").write_bytes(b"precious")
    (outside / "folder" / "below" / "file").write_bytes(b"precious")
    os.mkfifo(outside / "pipe")
    for path in [*outside.rglob("*"), outside]:
        os.utime(path, (1e9, 1e9))
    return outside


def state(outside: Path) -> list[tuple[Any, ...]]:
    """All of it but the times of reading of folders, which looking here changes, too.

    A second name of a file shares its times with it, and the use of a chunk is noted in them.
    """
    found = []
    for path in [outside, *sorted(outside.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        names = min(status.st_nlink, 2) if path.is_file() else status.st_nlink
        time = 0 if path.name == "twice" else status.st_mtime_ns
        found.append((path, status.st_mode, time, names, content))
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[str]]:
    """Paths in the store's folder that were opened although they are neither file nor folder."""
    wrong: list[str] = []

    def heard(path: str) -> None:
        with suppress(OSError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                wrong.append(path)

    with opens(tmp_path / "kv", heard):
        yield wrong


def plant(kind: str, path: Path, outside: Path) -> None:
    """Put it in the place of whatever is there."""
    filesystem.remove(str(path), [])
    path.parent.mkdir(parents=True, exist_ok=True)
    (KINDS | FORMS)[kind](path, outside)


# ---------------------------------------------------------------------- where, and what is done
def place(store: DiskStore, name: str) -> Path:
    """Every path that a store on disk opens, and every folder on the way."""
    path = store.path(KEY)
    namespace = path.parent.parent.parent
    return {
        "chunk": path,
        "old mark": path.with_suffix(f".owner-{'0' * 16}"),
        "used": namespace / "used",
        "unfinished file": path.parent / ".tmp-0123",
        "manifest": path.parent.parent / "spec.json",
        "lock": namespace / "locks" / f"{KEY.digest[:2]}.lock",
        "sweep lock": namespace / "sweep.lock",
        "generation": namespace / "generation",
        "deletion": namespace / ".deleted-0123",
        "file in quarantine": namespace / "quarantine" / "0123",
        "folder of chunks": path.parent,
        "folder of a spec": path.parent.parent,
        "folder of locks": namespace / "locks",
        "quarantine": namespace / "quarantine",
        "folder of a namespace": namespace,
    }[name]


SMALL_FILES = ("manifest", "lock", "sweep lock", "generation", "used", "old mark")
FILES = ("chunk", *SMALL_FILES, "unfinished file", "deletion", "file in quarantine")
FOLDERS = (
    *("folder of chunks", "folder of a spec", "folder of locks", "quarantine"),
    "folder of a namespace",
)
PLACES_AND_FORMS = [
    *itertools.product(FILES, [*KINDS, *FORMS]),
    # In place of a folder, one file is as good as another.
    *itertools.product(FOLDERS, [*KINDS, "noise"]),
]
every_kind = pytest.mark.parametrize("kind", [*KINDS, *FORMS])


def get(store: ChunkStore, key: ChunkKey) -> bool:
    try:
        store.get(key, LAYOUT)
    except ChunkNotFoundError:
        return False
    return True


def locked(store: ChunkStore) -> None:
    with store.locked([KEY, OTHER_KEY]):
        store.contains(KEY)


def described(store: ChunkStore) -> None:
    store.describe(KEY.spec, "", {"model": "x"})
    store.put(KEY, CHUNK)


def delete_namespace(store: ChunkStore) -> None:
    with suppress(OSError):  # what cannot be deleted says so
        store.delete_namespace("")


def command(*words: str) -> Callable[[ChunkStore], Any]:
    def run(store: ChunkStore) -> None:
        assert isinstance(store, DiskStore)
        with suppress(KVCacheRagError, OSError):
            status = main(["store", *words, str(store.root)])
            assert status in (0, 1, 2), "2 is one line on what cannot be changed"

    return run


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: get(store, KEY),
    "put": lambda store: store.put(KEY, CHUNK),
    "describe": described,
    "contains": lambda store: store.contains(KEY),
    "touch": lambda store: store.touch(KEY),
    "delete": lambda store: store.delete(KEY),
    "locked": locked,
    "generation": lambda store: store.generation(""),
    "sweep": lambda store: store.sweep(),
    "delete a namespace": delete_namespace,
}

COMMANDS: dict[str, Callable[[Any], Any]] = {
    "ls": command("ls", "--json"),
    "ls --chunks": command("ls", "--chunks"),
    "du": command("du"),
    "check": command("check"),
    "check --delete": command("check", "--delete"),
    "fix-permissions": command("fix-permissions"),
    "gc": command("gc", "--collection", "x", "--min-age", "0", "--yes"),
}


def done(
    operations: dict[str, Callable[[Any], Any]],
    store: ChunkStore,
    path: Path,
    kind: str,
    outside: Path,
) -> None:
    """Do everything, with it planted anew each time; what is outside stays as it is."""
    before = state(outside)
    for operation, run in operations.items():
        plant(kind, path, outside)
        run(store)
        assert state(outside) == before, operation


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """A store that holds a chunk with a claim, and limits that make every `put` sweep."""
    store = DiskStore(tmp_path / "kv", durable=False, quota=1 << 20, ttl=1000.0, temp_age=-1)
    store.describe(KEY.spec, "", {"model": "first"})
    for key, chunk in ((KEY, CHUNK), (OTHER_KEY, OTHER)):
        assert store.put(key, chunk)
    return store


@pytest.mark.parametrize(("name", "kind"), PLACES_AND_FORMS)
def test_every_call_meets_what_is_planted(
    store: DiskStore, outside: Path, opened: list[str], name: str, kind: str
) -> None:
    done(OPERATIONS, store, place(store, name), kind, outside)
    assert opened == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("chunk", kind) for kind in KINDS),  # of other places, one of each way to be wrong
        *itertools.product([*FILES[1:], *FOLDERS], ("pipe", "folder", "link to a folder")),
        *((name, kind) for name, kind in PLACES_AND_FORMS if kind in FORMS),
    ],
)
def test_every_command_meets_what_is_planted(
    store: DiskStore,
    outside: Path,
    opened: list[str],
    capsys: pytest.CaptureFixture[str],
    name: str,
    kind: str,
) -> None:
    done(COMMANDS, store, place(store, name), kind, outside)
    assert opened == []
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*KINDS, *[*FORMS][1:]])  # but for a file that is too old
def test_what_is_in_place_of_a_chunk_is_put_aside_and_the_chunk_written_anew(
    store: DiskStore, outside: Path, kind: str
) -> None:
    plant(kind, store.path(KEY), outside)
    assert kind in FORMS or not store.contains(KEY)
    assert not get(store, KEY)
    assert store.stats().corrupt == 1
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)


@every_kind
@pytest.mark.parametrize("name", SMALL_FILES)
def test_beside_what_is_planted_a_chunk_is_served_and_written(
    store: DiskStore, outside: Path, name: str, kind: str
) -> None:
    plant(kind, place(store, name), outside)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    with store.locked([KEY]):
        assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)


@every_kind
def test_a_namespace_is_deleted_whatever_is_in_place_of_its_generation(
    store: DiskStore, outside: Path, kind: str
) -> None:
    before = state(outside)
    number = place(store, "generation")
    plant(kind, number, outside)
    assert store.generation("") == 0
    assert store.delete_namespace("") == 2
    assert state(outside) == before
    assert stat.S_ISREG(number.lstat().st_mode)
    assert [path.name for path in number.parent.iterdir()] == ["generation"]
    assert store.generation("") > 0
    assert store.put(KEY, CHUNK)


@every_kind
def test_the_limit_is_kept_whatever_is_in_place_of_the_count(
    store: DiskStore, outside: Path, kind: str
) -> None:
    limit = 2 * store.path(KEY).stat().st_size + 4096
    small = DiskStore(store.root, durable=False, quota=limit)
    for seed in range(3, 9):
        plant(kind, place(store, "used"), outside)
        chunk = make_chunk(seed)
        assert small.put(key_of(chunk), chunk)
        assert len(list(store.root.rglob("*.safetensors"))) <= 2


def test_a_lock_is_not_taken_on_a_file_of_somebody_else(
    store: DiskStore, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Emptying(FileLock):
        """As filelock was before 4.2.4, the last for Python 3.10 too."""

        def _acquire(self) -> None:
            os.truncate(self.lock_file, 0)
            super()._acquire()

    monkeypatch.setattr(locks, "FileLock", Emptying)
    before = state(outside)
    for name in ("lock", "sweep lock"):
        plant("second name of a file", place(store, name), outside)
    with store.locked([KEY]):
        assert store.put(KEY, CHUNK)
    assert state(outside) == before


def test_a_named_pipe_that_somebody_writes_to_is_not_read(store: DiskStore, outside: Path) -> None:
    path = store.path(KEY)
    content = path.read_bytes()
    plant("pipe", path, outside)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        written = os.write(descriptor, content)
        assert not get(store, KEY)
        assert len(os.read(descriptor, len(content))) == written, "nothing was taken out of it"
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- a remote on a folder
@every_kind
@pytest.mark.parametrize(
    "name", ["chunk", "old mark", "generation", "folder of chunks", "folder of a namespace"]
)
def test_a_remote_on_a_folder_meets_what_is_planted(
    tmp_path: Path, outside: Path, opened: list[str], name: str, kind: str
) -> None:
    store = RemoteStore(f"file://{tmp_path}/kv", timeout=5.0, retries=0, pause=0)
    disk = DiskStore(tmp_path / "kv", durable=False)
    assert store.put(KEY, CHUNK)
    path = place(disk, name)
    done(OPERATIONS, store, path, kind, outside)
    assert opened == []
    assert "gave no answer in time" not in store.stats().last_failure
    filesystem.remove(str(path), [])
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
