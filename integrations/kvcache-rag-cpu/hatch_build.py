"""Compile the kernels for x86 CPUs into the wheel, where there is a C compiler.

Without one the wheel is pure Python, and torch's own functions run instead.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("kvcache_rag_cpu")
SOURCES = tuple(PACKAGE / f"{name}.c" for name in ("few_queries", "few_rows", "rounded_weights"))


def compiled(root: Path) -> list[Path]:
    """Shared objects beside their sources, or none with a line on stderr that says why."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if compiler is None:
        sys.stderr.write("no gcc: the kernels for CPUs are left out\n")
        return []
    try:
        return [_compiled(compiler, root, source) for source in SOURCES]
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"the kernels for CPUs are left out: {error}\n")
        return []


def _compiled(compiler: str, root: Path, source: Path) -> Path:
    target = source.with_name(f"lib{source.stem}.so")
    unlinked = root / source.with_suffix(".o")
    # Sums round as written, so that they can be those of torch.
    flags = ["-O3", "-ffp-contract=off", "-fPIC", "-fopenmp"]
    try:
        subprocess.run([compiler, *flags, "-c", root / source, "-o", unlinked], check=True)
        # Not linked with an OpenMP of its own: torch's, which is loaded already, has the threads.
        subprocess.run([compiler, "-shared", unlinked, "-o", root / target], check=True)
    finally:
        unlinked.unlink(missing_ok=True)
    return target


class Kernels(BuildHookInterface[Any]):
    """Puts the kernels into wheels; an editable install finds them beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag."""
        kernels = compiled(Path(self.root)) if self.target_name == "wheel" else []
        if not kernels:
            return
        build_data["artifacts"].extend(map(str, kernels))
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
