"""What becomes of real trainers, their storage and their replica is on the overview in words, with what mends it, and stays
until it is dealt with; an orderly end is no alert.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from holdfast.rest import summaries
from holdfast.rest.api import Api
from tests.crash.disks import memory_disk
from tests.daemons import RunningDaemon, running, wait_until
from tests.forked import Forked
from tests.in_memory import tmp_path
from tests.wings.console.reading import Page

__all__ = ["tmp_path"]

LIMIT_S = 240.0
# A run, or the replica; the code of its alert; what the overview says of it; and the button that mends it.
MESSAGES = (
    ("killed", "run-died", "ranks were killed or ended by an exception", "Resume from step"),
    ("hung", "no-commit", "of training; usually there is one every", "Look at the saves"),
    ("ill", "checkpoint-unhealthy", "has new NaN or infinite values", "Resume from step 40"),
    ("full", "saves-failing", "quota-exceeded", "Raise the quota by half"),
    ("far", "replica-lost", "the replica far cannot be reached", "Copy again now"),
)


def trainer(stack: ExitStack, daemon: RunningDaemon, run: str, fate: str) -> Forked:
    """A real trainer, which is killed at the end of the test at the latest."""
    made = Forked(["-m", "tests.wings.console.fates", daemon.socket, run, fate])
    stack.enter_context(made)  # closes what it says
    stack.callback(made.kill)
    return made


def alerts(daemon: RunningDaemon) -> dict[tuple[str, str], str]:
    """What needs attention and is not acknowledged, by run or subject and code."""
    items = httpx.get(f"{daemon.url}/v1/alerts?acknowledged=false").json()["items"]
    return {(one["run"] or one["subject"], one["code"]): one["text"] for one in items}


def commits(daemon: RunningDaemon, run: str) -> int:
    found = httpx.get(f"{daemon.url}/v1/runs/{run}")
    return found.json()["checkpoints"] if found.status_code == 200 else 0


def limit(daemon: RunningDaemon, run: str) -> None:
    """A quota that the next save does not fit in."""
    with httpx.Client(base_url=daemon.url) as http:
        got = http.get(f"/v1/runs/{run}/policy")
        policy = {**got.json(), "quota_bytes": http.get(f"/v1/runs/{run}").json()["bytes"] + 1}
        http.put(f"/v1/runs/{run}/policy", json=policy, headers={"If-Match": got.headers["etag"]}).raise_for_status()


def test_whatever_happens_to_a_run_is_said_until_it_is_dealt_with(tmp_path: Path) -> None:
    """Killed, hung, NaN, out of room, a slow disk, a lost replica; and one that finished, of which nothing is said."""
    far = tmp_path / "far"
    far.mkdir()
    with ExitStack() as stack:
        daemon = stack.enter_context(running(tmp_path / "root", "--replica", f"far={far}", listen="127.0.0.1:0"))
        slow = stack.enter_context(
            running(tmp_path / "slow", "--write-bytes-per-second", "600", listen="127.0.0.1:0")  # a save takes 40 s
        )
        fates = {"killed": "goes-on", "hung": "hangs", "ill": "nan", "full": "goes-on", "over": "finishes"}
        ranks = {run: trainer(stack, daemon, run, fate) for run, fate in fates.items()}
        trainer(stack, slow, "dragged", "goes-on")
        stack.callback(slow.kill)  # it would write what it has for minutes
        wait_until(lambda: all(commits(daemon, run) >= 2 for run in fates), LIMIT_S)
        ranks["killed"].kill()
        limit(daemon, "full")
        far.rename(tmp_path / "elsewhere")

        wait_until(lambda: {(name, code) for name, code, _, _ in MESSAGES} <= alerts(daemon).keys(), LIMIT_S)
        page = Page(httpx.get(daemon.url).text)
        for name, code, words, button in MESSAGES:
            assert words in alerts(daemon)[name, code]
            assert words in page.text and button in page.text, (name, page.text)
        wait_until(lambda: {"storage-slow", "saves-dropped"} & {code for _, code in alerts(slow)}, LIMIT_S)

        with Api(daemon.url) as api:
            wait_until(lambda: summaries.summary(api, "over").state == "finished", LIMIT_S)
        assert not [key for key in alerts(daemon) if key[0] == "over" and key[1] != "replica-behind"]

        httpx.put(f"{daemon.url}/v1/runs/hung/alerts/no-commit/acknowledgement", json={}).raise_for_status()
        assert ("hung", "no-commit") not in alerts(daemon)
        trainer(stack, daemon, "killed", "goes-on")
        wait_until(lambda: ("killed", "run-died") not in alerts(daemon), LIMIT_S)
        (tmp_path / "elsewhere").rename(far)
        httpx.post(f"{daemon.url}/v1/replicas/far/retry").raise_for_status()
        wait_until(lambda: ("far", "replica-lost") not in alerts(daemon), LIMIT_S)
        assert ("ill", "checkpoint-unhealthy") in alerts(daemon)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_said_until_there_is_room(tmp_path: Path) -> None:
    """By a real file system: where others have taken the room, and where not one byte is left, for the catalog neither."""
    with ExitStack() as stack:
        disk = stack.enter_context(memory_disk(tmp_path / "disk", "24m"))
        daemon = stack.enter_context(running(disk / "root", listen="127.0.0.1:0"))
        trainer(stack, daemon, "filled", "goes-on")
        wait_until(lambda: commits(daemon, "filled") >= 2, LIMIT_S)
        filler = disk / "filler"
        filler.write_bytes(bytes(free(disk) - LEFT_BYTES))
        wait_until(lambda: ("filled", "saves-failing") in alerts(daemon), LIMIT_S)
        assert "no-space" in alerts(daemon)["filled", "saves-failing"]
        page = Page(httpx.get(daemon.url).text).text
        for said in (
            "Saves fail",
            "no-space",
            "free space on the storage, or keep fewer checkpoints",
            "Choose what to keep",
        ):
            assert said in page
        with open(filler, "ab", buffering=0) as more:
            while free(disk):
                more.write(bytes(min(free(disk), 2**16)))
        wait_until(lambda: lacks_room(daemon), LIMIT_S)
        filler.unlink()
        wait_until(lambda: not lacks_room(daemon), LIMIT_S)


LEFT_BYTES = 2**20 - 2**16  # less than what the daemon leaves to the catalog, with which this is recorded


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def lacks_room(daemon: RunningDaemon) -> bool:
    """Whether that is listed, in the one way or the other."""
    return bool({("filled", "saves-failing"), ("filled", "disk-nearly-full")} & alerts(daemon).keys())
