"""Hooks of the documentation site (`make docs`): the house, links out of `docs/`, notebooks.

Pages link to files of the repository as they lie, so that they work where the repository is read;
on the site such a link leads to the repository's page of that file, which has to exist.
"""

from __future__ import annotations

import logging
import posixpath
import re
import runpy
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.plugins import event_priority

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
UPWARDS = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
FOREIGN = re.compile(r'(?:\bsrc|rel="stylesheet" href)="(https?://[^"]+)"')
FIGURE = re.compile(r'<p>((?:<img alt="[^"]*" src="[^"]+\.svg" ?/?>\s*)+)</p>')
NOTEBOOKS = "notebooks"
TITLES = {"langchain": "Notebook, LangChain", "llamaindex": "Notebook, LlamaIndex"}
# A warning of mkdocs' loggers ends a strict build.
_LOG = logging.getLogger("mkdocs.hooks")


def on_pre_build(config: MkDocsConfig) -> None:
    """Draw the house from the imports."""
    runpy.run_path(str(ROOT / "tools" / "house.py"), run_name="__main__")


@event_priority(100)  # type: ignore[untyped-decorator]  # before the plugin of notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, which lie beside `docs/`."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        name = f"{NOTEBOOKS}/{path.name}"
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of `docs/` to the repository, and those to notebooks to their pages."""
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "reference":  # the search finds what explains a thing before its signature
        page.meta["search"] = {"boost": 0.5}

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if not target.startswith("../"):
            return found[0]
        target, anchor = target.removeprefix("../"), found[2] or ""
        if not (ROOT / target).exists():
            _LOG.warning("%s links to %s, which is not there", page.file.src_uri, target)
        if files.get_file_from_path(target) is not None:
            return f"]({posixpath.relpath(target, folder)}{anchor})"
        return f"]({config.extra['repository']}/blob/main/{target}{anchor})"

    return UPWARDS.sub(link, markdown)


def on_env(env: Any, config: MkDocsConfig, files: Files) -> None:
    """Give notebooks short names; their plugin takes their first headings."""
    for file in files.documentation_pages():
        if file.src_uri.endswith(".ipynb"):
            file.page.title = TITLES[file.name]


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Mark figures for the style sheet, name what has no name, mend links of notebooks."""
    output = FIGURE.sub(r'<p class="figure">\1</p>', output)
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    unnamed = 'alt="No description has been provided for this image"'
    output = output.replace(unnamed, 'alt="The plot that the cell before draws"')
    # They are no Markdown: links lead to the files of pages.
    return re.sub(r'href="\.\./docs/([^"#]+)\.md(#[^"]*)?"', r'href="../\1.html\2"', output)


def on_post_build(config: MkDocsConfig) -> None:
    """Look for links of finished pages that lead nowhere, and what would come from elsewhere."""
    for page in Path(config.site_dir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for loaded in FOREIGN.findall(text):
            _LOG.warning("%s loads %s from elsewhere", page.name, loaded)
        for link in re.findall(r'(?:href|src)="([^"#?:]+)(?:#[^"]*)?"', text):
            if not link.startswith("/") and not (page.parent / unescape(link)).exists():
                _LOG.warning("%s links to %s, which is not there", page.name, link)
