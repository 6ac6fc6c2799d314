"""PDF files as other programs write them."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure


def _written(*figures: Figure) -> bytes:
    file = io.BytesIO()
    with mpl.rc_context({"pdf.use14corefonts": True}), PdfPages(file) as pages:
        for figure in figures:
            pages.savefig(figure)
    return file.getvalue()


def pdf(*texts: str) -> bytes:
    """A page for each text."""
    figures = []
    for text in texts:
        figures.append(Figure(figsize=(6, 8)))
        figures[-1].text(0.1, 0.9, text)
    return _written(*figures)


def scanned_pdf() -> bytes:
    """A page that is a picture."""
    figure = Figure(figsize=(2, 2))
    figure.figimage([[0, 1], [1, 0]], resize=False)
    return _written(figure)
