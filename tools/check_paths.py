"""Fail when a file of the repository names an absolute path of somebody's machine.

Run from the repository root, inside a git work tree; looks at every text file git does not ignore.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Written so that it does not find itself; a URL's path is preceded by a letter and is left alone.
MACHINE_PATH: Final = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|opt|Users)/")


def problems(path: Path) -> Iterator[str]:
    """Name the lines of a file that hold such a path; binary files hold none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return
    for number, line in enumerate(lines, start=1):
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: names a path of one machine: {line.strip()[:120]}"


def main() -> int:
    """Check the repository in the current directory; returns the exit code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    files = [path for path in map(Path, names) if path.is_file()]
    found = [problem for path in files for problem in problems(path)]
    print("\n".join(found) if found else f"paths: {len(files)} files, none names a machine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
