"""The oldest torch that is promised (make versions): the tests of all that touches tensors, in an environment with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.versions.interpreters import TOP, installed, interpreter, run, uv

PYTHON, TORCH = "3.11", "2.6"
BESIDE = ("pytest", "hypothesis", "transformers>=4.56", "safetensors")
ROOMS = ("tensors", "state", "stage", "restore", "layout", "read")
TESTED = [*(f"tests/client/{room}" for room in ROOMS), "tests/client/test_checkpointer.py", "tests/client/test_left_out.py"]
BUCKETS = "tests/client/restore/test_from_bucket.py"  # whose server of buckets is not installed here
TESTS_S = 3600.0
pytestmark = pytest.mark.versions


def test_what_touches_tensors_works_with_the_oldest_torch(tmp_path: Path) -> None:
    """Some private name of torch, or one that is newer, would be an error here and in no other lane."""
    found = interpreter(PYTHON)
    if found is None:
        pytest.skip(f"there is no Python {PYTHON} here")
    python = str(installed(found, tmp_path / "oldest", "highest"))
    run([*uv(), "pip", "install", "--quiet", "--python", python, f"torch=={TORCH}.*", *BESIDE])
    assert run([python, "-c", "import torch; print(torch.__version__)"]).startswith(f"{TORCH}.")
    told = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--ignore={BUCKETS}", *TESTED], within_s=TESTS_S)
    assert re.search(r"\d+ passed", told)


def test_the_oldest_torch_is_the_one_that_is_promised() -> None:
    """What is run here is what pyproject.toml says."""
    assert f'torch = ["torch>={TORCH}"' in (TOP / "pyproject.toml").read_text()
