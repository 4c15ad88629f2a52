"""`make integrations`: make each environment, once, and run its tests in it; prints a table at the end.

An environment is a venv in build/integrations that borrows everything it does not pin (torch, the service, pytest) from the
one that runs this.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib  # noqa: TID251
else:
    import tomli as tomllib

from tests.integrations.environments import BUILT, IN_USE, TOP

# What pip would make of [project.scripts]: the tutorials' snippets run it.
PROGRAM = """#!{python}
from holdfast.cli import main

main()
"""
TABLE = Path(__file__).with_name("environments.toml")
NO_TESTS = 5  # pytest's exit status


class Result(NamedTuple):
    """How the tests of one environment ended."""

    name: str
    status: int
    seconds: float


def make(name: str, about: dict[str, Any]) -> Path:
    """The interpreter of an environment that has these packages; it is made where it is not there, or has others."""
    home = BUILT / name
    python, made = home / "bin" / "python", home / "packages.txt"
    words, builders, packages = about.get("pip", []), about.get("builders", []), about["packages"]
    wanted = "\n".join([PROGRAM, *words, *builders, *packages])
    if made.is_file() and made.read_text() == wanted:
        return python
    venv.create(home, with_pip=True, clear=True)
    site = Path(
        subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    )
    # all of them: an environment may itself borrow another one's packages
    packages_of_this = [path for path in sys.path if path.endswith("site-packages")]
    borrowed = [TOP / "client", TOP / "formats", TOP / "service", *packages_of_this]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    for some in filter(None, (builders, packages)):
        command = [python, "-m", "pip", "install", "--quiet", *words, *some]
        subprocess.run(command, env=os.environ | about.get("env", {}), check=True)
    (home / IN_USE).write_text(name)
    program = home / "bin" / "holdfast"
    program.write_text(PROGRAM.format(python=python))
    program.chmod(0o755)
    made.write_text(wanted)
    return python


def run(name: str, table: dict[str, Any], words: list[str]) -> Result:
    """Make the environment, and those that its tests start programs in, and run its tests."""
    began, about = time.monotonic(), table[name]
    others = about.get("others", [])
    print(f"== {name}: {', '.join([*about['packages'], *others])}", flush=True)
    for other in others:
        make(other, table[other])
    python = make(name, about)
    folder = f"tests/integrations/{about.get('tests', name)}"
    done = subprocess.run([python, "-m", "pytest", "-W", "default", folder, *words], cwd=TOP, check=False)
    return Result(name, done.returncode, time.monotonic() - began)


def main() -> int:
    """The exit status: 0 if every environment's tests passed."""
    table = tomllib.loads(TABLE.read_text())
    parser = argparse.ArgumentParser(prog="python -m tests.integrations")
    parser.add_argument("names", nargs="*", help=f"environments (default: all): {', '.join(table)}")
    parser.add_argument("--only-make", action="store_true", help="make the environments and run nothing")
    chosen, words = parser.parse_known_args()
    unknown = [name for name in chosen.names if name not in table]
    if unknown:
        parser.error(f"no such environment: {', '.join(unknown)}")
    names = chosen.names or list(table)
    if chosen.only_make:
        for name in dict.fromkeys(one for wanted in names for one in (*table[wanted].get("others", ()), wanted)):
            print(make(name, table[name]))
        return 0
    results = [run(name, table, words) for name in names]
    for result in results:
        print(
            f"{result.name:24} {'passed' if result.status == 0 else f'FAILED ({result.status})':12} {result.seconds:6.0f} s"
        )
    return max(result.status for result in results)


if __name__ == "__main__":
    sys.exit(main())
