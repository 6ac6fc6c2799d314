"""`kvcache-rag` loads only the command it runs, and answers every error with one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import cli
from kvcache_rag.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = """
HELP = "says what it was told"

def add_arguments(parser):
    parser.add_argument("word")
    parser.add_argument("--code", type=int, default=0)

def run(arguments):
    if arguments.word.startswith("raise "):
        from kvcache_rag import errors
        raise eval(arguments.word.removeprefix("raise "), {**vars(errors)})
    print(arguments.word)
    return arguments.code
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of command modules; the file `echo.py` in it is the command `echo`."""
    (tmp_path / "cli_echo.py").write_text(COMMAND)
    (tmp_path / "cli_broken.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "cli_empty.py").write_text('HELP = "lacks the rest"\n')
    points = [
        EntryPoint(name, f"cli_{name}", cli.GROUP) for name in ("echo", "broken", "empty", "absent")
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints(points).select(group=group))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("echo", "broken", "empty"):
        sys.modules.pop(f"cli_{name}", None)


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr, without its prefix."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("kvcache-rag: error: ")
    return line.removeprefix("kvcache-rag: error: ")


@pytest.mark.usefixtures("commands")
def test_runs_the_command_and_returns_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "hello", "--code", "3"]) == 3
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.usefixtures("commands")
def test_help_lists_every_command_with_those_that_are_broken_or_not_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for said in ("says what it was told", "there_is_no_such_module", "empty"):
        assert said in out
    last = f"not installed: {', '.join(cli.ELSEWHERE)} (the sentence of each says more)"
    assert out.splitlines()[-1] == last


WRONG = [
    (
        "echo a --codde=3",
        "kvcache-rag echo: error: there is no option --codde; did you mean --code? "
        "(kvcache-rag echo --help lists what there is)",
    ),
    ("echo a --xyz", "kvcache-rag echo: error: there is no option --xyz ("),
    ("echo a b", "'b' is one word too many; put quotes around what has spaces ("),
    ("echo", "kvcache-rag echo: error: the following arguments are required: word ("),
    ("--hlep", "kvcache-rag: error: there is no option --hlep; did you mean --help? ("),
    ("store ls kv --chnks", "kvcache-rag store ls: error: there is no option --ch"),
    ("echo a --cod 3", "there is no option --cod; did you mean --code? ("),
    ("store lss kv", "kvcache-rag store: error: there is no 'lss' among ls, list, "),
    ("store verify kv", "among ls, list, du, check, gc, fix-permissions; it is check"),
    ("serve tiny --store kv", "there is no option --store; it is --kv-dir now ("),
    ("build tiny c --kv=kv", "there is no option --kv; it is --kv-dir now ("),
    ("bench --model tiny", "there is no option --model; say MODEL without it ("),
    ("eval --models tiny", "there is no option --models; say MODEL without it ("),
    ("demo --model tiny", "there is no option --model; say MODEL without it ("),
    ("build tiny c --json f", "no option --json; it is --report now ("),
    (
        "finetune t --out=o --data=d --questions=4",
        "no option --questions; it is --per-context now (",
    ),
    ("store ls --kv-dir kv", "no option --kv-dir; say KV_DIR without it ("),
    ("ask q --url u", "kvcache-rag ask: error: there is no option --url ("),
    (
        "serve --log-level warn",
        "argument --log-level: there is no 'warn' among debug, info, warning, error",
    ),
]


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(("line", "says"), WRONG)
def test_a_wrong_argument_is_one_line_with_what_was_meant(
    line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not line.startswith("echo"):
        monkeypatch.setattr(cli, "entry_points", entry_points)
    assert cli.main(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert says in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("help", "usage: kvcache-rag "),
        ("help store", "usage: kvcache-rag store "),
        ("help store ls", "usage: kvcache-rag store ls "),
    ],
)
def test_help_is_a_word_too(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 0
    assert capsys.readouterr().out.startswith(says)


BROKEN = [
    ("broken", 2, "No module named 'there_is_no_such_module'"),
    ("absent", 2, "No module named 'cli_absent'"),
    ("empty", 2, "lacks add_arguments, run"),
    ("ehco", 2, "there is no command 'ehco'; did you mean 'echo'? Commands: absent, broken, echo"),
    ("xyzzy", 2, "there is no command 'xyzzy'; commands: absent, broken, echo, empty"),
    (
        "ingset",
        2,
        "did you mean 'ingest'? It is not installed: pip install 'llama-index-kvcache-rag",
    ),
    *(
        (name, 2, f"the command {name!r} is not installed: pip install '{brings}'")
        for name, brings in cli.ELSEWHERE.items()
    ),
]
RAISED = [
    ("KVCacheRagError('not\\n  this way')", 2, "not this way"),
    ("MissingExtraError('ray', 'ray')", 2, "pip install 'kvcache-rag[ray]'"),
    ("FileNotFoundError(2, 'No such file or directory', 'docs')", 2, "docs: No such file"),
    ("OSError('nothing by that name')", 2, "nothing by that name"),
    ("ZeroDivisionError('by zero')", 1, "ZeroDivisionError: by zero (run again with --debug)"),
    ("ZeroDivisionError()", 1, "ZeroDivisionError"),
]


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        *(([word], code, says) for word, code, says in BROKEN),
        *((["echo", f"raise {error}"], code, says) for error, code, says in RAISED),
    ],
)
def test_an_error_is_one_line(
    words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    assert says in one_error(capsys)


def test_every_command_of_another_distribution_is_known() -> None:
    found = {
        point.name: point.dist.name
        for point in entry_points(group=cli.GROUP)
        if point.dist is not None and point.dist.name != "kvcache-rag"
    }
    extras = {"kvcache-rag[server]": "kvcache-rag-server", "kvcache-rag[lab]": "kvcache-rag-lab"}
    known = {name: extras.get(dist, dist.partition("[")[0]) for name, dist in cli.ELSEWHERE.items()}
    assert known == found


@pytest.mark.usefixtures("commands")
def test_an_interrupted_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "raise KeyboardInterrupt()"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "kvcache-rag: stopped\n"


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("MissingExtraError('ray', 'serve')", MissingExtraError),
        ("ZeroDivisionError()", ZeroDivisionError),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_debug_lets_the_error_through(error: str, kind: type[Exception], before: bool) -> None:
    words = ["echo", f"raise {error}"]
    with pytest.raises(kind):
        cli.main(["--debug", *words] if before else [*words, "--debug"])


SCRIPT = """
import hashlib, signal, sys, threading, time, types
from importlib.metadata import EntryPoint, EntryPoints
from kvcache_rag import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background

def run(arguments):
    print("begun", flush=True)
    {does}
    return 0

module = types.ModuleType("does")
module.HELP, module.add_arguments, module.run = "", lambda parser: None, run
module.kept = lambda arguments: "all of it is kept"
sys.modules["does"] = module
cli.entry_points = lambda group: EntryPoints([EntryPoint("does", "does", group)])
sys.argv = ["kvcache-rag", "does"]
sys.exit(cli.main())
"""


@contextmanager
def begun(does: str) -> Iterator[Any]:
    """A process whose command has begun to do something."""
    command = [sys.executable, "-c", SCRIPT.format(does=does)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


@pytest.mark.parametrize(
    "hangs",
    [
        "time.sleep(60)",
        'hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # as an operation of torch',
        "threading.Thread(target=time.sleep, args=(60,)).start()  # waited for at the exit",
    ],
)
def test_ctrl_c_ends_a_command_wherever_it_is_and_says_what_is_kept(hangs: str) -> None:
    with begun(hangs) as process:
        started = time.perf_counter()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        took = time.perf_counter() - started
    assert process.returncode == cli.INTERRUPTED
    assert said == "kvcache-rag: stopped; all of it is kept\n"
    assert took < 5, "a second on a machine that is not busy"


def test_output_cut_short_by_its_reader_is_no_error() -> None:
    with begun("[print('x' * 100) for _ in range(10_000)]") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_command_that_is_called_leaves_the_signals_of_its_caller_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])
    cli.main([])
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(before[1])) == before
