"""Run tests that failed beside others once more, alone: `python -m tests.again STATUS`, after `pytest` ended with it.

On a busy machine a few of eleven thousand tests, which start processes and wait for them, can fail for want of a turn. A
test that fails alone as well has failed. What passed alone is printed: look for a race there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 5  # more do not fail by chance
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(status: int) -> int:
    """The exit status of all tests, of which a few may have been run twice."""
    failed = sorted(json.loads(LAST_FAILED.read_bytes())) if LAST_FAILED.exists() else []
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MOST:
        return status
    print(f"\n{len(failed)} failed beside other tests, and run again, alone:", *failed, sep="\n  ", flush=True)
    alone = subprocess.run([sys.executable, "-m", "pytest", "-v", "-n", "0", *failed], check=False).returncode
    if alone == pytest.ExitCode.OK:
        print("passed alone, look for a race in:", *failed, sep="\n  ", flush=True)
    return alone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
