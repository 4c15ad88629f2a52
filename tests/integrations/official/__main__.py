"""`make official`: run the frameworks' own tests without Holdfast and with it; what fails must be what their lists say.

    make official ONLY="accelerate lightning" SOURCES=/checkouts

SOURCES has a checkout of each framework's repository under its name: few packages contain their tests. A framework whose
tests cannot be had is skipped. What follows `--` goes to pytest, such as `-k restore`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib  # noqa: TID251
else:
    import tomli as tomllib

from tests.daemons import running
from tests.integrations.__main__ import TABLE, make
from tests.integrations.environments import BUILT
from tests.integrations.official import outcomes
from tests.integrations.official.suites import HERE, Suite

SOCKET = "HOLDFAST_OFFICIAL"  # tells the plugin where the daemon is


def run(suite: Suite, python: Path, tests: Path, socket: Path | None, words: list[str]) -> list[str]:
    """Run the tests once, with Holdfast if there is a daemon; what ended unexpectedly."""
    report = BUILT.parent / "official" / f"{suite.name}-{'alone' if socket is None else 'holdfast'}.xml"
    report.unlink(missing_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(HERE / "plugins"), str(tests), *(str(tests.parent / path) for path in suite.about.get("path", ()))]
    about = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    about |= {"HF_HUB_OFFLINE": "1", **suite.about.get("env", {})}
    command = [str(python), "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += suite.about.get("words", [])
    if socket is not None:
        about[SOCKET] = str(socket)
    plugin = f"{'alone' if socket is None else 'holdfast'}_in_{suite.name}"
    command += ["-p", plugin] if (HERE / "plugins" / f"{plugin}.py").is_file() else []
    done = subprocess.run([*command, *suite.about["files"], *words], cwd=tests, env=about, check=False)
    if not report.is_file():
        return [f"pytest ended with {done.returncode} and no report"]
    found = outcomes.read(report)
    print(f"{suite.name}, {'alone' if socket is None else 'with Holdfast'}: {outcomes.summary(found)}", flush=True)
    return [*suite.unexpected(found, with_holdfast=socket is not None), *([] if words else suite.gone(found))]


def try_out(suite: Suite, options: argparse.Namespace, words: list[str]) -> int:
    """The exit status of one suite: 1 if a test ended unexpectedly."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text())[suite.name]
    others = [package for package in table["packages"] if not package.startswith(f"{suite.name}==")]
    version = suite.version(table["packages"])
    source = suite.source(version, options.sources, BUILT.parent / "official")
    if source is None:
        about = suite.about
        print(f"{suite.name}: SKIPPED. Check out {about['repository']} at {about['ref'].format(version=version)}", end=" ")
        print(f"as {suite.name} in the directory that SOURCES names", flush=True)
        return 0
    packages = [f"{suite.name}=={version}", *others, *suite.about.get("packages", ())]
    python = make(f"{suite.name}-official", {**table, "packages": packages})
    return tried(suite, python, source / suite.about["tests"], options.only, words)


def tried(suite: Suite, python: Path, tests: Path, only: str | None, words: list[str]) -> int:
    """Run the tests without Holdfast and with it, or `only` one of both; 1, and a line for each that ended unexpectedly."""
    wrong = []
    if only != "holdfast":
        wrong += run(suite, python, tests, None, words)
    if only != "alone":
        with TemporaryDirectory() as place, running(Path(place) / "root") as daemon:
            wrong += run(suite, python, tests, daemon.socket, words)
    print(*(f"  unexpected: {line}" for line in wrong), sep="\n", flush=True)
    return int(bool(wrong))


def main() -> int:
    """The exit status: 0 if no test ended unexpectedly."""
    known = sorted(path.stem for path in HERE.glob("*.toml"))
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.official", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"frameworks (default: all): {', '.join(known)}")
    parser.add_argument("--sources", type=Path, help="a directory with checkouts of the frameworks' repositories")
    parser.add_argument("--only", choices=("alone", "holdfast"), help="run the tests once: without Holdfast, or with it")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    options, words = parser.parse_args(given[:at]), given[at + 1 :]
    unknown = set(options.names).difference(known)
    if unknown:
        parser.error(f"no suite of {', '.join(sorted(unknown))}")
    return max(try_out(Suite.read(name), options, words) for name in options.names or known)


if __name__ == "__main__":
    sys.exit(main())
