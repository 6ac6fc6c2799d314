"""`kvcache-rag playground MODEL`: serve on this machine alone, and open the page that shows how.

Whoever serves others uses `kvcache-rag serve`, which shows the same page.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from kvcache_rag.commands.listing import MODEL
from kvcache_rag_server.commands import serve

if TYPE_CHECKING:
    import argparse

HELP = "open a page that asks a model with and without its cached chunks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is served, on which port, and whether a browser is opened."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    parser.add_argument("--port", type=int, help="port, 0 for a free one (default: 8000)")
    parser.add_argument("--no-browser", action="store_true", help="only print where the page is")
    serve.add_model_arguments(parser.add_argument_group("model and chunks"))


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    if serve.no_model(arguments, "playground tiny"):
        return serve.REFUSED
    settings = serve.settings_of(arguments)
    serve.log_to_stderr("warning")
    from kvcache_rag_server import startup

    def announce(line: str, page: str) -> None:
        print(f"kvcache-rag: {line}; look at {page}", flush=True)
        if not arguments.no_browser:
            # Some browsers return when they are closed; the server answers meanwhile.
            threading.Thread(target=_visit, args=(page,), daemon=True).start()

    startup.run(settings, announce)
    return 0


def _visit(page: str) -> None:
    import webbrowser

    if not webbrowser.open(page):
        print(f"kvcache-rag: no browser could be opened; go to {page}", file=sys.stderr, flush=True)
