"""Write one version everywhere it stands: all dists have the same one and ask for each other's.

python tools/bump.py 0.2.0              # also closes the changelog's "Unreleased", dated today
python tools/bump.py --check 0.2.0      # fails where another one stands
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parent.parent
VERSION: Final = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
_PROJECT: Final = r'(?m)^(version = ")([^"]+)(")$'
# A fix of one dist goes with every fix of the others: the first two numbers have to agree.
_OURS: Final = r'"(?:[a-z]+-)*kvcache-rag(?:-[a-z0-9]+)?(?:\[[a-z,]+\])?'
_PIN: Final = rf'({_OURS}~=)([^",;]+)(["; ])'
# Any other form would stay what it was.
_ASKED: Final = rf'{_OURS}([~=<>!][^";]*)'
PLACES: Final = (
    ("pyproject.toml", (_PROJECT, _PIN)),
    ("src/kvcache_rag/__init__.py", (r'(?m)^(__version__ = ")([^"]+)(")$',)),
    ("integrations/kvcache-rag-cpu/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/kvcache-rag-documents/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/kvcache-rag-llamacpp/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/kvcache-rag-server/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/kvcache-rag-smollm2/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/langchain-kvcache-rag/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/llama-index-kvcache-rag/pyproject.toml", (_PROJECT, _PIN)),
    ("integrations/vllm-kvcache-rag/pyproject.toml", (_PROJECT, _PIN)),
    ("lab/pyproject.toml", (_PROJECT, _PIN)),
    ("tests/golden/projects.json", (_PIN,)),
    ("README.md", (r"(\*\*Version )(\S+)(, alpha\*\*)",)),
    ("CITATION.cff", (r"(?m)^(version: )(\S+)()$",)),
)
"""Every file that names the version, and how."""
_CHANGELOG: Final = "CHANGELOG.md"
_OPEN: Final = "## Unreleased\n"


def main() -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", metavar="VERSION", help="such as 0.2.0 or 0.2.0rc1")
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    version = arguments.version
    if not VERSION.fullmatch(version):
        parser.error(f"{version} is no version; write three numbers, such as 0.2.0 or 0.2.0rc1")
    if arguments.check:
        found = list(problems(version))
        print("\n".join(found) if found else f"every file says {version}")
        return 1 if found else 0
    bump(version, date.today().isoformat())
    print(f"every file says {version}; next: docs/releasing.md")
    return 0


def bump(version: str, day: str, root: Path = ROOT) -> None:
    """Write the version and the day of its release."""
    for name, patterns in PLACES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        for pattern in patterns:
            text = re.sub(pattern, rf"\g<1>{version}\g<3>", text)
        if name == "CITATION.cff":
            text = re.sub(r'(?m)^(date-released: )"[^"]+"$', rf'\g<1>"{day}"', text)
        path.write_text(text, encoding="utf-8")
    changelog = root / _CHANGELOG
    text = changelog.read_text(encoding="utf-8")
    if f"\n## {version} - " not in text:
        text = text.replace(_OPEN, f"{_OPEN}\n## {version} - {day}\n", 1)
        changelog.write_text(text, encoding="utf-8")


def problems(version: str, root: Path = ROOT) -> Iterator[str]:
    """Where another version stands, or none."""
    for name, patterns in PLACES:
        text = (root / name).read_text(encoding="utf-8")
        for pattern in patterns:
            found = {match[2] for match in re.finditer(pattern, text)}
            if found != {version}:
                yield f"{name} says {', '.join(sorted(found)) or 'no version'}, not {version}"
        for asked in re.findall(_ASKED, text):
            if asked[:2] != "~=" or "," in asked:
                yield f"{name} asks for kvcache-rag{asked}; write kvcache-rag~={version}"
    if f"\n## {version} - " not in (root / _CHANGELOG).read_text(encoding="utf-8"):
        yield f"{_CHANGELOG} has no section of {version}"


if __name__ == "__main__":
    sys.exit(main())
