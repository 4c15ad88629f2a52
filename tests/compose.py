"""Files of Docker Compose, as the Compose specification has them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def follows_the_schema(file: Path) -> None:
    """Fails where a file does not follow the specification's own schema; skips where the checker is not installed."""
    tool = shutil.which(Path(sys.executable).with_name("check-jsonschema")) or shutil.which("check-jsonschema")
    if tool is None:
        pytest.skip("check-jsonschema is not installed (pip install check-jsonschema)")
    command = [tool, "--builtin-schema", "vendor.compose-spec", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
