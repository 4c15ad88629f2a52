"""Settings of the whole test suite."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings

from tests import forked
from tests.databases import empty_catalog, postgres
from tests.forked_programs import forked_programs
from tests.kit.daemons import daemon, run
from tests.kit.objects import bucket, bucket_server, moto, moto_bucket, radosgw, seaweedfs, seaweedfs_bucket

REQUEST_TIMEOUT_S = 180.0
TESTS = Path(__file__).parent

# Fixtures of every test.
__all__ = [
    "bucket",
    "bucket_server",
    "daemon",
    "empty_catalog",
    "forked_programs",
    "moto",
    "moto_bucket",
    "postgres",
    "radosgw",
]
__all__ += ["run", "seaweedfs", "seaweedfs_bucket"]

# No deadlines: a busy machine must not turn a correct test red.
settings.register_profile("ci", deadline=None, derandomize=False, max_examples=15)
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=150)
settings.load_profile("ci")
for _phase in ("connect", "read", "write", "pool"):  # httpx gives up after five seconds unless it is told otherwise
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, REQUEST_TIMEOUT_S)


# Hundreds of daemons and ranks are started: none is to compile our modules for itself, where that is turned off.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    """Testers of one run share the processes that are forked: importing everything takes five seconds of processor.

    A sixth of what collecting tests takes would go to the garbage collector, which finds next to nothing.
    """
    if config.getoption("numprocesses", None):  # not in a tester
        forked.share()
    else:
        gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of this directory first: the snippets of the documents take minutes in one file, for which three idle
    testers waited at the end.
    """
    items.sort(key=lambda item: item.path.parent != TESTS)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking through imported objects, which takes half a second each time. Objects that
    exist now are not in `gc.get_objects()` afterwards.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """End the run when a tester dies: this is never chance, and pytest-xdist 3.8 then waits for ever (its issue 1378)."""
    pytest.exit(f"a tester died in {crashitem}", returncode=pytest.ExitCode.INTERNAL_ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the crash lab; they must be known before its own settings are read."""
    parser.addoption("--crash-report", metavar="PATH", help="write the crash lab's table to this file, as JSON")
    parser.addoption(
        "--soak-s", metavar="SECONDS", type=float, help="end the soak after this long, however many saves it did"
    )
    parser.addoption("--frozen-s", metavar="SECONDS", type=float, default=300.0, help="how long daemons are stopped")
    parser.addoption("--away-s", metavar="SECONDS", type=float, default=4.0, help="how long a bucket is away")
    parser.addoption("--attack-s", metavar="SECONDS", type=float, help="how long attacks by chance go on (make attack)")
    parser.addoption("--kills", type=int, default=20, help="how often the frameworks' runs are killed (make integrations)")
    parser.addoption("--fuzz-s", metavar="SECONDS", type=float, help="look for inputs that no reader handles for this long")
    parser.addoption("--cluster-s", metavar="SECONDS", type=float, default=30.0, help="kill and cut off nodes for this long")
    parser.addoption("--cluster-rounds", metavar="N", type=int, default=12, help="how many saves a daemon is killed in")
    parser.addoption("--cluster-away-s", metavar="SECONDS", type=float, default=20.0, help="how long PostgreSQL is away")
    parser.addoption("--cluster-seed", metavar="N", type=int, default=0, help="which nodes are killed, and when")
