"""Mutants of thirteen modules that must not be wrong: one call, check, lock or comparison of each is changed, one at a time.

    python -m tests.crash.mutants MODULE [NUMBER ...]

tries all mutants of a module, or these, in a copy of the tree, where the tests of `TESTS` run until one fails.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
COPIED = ("client", "formats", "service", "tests", "pyproject.toml")
TEST_TIMEOUT_S = 900  # of a busy machine
TESTS = {
    "service/holdfast_service/storage/posix.py": ("tests/storage/test_posix.py", "tests/crash/test_power_cut.py"),
    "service/holdfast_service/storage/posix_store.py": (
        "tests/storage/test_posix_store.py",
        "tests/crash/test_power_cut.py",
    ),
    "service/holdfast_service/storage/posix_answers.py": (
        "tests/storage/test_posix_store.py",
        "tests/crash/test_power_cut.py",
    ),
    "service/holdfast_service/control/checkpoints/commit.py": (
        "tests/control/checkpoints/test_commit.py",
        "tests/crash/test_power_cut.py",
    ),
    "service/holdfast_service/control/checkpoints/readers.py": (
        "tests/control/checkpoints/test_readers.py",
        "tests/control/retention/test_rotation.py",
    ),
    "service/holdfast_service/control/retention/policy.py": ("tests/control/retention/test_policy.py",),
    "service/holdfast_service/control/catalog/attempts.py": ("tests/control/catalog/test_attempts.py",),
    "service/holdfast_service/control/access/tokens.py": ("tests/control/access/test_tokens.py",),
    "service/holdfast_service/api/access/authorization.py": (
        "tests/api/access/test_authorization.py",
        "tests/api/access/test_middleware.py",
    ),
    "service/holdfast_service/api/access/authentication.py": (
        "tests/api/access/test_middleware.py",
        "tests/api/access/test_logins.py",
    ),
    "formats/holdfast_formats/disk/verification.py": ("tests/formats/disk", "tests/client/read/test_reader.py"),
    "formats/holdfast_formats/disk/manifests.py": ("tests/formats/disk",),
    "client/holdfast/read/verified_load.py": ("tests/client/read",),
}
_OPPOSITES = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
_OPPOSITE = {one: other for pair in _OPPOSITES for one, other in (pair, pair[::-1])}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


class Mutator(ast.NodeTransformer):
    """Makes the mutant of a number; `change` says what it is, and is empty where there are not so many."""

    def __init__(self, number: int) -> None:
        self._left, self.change = number, ""

    def _due(self, node: ast.AST, change: str) -> bool:
        due, self._left = self._left == 0, self._left - 1
        if due:
            self.change = f"line {getattr(node, 'lineno', 0)}: {change}"
        return due

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_act = isinstance(node.value, ast.Call) and not ast.unparse(node.value).startswith("log.")
        return ast.Pass() if is_act and self._due(node, f"without {ast.unparse(node)}") else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Pass() if self._due(node, f"without {ast.unparse(node)}") else self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        if not any(item.optional_vars for item in node.items) and self._due(node, "without its context"):
            return ast.If(ast.Constant(True), node.body, [])
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._due(node, f"not: {ast.unparse(node.test)}"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if self._due(node, f"another comparison: {ast.unparse(node)}"):
            node.ops[0] = _OPPOSITE[type(node.ops[0])]()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self._due(node, f"and for or: {ast.unparse(node)}"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self.generic_visit(node)


def mutant(source: str, number: int) -> tuple[str, str]:
    """The module with one change, and what the change is: empty where there are not so many."""
    mutator = Mutator(number)
    return ast.unparse(ast.fix_missing_locations(mutator.visit(ast.parse(source)))), mutator.change


def count(source: str) -> int:
    """How many mutants a module has."""
    mutator = Mutator(-1)
    mutator.visit(ast.parse(source))
    return -1 - mutator._left


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of what the tests need, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        for name in COPIED:
            copy = shutil.copytree if (TREE / name).is_dir() else shutil.copy
            copy(TREE / name, Path(directory, name))  # type: ignore[operator] - both take a source and a target
        yield Path(directory)


def caught_by(copy: Path, module: str, number: int) -> str | None:
    """The first test that fails in a copy of the tree that has the mutant; None when all pass."""
    path = copy / module
    sound = path.read_text()
    path.write_text(mutant(sound, number)[0])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(copy / room) for room in ("client", "formats", "service")),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        with tempfile.TemporaryDirectory(prefix="hf-") as base:
            words = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={base}/t", *TESTS[module]]
            command = [sys.executable, "-m", "pytest", *words]
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
            )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    finally:
        path.write_text(sound)
    failed = _FAILED.search(done.stdout)
    return None if done.returncode == 0 else failed[1] if failed else f"no test begins: {done.stdout[-300:]}"


if __name__ == "__main__":
    chosen = sys.argv[1]
    with copied_tree() as tree:
        for at in map(int, sys.argv[2:]) if sys.argv[2:] else range(count((TREE / chosen).read_text())):
            print(
                at, mutant((TREE / chosen).read_text(), at)[1], "|", caught_by(tree, chosen, at) or "NOT CAUGHT", flush=True
            )
