"""Builds what is written in C with the package, where there is an x86-64 and a compiler: `_NAME.so` beside each `NAME.c`.

Without it copies and averages take longer, and nothing else changes: a build that fails is reported, and is no error.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "client/holdfast/memory/native_copy.c",
    "formats/holdfast_formats/native_transpose.c",
    "formats/holdfast_files/objects/native_crc32.c",
    "service/holdfast_service/daemon/averaging/native_lerp.c",
)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels and editable installs; a source distribution carries the C files alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if platform.system() != "Linux" or platform.machine() != "x86_64" or compiler is None:
            self.app.display_warning("holdfast: no C compiler for x86-64 here, copies go through the caches")
            return
        for source in SOURCES:
            self._build(compiler, source, build_data)

    def _build(self, compiler: str, source: str, build_data: dict[str, Any]) -> None:
        made = str(Path(source).with_name(f"_{Path(source).stem}.so"))
        target = Path(self.root, made)
        new = target.with_suffix(".new")  # whoever has the old one loaded keeps it
        built = subprocess.run(
            [compiler, "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", str(new), str(Path(self.root, source))],
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            self.app.display_warning(f"holdfast: {source} was not built: {built.stderr[-500:]}")
            return
        new.replace(target)
        build_data["artifacts"].append(made)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{self._platform()}"

    @staticmethod
    def _platform() -> str:
        return f"linux_{platform.machine()}"
