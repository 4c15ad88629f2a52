"""What decodes is made at import: msgspec's first use of a type in two threads at a time ends the process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
import holdfast_formats
import holdfast_service

ROUNDS = 12  # a third of them died
RACE = """
import sys, threading
sys.setswitchinterval(1e-6)
from holdfast_formats.layout import rules
from holdfast_formats.layout.rules import document
from pathlib import Path
tables = [document.decode(file.read_bytes()) for file in sorted(Path(rules.__file__).parent.rglob("*.toml"))]
assert tables
gate = threading.Barrier(4)
def check():
    gate.wait()
    for table in tables:
        document.check(table)
threads = [threading.Thread(target=check) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_that_decode_first_at_one_time_do_not_end_the_process() -> None:
    """A daemon that had just started, and checked two checkpoints, died of a segmentation fault."""
    for _ in range(ROUNDS):
        ended = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("package", [holdfast_formats, holdfast, holdfast_service], ids=lambda package: package.__name__)
def test_no_type_is_worked_out_in_a_function(package: object) -> None:
    """`decoder` and `converter` alone make what decodes into a type, and modules call them as they are imported."""
    root = Path(str(package.__file__)).parent  # type: ignore[attr-defined]
    found = [
        f"{file.relative_to(root)}:{call.lineno}"
        for file in sorted(root.rglob("*.py"))
        if file.name != "decoding.py"
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and _works_out(call)
    ]
    assert found == []


def _works_out(call: ast.Call) -> bool:
    """Whether the call gives msgspec a type that may be one of ours, or makes what decodes."""
    named = ast.unparse(call.func)
    if named.rpartition(".")[2] in ("decoder", "converter", "Decoder"):
        return True
    if not named.startswith("msgspec.") or named.rpartition(".")[2] not in ("decode", "convert"):
        return False
    types = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "type")]
    return any(name.id not in ("dict", "str", "Any") for of in types for name in ast.walk(of) if isinstance(name, ast.Name))
