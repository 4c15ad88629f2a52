"""Takes away every fsync, every digest check, the fence, the checks of leases and access, one at a time (bar 3).

    python -m tests.crash.mutations [--json PATH] [NAME ...]

Each is made in a copy of the tree, where the tests named with it run until one fails. Exits with 1 when one that was made
is not caught, and with 2 when one cannot be made any more, because the code it was written for has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.access_mutants import ACCESS
from tests.crash.mutants import MUTATIONS as OF_BYTES
from tests.crash.mutants import Mutation

TREE = Path(__file__).resolve().parents[2]
COPIED = ("client", "formats", "service", "tests", "pyproject.toml")
TEST_TIMEOUT_S = 900  # of a busy machine
MUTATIONS = (*OF_BYTES, *ACCESS)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


def problem_with(mutation: Mutation) -> str:
    """Why it cannot be made in this tree; nothing when it can."""
    count = (TREE / mutation.file).read_text().count(mutation.old)
    missing = [test for test in mutation.tests if not (TREE / test.partition("::")[0]).exists()]
    if missing:
        return f"{mutation.name}: there is no {missing[0]}"
    return "" if count == 1 else f"{mutation.name}: what it changes stands {count} times in {mutation.file}"


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of what the tests need, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        for name in COPIED:
            copy = shutil.copytree if (TREE / name).is_dir() else shutil.copy
            copy(TREE / name, Path(directory, name))  # type: ignore[operator] - both take a source and a target
        yield Path(directory)


def caught_by(mutation: Mutation, copy: Path) -> str | None:
    """The first test that fails in a copy of the tree that has the mutation; None when all pass."""
    path = copy / mutation.file
    sound = path.read_text()
    path.write_text(sound.replace(mutation.old, mutation.new))
    try:
        return _run(copy, mutation.tests)
    finally:
        path.write_text(sound)


def _run(copy: Path, tests: tuple[str, ...]) -> str | None:
    rooms = os.pathsep.join(str(copy / room) for room in ("client", "formats", "service"))
    environment = {**os.environ, "PYTHONPATH": rooms, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="hf-") as base:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={base}/t", *tests]
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S, check=False
        )
    if done.returncode == 0:
        return None
    found = _FAILED.search(done.stdout)
    if found is None:
        raise RuntimeError(f"{command} did not run:\n{done.stdout}\n{done.stderr}")
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these mutations")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write what caught what to this file")
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not given.names or mutation.name in given.names]
    impossible = [problem for problem in map(problem_with, chosen) if problem]
    if impossible:
        print("\n".join(impossible))
        return 2
    caught: dict[str, str | None] = {}
    with copied_tree() as tree:
        for mutation in chosen:
            caught[mutation.name] = caught_by(mutation, tree)
            print(f"{mutation.name:<48} {caught[mutation.name] or 'NOT CAUGHT'}", flush=True)
    missed = [name for name, test in caught.items() if test is None]
    print(f"{len(caught) - len(missed)} of {len(caught)} mutations are caught")
    if given.json:
        given.json.write_text(json.dumps(caught, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
