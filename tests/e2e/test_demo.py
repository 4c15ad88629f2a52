"""The demo, played from beginning to end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from holdfast.demo import main
from holdfast.demo.processes import identify
from holdfast.demo.proof import parse_journal
from tests.daemons import wait_until

pytestmark = pytest.mark.e2e
STEPS = 24


@pytest.fixture(scope="module", params=["directory", "s3"])
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A demo's directory, as short as the demo allows; with "s3" its machine was lost and a bucket is all that was left."""
    directory = tmp_path_factory.mktemp("demo")
    with open(directory / "printed", "w") as printed, redirect_stdout(printed):
        assert main(directory, STEPS, keep_daemon=False, store=request.param) == 0
    (made,) = directory.glob("demo-*")
    yield made
    shutil.rmtree(directory)


def test_the_demo_proves_what_it_claims(output: Path) -> None:
    """The run was started twice, the second time from a checkpoint, and its losses are the uninterrupted run's."""
    whole = parse_journal((output / "demo-uninterrupted" / "rank-0.jsonl").read_text())
    killed, resumed = parse_journal((output / "demo" / "rank-0.jsonl").read_text())
    assert STEPS // 2 <= resumed.restored <= killed.step < STEPS
    assert sorted(resumed.losses) == list(range(resumed.restored + 1, STEPS + 1))
    assert whole[0].losses == killed.losses | resumed.losses


def test_the_demo_leaves_what_it_tells_of(output: Path) -> None:
    """The text and the digests are where it says, and equal for both runs."""
    assert json.loads((output / "generated.json").read_text())["text"].startswith("class ")
    for rank in range(2):
        ends = [json.loads((output / run / f"digests-{rank}.json").read_text()) for run in ("demo", "demo-uninterrupted")]
        assert ends[0] == ends[1]


def test_a_lost_machine_leaves_nothing(output: Path) -> None:
    """Of the first machine there is no directory; the second one has downloaded a checkpoint."""
    if (output / "bucket").exists():
        assert not (output / "machine-1").exists() and (output / "downloaded" / "COMMIT").exists()
    else:
        assert (output / "data" / "demo" / "checkpoints").exists()


def test_the_demo_says_how_far_it_is(output: Path) -> None:
    """How far the runs are, the losses and the time come in this order."""
    printed = (output.parent / "printed").read_text()
    order = ["without interruption", f"step {STEPS} of {STEPS}", "Loss, mean", " s in all\n"]
    assert sorted(order, key=printed.index) == order


def test_the_demo_leaves_no_process_behind(output: Path) -> None:
    """With keep_daemon=False nothing started from its directory runs on; the holder of its memory ends by itself."""
    wait_until(lambda: running_from(output) == [])


def running_from(output: Path) -> list[object]:
    """What runs and names the demo's directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if str(output).encode() in path.read_bytes():
                found.append(identify(int(path.parent.name)))
    return [identity for identity in found if identity is not None]
