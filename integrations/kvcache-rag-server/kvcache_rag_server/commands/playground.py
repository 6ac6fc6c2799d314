"""`kvcache-rag playground MODEL`: serve on this machine only, and open the playground page.

To serve others use `kvcache-rag serve`, which has the same page.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from kvcache_rag.commands.options import add_options, no_model
from kvcache_rag_server.commands import serve

if TYPE_CHECKING:
    import argparse

HELP = "open a page that asks a model with and without its cached chunks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is served, on which port, and whether a browser is opened."""
    from kvcache_rag_server.settings import ServerSettings

    serve.add_model_arguments(parser)
    page = parser.add_argument_group("the page")
    add_options(page, ServerSettings, "port", "served_name", "policy", "memory_bytes")
    page.add_argument("--no-browser", action="store_true", help="only print where the page is")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    settings = serve.settings_of(arguments)
    if no_model(settings.model, "playground tiny"):
        return serve.REFUSED
    serve.log_to_stderr("warning")
    serve.serve(settings, None if arguments.no_browser else _visit)
    return 0


kept = serve.kept


def _visit(page: str) -> None:
    # Some browsers return when they are closed; the server answers meanwhile.
    threading.Thread(target=_open, args=(page,), daemon=True).start()


def _open(page: str) -> None:
    import webbrowser

    if not webbrowser.open(page):
        print(f"kvcache-rag: no browser could be opened; go to {page}", file=sys.stderr, flush=True)
