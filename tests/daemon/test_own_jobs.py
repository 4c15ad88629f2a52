"""Imports, exports and merges in any directory: for the daemon's own user, and for no other caller."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holdfast.link import own_daemon
from holdfast.link.own_daemon import OwnDaemon
from holdfast.rest import service_jobs
from holdfast.rest.api import Api
from holdfast.threads import daemon_heartbeat
from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    DeadlineExceeded,
    Forbidden,
    InUse,
    InvalidRequest,
    RoundAborted,
    WrongRoot,
)
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import wire
from holdfast_service.daemon.arena.callers import Caller
from holdfast_service.daemon.arena.peer import PeerProcess
from holdfast_service.daemon.own_jobs import SentProgress, check_own
from tests.checkpoints import build_root
from tests.daemon.arena.test_callers import GROUP, needs_root
from tests.daemon.copies_world import copies_world
from tests.daemons import RunningDaemon, running
from tests.job_requests import an_export, an_import
from tests.kit.commands import call, call_json, no_service  # noqa: F401 - a fixture

WEIGHTS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of another program, outside of every root."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"w": WEIGHTS}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build_root(tmp_path / "root", {"tiny": (5,)})
    return tmp_path / "root"


def quiet(done: int, total: int) -> None:
    """Progress that is not looked at."""


def ask(daemon: RunningDaemon, job: Any, here: Path) -> Any:
    """The result of a job that this user has the daemon do."""
    own = OwnDaemon.serving(daemon.root)
    assert own is not None
    os.chdir(here)
    return own.do(job, quiet)


@pytest.fixture(autouse=True)
def _back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_service", "forked_programs")
def test_a_daemon_without_http_imports_exports_and_merges(root: Path, model: Path, tmp_path: Path) -> None:
    """As the guide shows it: `--root` of a directory that a trainer's daemon serves, and paths as the shell means them."""
    with running(root):
        assert call("import", "model", "mine@3", "--root", root, "--dry-run").exit_code == 0
        assert not (root / "mine").exists()
        assert call_json("import", "model", "mine@3", "--root", "root")["tensors"] == 1
        again = call("import", model, "mine@3", "--root", root)
        assert again.exit_code == 4 and "already committed" in again.output
        (tmp_path / "recipe.yaml").write_text(
            "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: ./model}, {model: mine@3}]\n"
        )
        merged = call("merge", "recipe.yaml", "soup@1", "--root", root)
        assert merged.exit_code == 0, merged.output
    found = load_file(root / naming.checkpoint_path("mine", 3) / "model.safetensors")
    assert np.array_equal(found["w"], WEIGHTS)


@pytest.mark.usefixtures("no_service", "forked_programs")
def test_a_service_of_this_user_exports_anywhere(root: Path, model: Path, tmp_path: Path) -> None:
    """Over `--url` too, without `--export-root`; the audit log tells of it."""
    with running(root, listen="127.0.0.1:0") as daemon:
        assert call_json("import", model, "mine@3", "--url", daemon.url)["tensors"] == 1
        done = call_json("export", "mine@3", "new/release", "--as", "hf", "--url", daemon.url)
        assert done["to"] == "new/release"
        assert np.array_equal(load_file(tmp_path / "new" / "release" / "model.safetensors")["w"], WEIGHTS)
        refused = call("export", "mine@3", "new/release", "--as", "hf", "--url", daemon.url)
        assert refused.exit_code == 4 and "already exists" in refused.output
        kinds = {entry["kind"] for entry in call_json("audit", "--url", daemon.url)}
    assert {"checkpoint-imported", "checkpoint-exported"} <= kinds


def test_a_token_opens_no_path(root: Path, model: Path, tmp_path: Path) -> None:
    """Over HTTP an admin, and the owner's own token, get what is below the export root, whatever the path looks like."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(model)
    for flags in ((), ("--export-root", str(tmp_path / "open"))):
        with running(root, *flags, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
            for path in (str(model), "../model", "link", f"x/../../{model.name}"):
                for job in (an_import("mine", 3, **{"from": path}), an_export("tiny", 5, f"{path}/out")):
                    with pytest.raises(CheckpointError):
                        service_jobs.as_job(api, job, quiet)
    assert sorted(os.listdir(model)) == ["config.json", "model.safetensors"]


_STRANGER = """
import os, socket, sys
os.setgroups(eval(sys.argv[1])); os.setgid(65534); os.setuid(65534)
made = socket.socket(socket.AF_UNIX)
made.settimeout(180)
made.connect(sys.argv[2])
made.send(bytes.fromhex(sys.argv[3]))
os.write(1, made.recv(65536))
"""


@needs_root
def test_other_users_are_refused(model: Path) -> None:
    """A member of the socket's group may save, and has no file read or written for it."""
    request = wire.DoJob(id=7, directory=str(model.parent), job=an_import("mine", 3, **{"from": str(model)}).model_dump())
    encoded = wire.encode_frame(request).hex()
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        Path(directory).chmod(0o755)
        with running(Path(directory) / "root", "--socket-group", "man") as daemon:
            for groups in ((), (GROUP,)):
                daemon.socket.chmod(0o666)
                command = [sys.executable, "-I", "-c", _STRANGER, str(groups), str(daemon.socket), encoded]
                heard = subprocess.run(command, capture_output=True, timeout=180, check=True).stdout
                (answer,) = wire.FrameDecoder(wire.TO_RANK).feed(heard)
                assert answer.problem["code"] == "forbidden"
            assert not (daemon.root / "mine").exists()


def test_a_container_of_this_user_is_refused(root: Path, model: Path) -> None:
    """A process with the socket and other mounts would get at files that it does not see."""
    job = an_import("mine", 3, **{"from": str(model)})
    program = f"""
import sys
from pathlib import Path
from holdfast.link.own_daemon import OwnDaemon
from holdfast_formats.rest.jobs import parse
OwnDaemon.serving(Path({str(root)!r})).do(parse({job.model_dump()!r}), lambda done, total: None)
"""
    with running(root):
        command = ["unshare", "--user", "--map-current-user", "--mount", sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if done.stderr.startswith("unshare:"):
            pytest.skip(done.stderr)
        assert "Forbidden" in done.stderr and "sees other files" in done.stderr
        assert not (root / "mine").exists()


def test_only_a_living_process_of_this_user_with_these_files(tmp_path: Path) -> None:
    """What the kernel cannot say counts against the caller."""
    here, there = socket.socketpair()
    with here, there:
        peer = PeerProcess(here)
        check_own(Caller.of(here), peer)
        for caller in (Caller(os.getpid(), os.geteuid() + 1, frozenset()), Caller(0, os.geteuid(), frozenset())):
            with pytest.raises(Forbidden):
                check_own(caller, peer)
        peer.close()
        with pytest.raises(Forbidden, match="other files"):
            check_own(Caller.of(here), peer)


def test_no_link_and_no_run_is_written_through(root: Path, model: Path, tmp_path: Path) -> None:
    """An export ends neither in a run or a checkpoint, also through a link, nor in place of something; links in a source
    are not followed.
    """
    (tmp_path / "aside").symlink_to(root / "tiny")
    (tmp_path / "taken").symlink_to(tmp_path / "nowhere")
    (model / "secret.json").symlink_to("/etc/hostname")
    with running(root) as daemon:
        inside = root / naming.checkpoint_path("tiny", 5)
        for target in (inside / "x", root / "tiny" / "x", tmp_path / "aside" / "x", root / "new" / "checkpoints"):
            with pytest.raises(InvalidRequest, match="cannot be written"):
                ask(daemon, an_export("tiny", 5, str(target)), tmp_path)
        with pytest.raises(AlreadyCommitted):
            ask(daemon, an_export("tiny", 5, str(tmp_path / "taken")), tmp_path)
        with pytest.raises(InvalidRequest, match="hidden"):
            ask(daemon, an_export("tiny", 5, ".bashrc"), tmp_path)
        ask(daemon, an_import("mine", 3, **{"from": "model"}), tmp_path)
        files = os.listdir(root / naming.checkpoint_path("mine", 3))
    assert "secret.json" not in files and not (tmp_path / "nowhere").exists()


def test_another_root_and_another_users_daemon_are_not_taken(
    root: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The daemon has to be of this user, and to serve exactly this root."""
    with running(root) as daemon:
        own = OwnDaemon.serving(root)
        assert own is not None
        own._root = RootMark(id="another")
        with pytest.raises(WrongRoot):
            own.do(an_import("mine", 3, **{"from": str(model)}), quiet)
        real = os.geteuid()
        monkeypatch.setattr(own_daemon.os, "geteuid", lambda: real + 1)
        assert OwnDaemon.serving(daemon.root) is None
    assert OwnDaemon.serving(tmp_path) is None


def test_a_daemon_that_is_stopped_ends_the_wait(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do; the daemon removes what it has begun when it goes on, and does the next job."""
    monkeypatch.setattr(daemon_heartbeat, "SILENCE_MAX_S", 0.5)
    monkeypatch.setattr(daemon_heartbeat, "SIGN_WAIT_S", 0.5)
    job = an_import("mine", 3, **{"from": str(model)})
    with running(root) as daemon:
        own = OwnDaemon.serving(root)
        assert own is not None
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match="did not answer") as silent:
                own.do(job, quiet)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert "kill -CONT" in silent.value.hint
        assert ask(daemon, an_import("mine", 4, **{"from": str(model)}), root)["tensors"] == 1


def test_a_command_that_is_gone_stops_its_job() -> None:
    """So that Ctrl-C leaves nothing."""
    sent: list[wire.Message] = []
    SentProgress(sent.append, lambda: False).report(1, 2)
    assert sent == [wire.JobProgress(done_bytes=1, total_bytes=2)]
    with pytest.raises(RoundAborted):
        SentProgress(sent.append, lambda: True).report(1, 2)


def test_a_place_is_staged_at_by_one_import(tmp_path: Path) -> None:
    """Two threads that make the same checkpoint would write to the same files; afterwards the place is free."""
    with copies_world(tmp_path) as world:
        place, imports = naming.job_place("mine", 3, "0" * 32), world.control.imports
        with imports.alone(place), pytest.raises(InUse), imports.alone(place):
            pass
        with imports.alone(place), imports.alone(place._replace(step=4)):
            pass
