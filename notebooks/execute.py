"""Run the notebooks and keep their outputs: `python notebooks/execute.py [NAME ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import nbformat
from nbclient import NotebookClient

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER: Final = Path(__file__).parent
NAMES: Final = ("llamaindex", "langchain")
METADATA: Final = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TIMEOUT: Final = 600
"""Seconds that a cell may take."""


def read(name: str) -> NotebookNode:
    """A notebook as it is kept."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, backend: str = "") -> NotebookNode:
    """A notebook with new outputs, run in an empty folder; the file stays as it is.

    Args:
        name: Of the notebook.
        backend: What runs its models; "" for what it says, which is nothing.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = read(name)
    if backend:
        for cell in notebook.cells:
            said = f'settings = {{\n    "backend": "{backend}",\n'
            cell.source = cell.source.replace("settings = {\n", said)
    options: dict[str, Any] = {
        "coalesce_streams": True,  # else a progress bar leaves every state it was in
        "record_timing": False,
        "extra_arguments": ["--log-level=ERROR"],
    }
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=TIMEOUT, kernel_name="python3", resources=place, **options
        ).execute()
    # Versions of Python and of the editor would change with every machine.
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main(names: list[str]) -> int:
    """Run the notebooks named, or all, and write them."""
    for name in names or NAMES:
        nbformat.write(execute(name), FOLDER / f"{name}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
