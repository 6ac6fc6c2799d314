"""`kvcache-rag serve MODEL --kv-dir DIR`: one endpoint that any OpenAI client can call."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcache_rag.commands.options import (
    MODEL_GROUPS,
    add_groups,
    add_model,
    add_options,
    no_model,
    ready,
)
from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag_server.listening import listening

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvcache_rag_server.settings import ServerSettings

HELP = "serve a model over its cached chunks by OpenAI's API"
REFUSED = 2
GROUPS: Final = {
    **MODEL_GROUPS,
    "answers": (
        *("served_name", "policy", "memory_bytes", *MODEL_GROUPS["answers"], "max_batch"),
        *("max_waiting", "prefetch", "prefetch_after", "answer_tokens", "documents_as_text"),
    ),
    "servers of vLLM (--backend vllm)": ("base_url", "backend_key"),
    "network": ("host", "port", "allowed_hosts", "allowed_origins", "heartbeat", "grace"),
}
"""Options of `ServerSettings` by topic; with `KEYS` and the limits these are all."""
KEYS: Final = ("api_keys", "allow_anonymous")
LEVELS: Final = ("debug", "info", "warning", "error")
_NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is served, where, how requests wait, and their limits."""
    from kvcache_rag_server.settings import RequestLimits, ServerSettings

    _add_model(parser)
    add_groups(parser, ServerSettings, GROUPS)
    keys = parser.add_argument_group("who may ask")
    add_options(keys, ServerSettings, *KEYS)
    keys.add_argument(
        "--new-key", metavar="NAMESPACE", help="add a key to --api-keys, print it, and leave"
    )
    limits = parser.add_argument_group("limits of one request, and of one namespace")
    add_options(limits, RequestLimits)
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=LEVELS,
        default="warning",
        help="what is logged to stderr: debug, info, warning (default) or error",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; or make a key and exit."""
    if arguments.new_key is not None:
        return _make_key(arguments)
    settings = settings_of(arguments)
    if no_model(settings.model, "serve tiny --kv-dir kv"):
        return REFUSED
    log_to_stderr(arguments.log_level)

    serve(settings)
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves before anything is served."""
    return "nothing was served yet"


def serve(settings: ServerSettings, visit: Callable[[str], None] | None = None) -> None:
    """Serve until Ctrl-C; say where, and at the end what is left.

    Args:
        settings: What to serve.
        visit: Called with the page's URL once it is there.
    """

    def announce(line: str, page: str) -> None:
        print(f"kvcache-rag: {line}; look at {page}", flush=True)
        if visit is not None:
            visit(page)

    with listening(settings.host, settings.port) as listener:
        ready(settings)
        from kvcache_rag_server import startup

        startup.run(settings, listener, announce)
    left = f"chunks in {settings.kv_dir} are kept" if settings.kv_dir else "chunks were in memory"
    print(f"kvcache-rag: stopped; {left}", file=sys.stderr)


# ---------------------------------------------------------------------- arguments
def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a local model and its chunks, and a settings file."""
    from kvcache_rag.settings import LocalSettings

    _add_model(parser)
    add_groups(parser, LocalSettings, MODEL_GROUPS)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_model(parser, nargs="?")  # or by the file
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings as YAML, TOML or JSON, named as the options are, with _ for -; options win",
    )


def log_to_stderr(level: str) -> None:
    """Log our packages to stderr, unless handlers were already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("kvcache_rag", "kvcache_rag_server", "vllm_kvcache_rag"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        if not logger.hasHandlers():
            logger.addHandler(handler)


# ---------------------------------------------------------------------- settings
def settings_of(arguments: argparse.Namespace) -> ServerSettings:
    """Settings from options, else from a file, else the defaults of `ServerSettings`.

    Raises:
        InvalidInputError: If settings cannot be used, or contradict each other.
        MissingExtraError: If the extra is not installed.
    """
    import importlib.util

    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "server")
    from kvcache_rag_server.settings import ServerSettings

    return ServerSettings.from_source(arguments, file=arguments.config)


def _make_key(arguments: argparse.Namespace) -> int:
    if arguments.api_keys is None:
        raise InvalidInputError("--new-key needs the file that it is added to: --api-keys FILE")
    from kvcache_rag_server.keys import new_key

    key = new_key(Path(arguments.api_keys), arguments.new_key)
    shown = f"keep it, it is shown this once; {arguments.api_keys} has its digest:"
    print(shown, file=sys.stderr)
    print(key)
    return 0
