"""What is run of a framework's own test suite, where its files come from, and what fails in it: `<name>.toml` here.

    repository = "https://github.com/…"
    ref = "v{version}"             # the tag or commit with the tests
    version = "2.6.5"              # of the package; without it that of `make integrations`
    sdist = true                   # if the package's source archive has the tests
    tests = "tests"                # where pytest is started, in the source
    files = ["test_checkpoint.py"] # what it runs
    packages = ["parameterized"]   # what the tests need besides the framework's environment

    [[fails]]
    reason = "…"                   # in Markdown
    alone = true                   # if they fail without Holdfast too
    tests = ["test_checkpoint.test_name", "test_checkpoint.TestClass.test_name[1]", "test_checkpoint.test_all_*"]

A name without parameters means the test with all of them; `*` stands for any text.

The list is strict in both directions: what is not listed must pass, and what is listed must be there and fail. The tables
of docs/integrations/official.md say the same, which tests/integrations/test_official.py compares.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib  # noqa: TID251
else:
    import tomli as tomllib

from tests.integrations.official.outcomes import Outcome

HERE = Path(__file__).parent


class Reason(NamedTuple):
    """Why tests fail: in the framework alone too, or with Holdfast only."""

    reason: str
    alone: bool
    tests: frozenset[str]

    def covers(self, test: str) -> bool:
        return any(_names(listed, test) for listed in self.tests)


class Suite(NamedTuple):
    """One framework's tests."""

    name: str
    about: dict[str, Any]
    reasons: tuple[Reason, ...]

    @classmethod
    def read(cls, name: str) -> Suite:
        """Raises `ValueError` for a test that is listed twice."""
        about = tomllib.loads((HERE / f"{name}.toml").read_text())
        listed: set[str] = set()
        reasons = []
        for row in about.pop("fails", []):
            twice = listed.intersection(row["tests"])
            if twice:
                raise ValueError(f"{name}.toml lists twice: {', '.join(sorted(twice))}")
            listed.update(row["tests"])
            reasons.append(Reason(row["reason"], row.get("alone", False), frozenset(row["tests"])))
        return cls(name, about, tuple(reasons))

    def version(self, packages: Iterable[str]) -> str:
        """Of the framework: the suite's own, else that of an environment's packages."""
        held = next(package for package in packages if package.startswith(f"{self.name}=="))
        return str(self.about.get("version", held.partition("==")[2]))

    def gone(self, outcomes: dict[str, Outcome]) -> list[str]:
        """A line for each listed test that a run of all files did not have."""
        listed = sorted(test for one in self.reasons for test in one.tests)
        return [
            f"{test} is listed, and no test has this name"
            for test in listed
            if not any(_names(test, one) for one in outcomes)
        ]

    def unexpected(self, outcomes: dict[str, Outcome], *, with_holdfast: bool) -> list[str]:
        """A line for each test that ended in another way than the list says."""
        lines = []
        for test, outcome in sorted(outcomes.items()):
            reason = next((one for one in self.reasons if (one.alone or with_holdfast) and one.covers(test)), None)
            if outcome.ended == "failed" and reason is None:
                lines.append(f"{test} failed: {outcome.why}")
            elif outcome.ended == "passed" and reason is not None:
                lines.append(f"{test} passed, and is listed as one that fails: {reason.reason}")
        return lines

    def source(self, version: str, sources: Path | None, build: Path) -> Path | None:
        """The directory with the tests: of `sources`, or of the package's source archive; None where neither has them."""
        if sources is not None and (sources / self.name).is_dir():
            return (sources / self.name).resolve()
        if not self.about.get("sdist", False):
            return None
        build.mkdir(parents=True, exist_ok=True)
        unpacked = build / f"{self.name}-{version}"
        if not unpacked.is_dir():
            words = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(build)]
            done = subprocess.run([sys.executable, "-m", "pip", *words, f"{self.name}=={version}"], check=False)
            if done.returncode != 0:
                return None
            with tarfile.open(build / f"{self.name}-{version}.tar.gz") as archive:
                archive.extractall(build, filter="data")
        return unpacked


def _names(listed: str, test: str) -> bool:
    """Whether an entry of a list means this test."""
    pattern = re.escape(listed).replace(r"\*", ".*")
    return re.fullmatch(rf"{pattern}(\[.*\])?", test) is not None
