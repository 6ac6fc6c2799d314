"""Compile the attention kernel for x86 CPUs into the wheel, where there is a C compiler.

Without one the wheel is pure Python, and torch's own attention runs instead.
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

FOLDER = Path("src/kvcache_rag/models/attention")
KERNEL = FOLDER / "libfew_queries.so"


def compiled(root: Path) -> Path | None:
    """The shared object beside its source, or None with a line on stderr that says why."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if compiler is None:
        sys.stderr.write("no gcc: the attention kernel for CPUs is left out\n")
        return None
    source, target = root / FOLDER / "few_queries.c", root / KERNEL
    unlinked = source.with_suffix(".o")
    try:
        # Products are not fused with sums but where the source says so: bits are promised.
        flags = ["-O3", "-fPIC", "-fopenmp", "-ffp-contract=off"]
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(unlinked)], check=True)
        # Not linked with an OpenMP of its own: torch's, which is loaded already, has the threads.
        subprocess.run([compiler, "-shared", str(unlinked), "-o", str(target)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"the attention kernel for CPUs is left out: {error}\n")
        return None
    finally:
        unlinked.unlink(missing_ok=True)
    return target


class Kernels(BuildHookInterface[Any]):
    """Puts the kernel into wheels; an editable install finds it beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag."""
        if self.target_name != "wheel" or compiled(Path(self.root)) is None:
            return
        build_data["artifacts"].append(str(KERNEL))
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
