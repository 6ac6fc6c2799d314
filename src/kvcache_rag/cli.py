"""The `kvcache-rag` command: finds the subcommands, runs one, and turns errors into one clear line.

A subcommand is an entry point of the group `kvcache_rag.commands`, so that any installed package
can bring some.  It names a module with

    HELP: str                                                 one line
    add_arguments(parser: argparse.ArgumentParser) -> None
    run(arguments: argparse.Namespace) -> int                 the exit code
    kept(arguments: argparse.Namespace) -> str                what Ctrl-C leaves; may be missing

Importing the module has to be light: what is heavy is imported inside `run`.  This module knows
no command, but who brings those that are not installed.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, cast

from kvcache_rag.errors import KVCacheRagError, close_to, expanded
from kvcache_rag.forks import new_lock
from kvcache_rag.progress import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

GROUP: Final = "kvcache_rag.commands"
FAILED, REFUSED, INTERRUPTED = 1, 2, 130

# How argparse tells of an option that a value of it was refused.
_OF_VALUE: Final = re.compile(r"^argument (.+?): (?=must |cannot )")

# transformers reads them when it is imported, here and in processes that are started meanwhile.
_QUIET: Final = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

# Commands that other distributions bring, and what to install for them as a newcomer calls them:
# with the embedding that is their default.
_LLAMA_INDEX: Final = "llama-index-kvcache-rag[demo]"
ELSEWHERE: Final = {
    **dict.fromkeys(("ask", "chat", "demo", "ingest"), _LLAMA_INDEX),
    **dict.fromkeys(("build", "playground", "serve"), "kvcache-rag[server]"),
    **dict.fromkeys(("bench", "eval", "finetune", "verify"), "kvcache-rag[lab]"),
}


# What had another name before, in 0.1 or since: an option or an action, and what it is now.
FORMER: Final = {
    **dict.fromkeys(("--store", "--kv"), "--kv-dir"),
    "--store-bytes": "--kv-max-bytes",
    **dict.fromkeys(("--codec", "--codecs"), "--kv-codec"),
    "--url": "--base-url",
    "--engine": "--backend",
    "--engine-key": "--backend-key",
    "--allowed-host": "--allowed-hosts",
    "--allowed-origin": "--allowed-origins",
    "--overlap": "--chunk-overlap",
    "--chunk": "--chunk-size",
    "--tokens": "--max-new-tokens",
    "--n": "--questions",
    "--questions": "--per-context",
    **dict.fromkeys(("--model", "--models"), "MODEL"),
    **dict.fromkeys(("--persist-dir", "--host"), "--chroma"),
    "--grace": "--min-age",
    "--json": "--report",
    "--kv-dir": "KV_DIR",
    "verify": "check",
}


class Command(Protocol):
    """What a subcommand's module offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


class CommandError(KVCacheRagError):
    """A subcommand does not exist or cannot be loaded."""


class ArgumentParser(argparse.ArgumentParser):
    """Says a mistake in one line, with what was probably meant; those of its actions do so, too.

    `~` in a `Path` is the home folder.
    """

    def __init__(self, **how: Any) -> None:
        # The beginning of a name would be one until another option begins like it.
        super().__init__(**{"allow_abbrev": False, **how})
        self.register("type", Path, lambda word: Path(expanded(word)))

    def error(self, message: str) -> NoReturn:
        """Say what was wrong, and leave."""
        message = _OF_VALUE.sub(r"\1 ", plain(message))
        line = f"{self.prog}: error: {message} ({self.prog} --help lists what there is)"
        self.exit(REFUSED, f"{line}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but what is not known is refused where it was said."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return found, unknown

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        option = next((word for word in words if word.startswith("-")), None)
        if option is None:
            self.error(f"{words[0]!r} is one word too many; put quotes around what has spaces")
        name = option.partition("=")[0]
        self.error(f"there is no option {name}{self._hint(name, self._names())}")

    def _names(self) -> list[str]:
        """Of all options and words."""
        words = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
        return [*self._option_string_actions, *words]

    @staticmethod
    def _hint(name: str, known: Collection[str]) -> str:
        """What something that is not known is called now, or was probably meant to be."""
        now = FORMER.get(name, "")
        if now in known:
            return f"; it is {now} now" if now.islower() else f"; say {now} without it"
        close = close_to(name, known)
        return f"; did you mean {close}?" if close else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [*map(str, action.choices)]
        is_action = isinstance(action, argparse._SubParsersAction)
        message = f"there is no {value!r} among {', '.join(known)}{self._hint(str(value), known)}"
        raise argparse.ArgumentError(None if is_action else action, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvcache-rag` with `argv`, by default those of the process; returns the exit code."""
    farewell = Farewell()
    if argv is None:
        _spare_what_stays()
    # Who calls it as a function has his own handlers, and goes on living.
    with ended_soon(farewell.say) if argv is None else nullcontext():
        try:
            return _main(argv, farewell)
        except SystemExit as left:  # argparse has said what it had to say
            return int(left.code or 0)


def _spare_what_stays() -> None:
    """Look for garbage seldom, and not at all while leaving.

    Modules and a model are 600,000 objects that stay: Python would go through them as they come,
    and at the end for seconds.
    """
    gc.set_threshold(10_000, 10, 10)
    atexit.register(gc.freeze)


def _main(argv: Sequence[str] | None, farewell: Farewell) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    at = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    parser = _parser()
    options = parser.parse_args(words[:at])
    if words[at : at + 1] == ["help"]:
        options.help = True
        at += 1
    if at == len(words):
        parser.epilog = _list_commands()
        if options.help:
            parser.print_help()
            return 0
        parser.print_help(sys.stderr)
        return REFUSED
    rest = [*words[at + 1 :], "--help"] if options.help else words[at + 1 :]
    return _guarded(words[at], rest, farewell, debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvcache-rag",
        usage="%(prog)s [--help] [--version] [--debug] COMMAND ...",
        description="Answer from chunks whose KV caches were computed once.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help and leave")
    parser.add_argument("--version", action="version", version=version("kvcache-rag"))
    _add_debug(parser)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def _list_commands() -> str:
    """The commands with their help; one that cannot be loaded says why, beside the others."""
    lines = ["commands:"]
    commands = _commands()
    for name, point in commands.items():
        try:
            text = _load(point).HELP
        except CommandError as error:
            text = f"(not available: {error})"
        lines.append(f"  {name:<12} {text}")
    if absent := [name for name in ELSEWHERE if name not in commands]:
        lines += ["", f"not installed: {', '.join(absent)} (the sentence of each says more)"]
    return "\n".join(lines)


def _find(name: str) -> Command:
    commands = _commands()
    if name not in commands:
        raise CommandError(_unknown(name, commands))
    return _load(commands[name])


def _unknown(name: str, commands: Collection[str]) -> str:
    """Why there is no such command, what was probably meant, and what there is."""
    if name in ELSEWHERE:
        return f"the command {name!r} is not installed: {_origin(name)}"
    known = ", ".join(commands) or "none is installed"
    close = close_to(name, [*commands, *ELSEWHERE])
    if not close:
        return f"there is no command {name!r}; commands: {known}"
    origin = "" if close in commands else f" It is not installed: {_origin(close)}."
    return f"there is no command {name!r}; did you mean {close!r}?{origin} Commands: {known}"


def _origin(name: str) -> str:
    """Who brings a command that is not installed, and how to get it."""
    return f"pip install '{ELSEWHERE[name]}'"


def _load(point: EntryPoint) -> Command:
    try:
        module = point.load()
    except Exception as error:  # whatever a foreign module raises while it is imported
        origin = point.dist.name if point.dist else point.value
        reason = f"command {point.name!r} cannot be loaded ({_say(error)})"
        raise CommandError(f"{reason}; install {origin} again") from error
    missing = [name for name in ("HELP", "add_arguments", "run") if not hasattr(module, name)]
    if missing:
        raise CommandError(f"command {point.name!r}: {point.value} lacks {', '.join(missing)}")
    return cast("Command", module)


def _guarded(name: str, words: Sequence[str], farewell: Farewell, *, debug: bool) -> int:
    debug = debug or "--debug" in words
    try:
        # also behind an action
        return _run(name, [word for word in words if word != "--debug"], farewell)
    except KeyboardInterrupt:
        farewell.say()
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`| head`); without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KVCacheRagError, OSError) as error:
        if debug:
            raise
        return _complain(_say(error), REFUSED)
    except Exception as error:
        if debug:
            raise
        return _complain(f"{type(error).__name__}: {_say(error)} (run again with --debug)", FAILED)


def _run(name: str, words: Sequence[str], farewell: Farewell) -> int:
    command = _find(name)
    parser = ArgumentParser(prog=f"kvcache-rag {name}", description=command.HELP)
    command.add_arguments(parser)
    _add_debug(parser)
    arguments = parser.parse_args(words)
    if hasattr(command, "kept"):
        farewell.kept = command.kept(arguments)
    with _quiet_transformers():
        code = command.run(arguments)
    sys.stdout.flush()
    return code


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """It reports errors only, and shows no bars."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    if loaded := sys.modules.get("transformers.utils.logging"):
        loaded.set_verbosity_error()
        loaded.disable_progress_bar()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------- Ctrl-C
# Python raises KeyboardInterrupt between two instructions of the main thread.  An import of a large
# library or an operation of torch is one instruction, and behind it pools wait for what they have
# begun.  So a thread hears of the signal at once, and ends the process if it is there a moment
# later.  What is stored is whole at any time: chunks are written as for a process that is killed.
_SOON: Final = 0.8  # seconds in which a command may end by itself


class Farewell:
    """Says once that a command was stopped, and what was kept.

    Attributes:
        kept: What to say behind "stopped"; "" for nothing.
    """

    def __init__(self) -> None:
        self.kept = ""
        self._lock, self._is_said = new_lock(), False

    def say(self) -> None:
        """On the standard error."""
        with self._lock:
            if self._is_said:
                return
            self._is_said = True
        kept = f"; {self.kept}" if self.kept else ""
        sys.stderr.write(f"kvcache-rag: stopped{kept}\n")
        sys.stderr.flush()


@contextmanager
def ended_soon(say: Callable[[], None]) -> Iterator[None]:
    """Within this, SIGINT ends the process; who has a handler of his own is left alone.

    Args:
        say: Called before the process is ended.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading, say), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)


def _watch(reading: socket.socket, say: Callable[[], None]) -> None:
    while number := reading.recv(1):
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if number[0] == signal.SIGINT and is_ours:
            time.sleep(_SOON)
            say()
            sys.stdout.flush()
            os._exit(INTERRUPTED)


# ---------------------------------------------------------------------- messages
def _say(error: BaseException) -> str:
    """The message of an error as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _complain(message: str, code: int) -> int:
    print(f"kvcache-rag: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
