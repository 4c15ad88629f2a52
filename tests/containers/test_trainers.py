"""Trainers in containers beside the daemon's (make engine): little memory, another user, other mounts, deaths of either."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.containers.projects import ASK_OWN, HEALTHY_S, SOCKET, TESTS, TOP, Project, inside, project
from tests.daemons import wait_until
from tests.engine import Engine

SITE = f"{Path(torch.__file__).parents[1]}:/site:ro"
# Ends the daemon below the first process of its container.
KILL_DAEMON = """
import os, pathlib, signal
for place in pathlib.Path("/proc").glob("[0-9]*"):
    if "PPid:\\t1\\n" in (place / "status").read_text() and b"holdfast_service" in (place / "cmdline").read_bytes():
        os.kill(int(place.name), signal.SIGKILL)
"""
# A rank of the crash lab's that takes memory without end once its save is staged.
GREEDY = """
import sys, threading
from tests.crash import rank_process
staged, write, taken = threading.Event(), sys.stdout.write, []
def heard(text):
    if text.startswith("sealed"):
        staged.set()
    return write(text)
def take():
    staged.wait()
    while True:
        taken.append(b"x" * 10_000_000)
sys.stdout.write = heard
threading.Thread(target=take).start()
rank_process.main()
"""
pytestmark = pytest.mark.engine


class Trained(NamedTuple):
    """How a trainer's container ended, and what it said."""

    status: int
    out_of_memory: bool
    said: str


def train(made: Engine, run: Project, name: str, *limits: str, data: str = "/data", user: str = "10001:10001") -> Trained:
    """Run a trainer of 150 MiB that saves three steps beside a project's daemon."""
    borrow_torch(made)
    mounts = [f"{run.name}_data:{data}:ro", f"{run.name}_socket:/run/holdfast", TESTS, SITE]
    words = [word for mount in mounts for word in ("--volume", mount)]
    trainer = ["-m", "tests.containers.trainer", SOCKET, name, "150", "3"]
    started = ["--entrypoint", "python", "--env", "PYTHONPATH=/tests", "--user", user, *limits, "holdfast", *trainer]
    container = made.docker("run", "--detach", *words, *started).strip()
    try:
        status = int(made.docker("wait", container, timeout_s=HEALTHY_S))
        killed = made.docker("inspect", "--format", "{{.State.OOMKilled}}", container).strip()
        return Trained(status, killed == "true", made.docker("logs", container))
    finally:
        made.docker("rm", "--force", container)


def borrow_torch(made: Engine) -> None:
    """Skip where the image cannot use the torch of these tests."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    theirs = made.docker("run", "--rm", "--entrypoint", "python", "holdfast", "-c", code).strip()
    if theirs != "{}.{}".format(*sys.version_info[:2]):
        pytest.skip(f"the image has Python {theirs}, and the torch of these tests is for another one")


def test_a_save_does_not_kill_a_container_with_little_memory(made: Engine, up: str, run: Project) -> None:
    """650 MiB for a state of 150: there is no room for as many slots as usual, which the trainer is told; it lives."""
    ended = train(made, run, "limited", "--memory", "650m", "--memory-swap", "650m")
    assert (ended.status, ended.out_of_memory) == (0, False), ended.said
    assert "done 3" in ended.said and "notices: " in ended.said and "memory" in ended.said.partition("notices: ")[2]
    listed = json.loads(inside(made, up, "holdfast", "ls", "limited", "--json"))
    assert [found["step"] for found in listed] == [3, 2, 1]


def test_a_trainer_of_another_user_is_told_which(made: Engine, up: str, run: Project) -> None:
    """Not that no daemon runs."""
    ended = train(made, run, "other", user="12345:12345")
    assert ended.status == 1 and "user 12345 may not use the daemon" in ended.said and "--socket-group" in ended.said


def test_a_trainer_that_has_the_data_elsewhere_is_told_where(made: Engine, up: str, run: Project) -> None:
    """The path at which the daemon has it, and not an address at which nothing can be reached."""
    assert train(made, run, "placed").status == 0
    ended = train(made, run, "placed", data="/elsewhere")
    assert ended.status == 1 and "root /data is not visible here" in ended.said, ended.said
    assert "mount" in ended.said and "0.0.0.0" not in ended.said


@pytest.fixture
def slow(made: Engine, tmp_path: Path) -> Iterator[Project]:
    """A daemon that writes so slowly that a save is staged for long before it is committed."""
    daemon = yaml.safe_load((TOP / "docker-compose.yml").read_text())["services"]["holdfast"]
    daemon["image"] = "holdfast"
    daemon["environment"]["HOLDFAST_WRITE_BYTES_PER_SECOND"] = "2000000"  # 15 s for a save
    compose = {"services": {"holdfast": daemon}, "volumes": {"data": {}, "socket": {}}}
    with project(made, "holdfast-test-slow", tmp_path, compose) as found:
        found.up("holdfast")
        yield found


def saving(made: Engine, slow: Project, run: str, *code: str, limits: tuple[str, ...] = ()) -> str:
    """The container of a trainer that saves step 1; `code` is how Python runs it."""
    mounts = ["--volume", f"{slow.name}_socket:/run/holdfast", "--volume", TESTS]
    words = ["python", *code, SOCKET, run, "0", "1", "launch", "1", "30000000"]
    started = ["--env", "PYTHONPATH=/tests", "--entrypoint", words[0], *limits, "holdfast", *words[1:]]
    return made.docker("run", "--detach", "--interactive", *mounts, *started).strip()


def stage(made: Engine, slow: Project, run: str) -> None:
    """A trainer that is killed just after its save was staged, and before it is committed."""
    container = saving(made, slow, run, "-m", "tests.crash.rank_process")
    try:
        wait_until(lambda: "sealed 1" in made.docker("logs", container), HEALTHY_S)
        made.docker("kill", container)
        assert steps_of(slow, run) == []
    finally:
        made.docker("rm", "--force", container)


def steps_of(slow: Project, run: str) -> list[str]:
    return slow.run(
        "exec", "-T", "holdfast", "find", "/data", "-path", f"/data/{run}/checkpoints/step-*", "-name", "COMMIT"
    ).split()


def test_a_staged_save_outlives_trainer_and_daemon_in_their_containers(made: Engine, slow: Project) -> None:
    """The daemon's process is killed, and not its container: the first process has the memory, and starts it again."""
    stage(made, slow, "killed")
    container = slow.run("ps", "--quiet", "holdfast").strip()
    slow.run("exec", "-T", "holdfast", "python", "-c", KILL_DAEMON)
    wait_until(lambda: len(steps_of(slow, "killed")) == 1, HEALTHY_S)
    about = json.loads(made.docker("inspect", container))[0]
    assert about["State"]["Running"] and about["RestartCount"] == 0
    slow.up("holdfast")
    slow.run("exec", "-T", "holdfast", "holdfast", "wait", "killed@1")


def test_a_staged_save_outlives_a_trainer_that_takes_too_much_memory(made: Engine, slow: Project) -> None:
    """The kernel kills the trainer at its own limit, and the daemon, which has the same memory, goes on."""
    limits = ("--memory", "300m", "--memory-swap", "300m")
    container = saving(made, slow, "greedy", "-c", GREEDY, limits=limits)
    try:
        assert int(made.docker("wait", container, timeout_s=HEALTHY_S)) == 137
        assert json.loads(made.docker("inspect", container))[0]["State"]["OOMKilled"]
        assert "sealed 1" in made.docker("logs", container)
    finally:
        made.docker("rm", "--force", container)
    wait_until(lambda: len(steps_of(slow, "greedy")) == 1, HEALTHY_S)
    slow.run("exec", "-T", "holdfast", "holdfast", "wait", "greedy@1")
    log = slow.run("logs", "--no-color", "holdfast")
    assert log.count("holdfast_service: serving ") == 1, "it is the daemon that staged the save"


def test_a_staged_save_that_is_lost_with_its_container_is_told(made: Engine, slow: Project) -> None:
    """The container is killed as a whole, and the trainer is gone: an event says what was lost, and the round why."""
    stage(made, slow, "lost")
    container = slow.run("ps", "--quiet", "holdfast").strip()
    made.docker("kill", container)
    made.docker("start", container)
    slow.up("holdfast")

    def asked(path: str) -> list[dict[str, Any]]:
        answer = json.loads(slow.run("exec", "-T", "holdfast", "python", "-c", ASK_OWN, path))
        return list(answer["items"])

    wait_until(lambda: asked("/v1/events?run=lost&kind=staged-save-lost") != [], HEALTHY_S)
    (event,) = asked("/v1/events?run=lost&kind=staged-save-lost")
    assert (event["level"], event["step"]) == ("error", 1) and steps_of(slow, "lost") == []
    assert [(one["state"], bool(one["code"])) for one in asked("/v1/rounds?run=lost")] == [("aborted", True)]


@pytest.mark.parametrize(
    "how", [["stop", "holdfast"], ["up", "--detach", "--force-recreate", "holdfast"]], ids=lambda how: how[0]
)
def test_a_stop_or_an_upgrade_in_mid_save_loses_nothing(made: Engine, slow: Project, how: list[str]) -> None:
    """SIGTERM comes while a save is staged whose trainer is gone: the daemon writes it in its default grace."""
    stage(made, slow, "upgraded")
    slow.run(*how)
    slow.up("holdfast")
    assert len(steps_of(slow, "upgraded")) == 1


def test_training_goes_on_after_the_daemon_was_recreated(made: Engine, tmp_path: Path) -> None:
    """`up --force-recreate holdfast`: a trainer that runs goes on, and one that ended can be started again."""
    borrow_torch(made)
    compose = yaml.safe_load((TOP / "docker-compose.yml").read_text())
    services = {name: compose["services"][name] for name in ("holdfast", "trainer")}
    services["holdfast"]["image"] = services["trainer"]["image"] = "holdfast"
    services["trainer"] |= {
        "entrypoint": ["python", "-m", "tests.containers.trainer"],
        "environment": {"PYTHONPATH": "/tests"},
    }
    services["trainer"]["command"] = [SOCKET, "on", "4", "100000"]
    services["trainer"]["volumes"] += [TESTS, SITE]
    volumes: dict[str, Any] = {name: {} for name in ("data", "socket")}
    with project(made, "holdfast-test-again", tmp_path, {"services": services, "volumes": volumes}) as found:
        found.up("holdfast")
        found.run("up", "--detach", "trainer")
        trainer = found.run("ps", "--quiet", "trainer").strip()

        def said(word: str) -> list[int]:
            lines = [line.split() for line in made.docker("logs", trainer).splitlines()]
            return [int(line[1]) for line in lines if line[0] == word]

        def goes_on() -> None:
            before = len(said("done"))
            wait_until(lambda: len(said("done")) > before + 2, HEALTHY_S)

        goes_on()
        found.run("up", "--detach", "--force-recreate", "holdfast")
        goes_on()
        assert said("restored") == [0], "it is the same process"
        made.docker("kill", trainer)
        newest = said("done")[-1]
        made.docker("start", trainer)
        goes_on()
        assert said("restored")[-1] >= newest
