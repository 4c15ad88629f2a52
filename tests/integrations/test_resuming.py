"""A killed script dies as often as it is told, however fast it is. This module is also the script: it counts."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.integrations.recording import Record
from tests.integrations.resuming import assert_equal, completed, killed

LAST = 12


def test_no_start_outruns_its_kill(tmp_path: Path) -> None:
    """A training that has ended notes nothing when it is started once more, as Lightning's."""
    whole = completed(__name__, [], tmp_path / "whole")
    other = killed(__name__, [], tmp_path / "killed", LAST, kills=5, seed=1)
    assert len(other.began) == 6 and other.began[-1] > 0, other.began
    assert_equal(whole, other)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    saved, record = parser.parse_args().work / "saved", Record()
    step = int(saved.read_text()) if saved.exists() else 0
    if step < LAST:
        record.began(step)
    while step < LAST:
        step += 1
        record.step(step, step / 7)
        fresh = saved.with_suffix(".new")  # a kill finds one number or the other
        fresh.write_text(str(step))
        fresh.replace(saved)
    record.ended({})


if __name__ == "__main__":
    main()
