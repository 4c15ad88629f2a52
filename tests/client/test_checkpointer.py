"""The trainer's hook against a real daemon process: five lines in a loop, and everything that can go wrong with them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from socket import AF_UNIX, socket

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Api, Checkpointer, Fragment, SaveWarning
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    CorruptExtent,
    DaemonGone,
    Damaged,
    DeadlineExceeded,
    InvalidRequest,
    NoSuchCheckpoint,
    RoundAborted,
    StaleAttempt,
    StateMismatch,
)
from holdfast_formats.staging import arena
from holdfast_formats.staging.slot_pages import have_pages
from tests.daemons import RunningDaemon, running, wait_until


def training_state(seed: int) -> dict:
    """A model, an optimizer that has stepped, a schedule, a tensor and a value."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optim.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    return {"model": model, "optim": optim, "scheduler": scheduler, "tensor": torch.randn(3), "epoch": seed}


START = """
import gc, sys, torch
from holdfast import Checkpointer
assert gc.isenabled()
checkpointer = Checkpointer("small", {"model": {"weight": torch.zeros(4)}}, at=sys.argv[1])
assert checkpointer.restore() == 0
print(sorted({"holdfast.rest.api", "httpx", "torch._dynamo"} & sys.modules.keys()))
"""


def test_a_trainer_starts_without_what_it_does_not_use(tmp_path: Path) -> None:
    """On a directory it needs no client of the REST API, and without an optimizer nothing of torch.compile: both cost a
    restart a second.
    """
    command = [sys.executable, "-c", START, str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_five_lines_in_a_loop(daemon: RunningDaemon, run: str) -> None:
    """The loop of the README: restore says 0 first, and the newest step after the trainer came back."""
    for expected in (0, 4):
        state = training_state(expected)
        with Checkpointer(run, state, at=daemon.socket) as checkpointer:
            first = checkpointer.restore() + 1
            assert first == expected + 1
            for step in range(first, first + 4):
                state["optim"].step()
                if step % 2 == 0:
                    ticket = checkpointer.save(step)
                    assert ticket.wait_staged(60)
    assert ticket.done and ticket.result().step == 8


def test_everything_comes_back_bit_equal_and_in_place(daemon: RunningDaemon, run: str) -> None:
    """Parameters, optimizer state, schedule and random streams are as they were; the live tensors keep their identity."""
    state = training_state(1)
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        checkpointer.save(3, wait="durable", metrics={"loss": 0.25})
        draws = (torch.rand(4), np.random.rand(4))
    other = training_state(2)
    weight = other["model"][0].weight
    memory = weight.data_ptr()
    with Checkpointer(run, other, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
    assert other["model"][0].weight is weight and weight.data_ptr() == memory
    for name, value in state["model"].state_dict().items():
        assert torch.equal(value, other["model"].state_dict()[name])
    for a, b in zip(state["optim"].state.values(), other["optim"].state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert other["scheduler"].state_dict() == state["scheduler"].state_dict()
    assert torch.equal(other["tensor"], state["tensor"])
    assert torch.equal(torch.rand(4), draws[0]) and np.array_equal(np.random.rand(4), draws[1])


@pytest.mark.parametrize("wait", ["fence", "staged", "step"])
def test_a_save_during_which_training_goes_on_holds_the_state_of_the_call(
    daemon: RunningDaemon, run: str, wait: str
) -> None:
    """What an optimizer's step, or anything after a fence or a staged save, changes is not in the checkpoint."""
    state = training_state(1)
    before = {n: t.clone() for n, t in state["model"].state_dict().items()}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1, wait="staged" if wait == "staged" else None)
        if wait == "step":
            state["optim"].step()
        else:
            checkpointer.fence()
            for parameter in state["model"].parameters():
                parameter.data.zero_()
        ticket.result(180)
        checkpointer.restore()
    assert all(torch.equal(t, before[n]) for n, t in state["model"].state_dict().items())


def test_without_a_daemon_an_embedded_one_is_started_and_outlives_the_trainer(tmp_path: Path) -> None:
    """With a root that nobody serves, save() brings up a daemon; restoring needs none."""
    state = training_state(1)
    root = tmp_path / "data"
    with Checkpointer("r", state, at=root) as checkpointer:
        assert checkpointer.restore(groups=["model"]) == 0
        assert not root.exists(), "restoring a part starts and creates nothing"
        assert checkpointer.restore() == 0
        checkpointer.save(5, wait="durable")
        checkpointer.save(6)
    assert json.loads((root / naming.DAEMON_FILE).read_text())["url"] is None
    os.kill(json.loads((root / naming.DAEMON_FILE).read_text())["pid"], signal.SIGKILL)
    other = training_state(2)
    with Checkpointer("r", other, at=root) as checkpointer:
        assert checkpointer.restore() == 6
    assert torch.equal(other["tensor"], state["tensor"])


def test_only_some_groups(daemon: RunningDaemon, run: str) -> None:
    """Weights often, the optimizer rarely: a resume takes the newest step that has all it needs."""
    state = training_state(1)
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        checkpointer.save(2, groups=["model"], wait="durable")
        assert checkpointer.restore() == 1
        assert checkpointer.restore(groups=["model"]) == 2
        assert checkpointer.restore(2, groups=["model"]) == 2
        with pytest.raises(InvalidRequest, match="nonsense"):
            checkpointer.save(3, groups=["nonsense"])
    files = {p.name for p in (daemon.root / naming.checkpoint_path(run, 2)).iterdir()}
    assert "model.safetensors" in files and "optim.safetensors" not in files


def test_a_step_exists_once(daemon: RunningDaemon, run: str) -> None:
    """Saving a committed step again is refused by name and changes nothing, as is the restore of one that there is not."""
    with Checkpointer(run, {"x": torch.ones(2)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        with pytest.raises(AlreadyCommitted):
            checkpointer.save(1)
        with pytest.raises(NoSuchCheckpoint):
            checkpointer.restore(7)
        checkpointer.save(2, wait="durable")


def test_an_older_launch_is_fenced_off(daemon: RunningDaemon, run: str) -> None:
    """Once a newer launch has said hello, the older one can neither save nor confuse the new one (I6)."""
    old = Checkpointer(run, {"x": torch.ones(2)}, at=daemon.socket)
    old.save(1, wait="durable")
    with Checkpointer(run, {"x": torch.zeros(2)}, at=daemon.socket) as new:
        assert new.restore() == 1
        with pytest.raises(StaleAttempt):
            old.save(2)
        new.save(2, wait="durable")
    old.close()


def test_a_missing_name_is_refused_before_anything_is_touched(daemon: RunningDaemon, run: str) -> None:
    """Strict restores list what is missing and unexpected; non-strict ones report it; wrong shapes are always refused."""
    with Checkpointer(run, {"x": torch.ones(2), "y": torch.ones(3)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    live = {"x": torch.zeros(2), "z": torch.zeros(1)}
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        with pytest.raises(StateMismatch, match=r"extra/z"):
            checkpointer.restore()
        assert not live["x"].any()
        assert checkpointer.restore(strict=False) == 1
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.missing == ("extra/z",) and checkpointer.last_restore.unexpected == ("extra/y",)
        assert live["x"].all()
    wrong = {"x": torch.zeros(3), "y": torch.zeros(3)}
    with Checkpointer(run, wrong, at=daemon.socket) as checkpointer:
        with pytest.raises(StateMismatch, match="x"):
            checkpointer.restore(strict=False)
        assert not wrong["y"].any()


def saved_and_checked(daemon: RunningDaemon, run: str, state: dict[str, torch.Tensor]) -> None:
    """Step 1, in its directory alone: a check that is still under way would mend it from what the daemon holds."""
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint(run, 1).verified)


@pytest.mark.parametrize("prove_first", [False, True])
def test_a_flipped_bit_is_not_handed_over(daemon: RunningDaemon, run: str, prove_first: bool) -> None:
    """The damaged file and tensor are named. With the proof first no live tensor has changed, not even the sound ones."""
    saved_and_checked(daemon, run, {"a": torch.ones(1000), "b": torch.ones(1000)})
    path = daemon.root / naming.checkpoint_path(run, 1) / "extra.safetensors"
    broken = bytearray(path.read_bytes())
    position = broken.index(torch.ones(1).numpy().tobytes() * 1000) + 4 * 1000 + 2  # in b, behind a
    broken[position] ^= 4
    path.write_bytes(broken)
    live = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    checkpointer = Checkpointer(run, live, at=daemon.socket)
    with checkpointer, pytest.raises(CorruptExtent, match=r"extra\.safetensors.*'b'"):
        checkpointer.restore(prove_first=prove_first)
    assert not live["b"].any()  # its one extent is damaged
    assert not (prove_first and live["a"].any())  # without the proof "a" may be filled or not: several threads read


@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_a_truncated_or_missing_file_hands_nothing_over(daemon: RunningDaemon, run: str, harm: str) -> None:
    """Restore names the file and leaves the live state alone."""
    saved_and_checked(daemon, run, {"a": torch.ones(1000)})
    path = daemon.root / naming.checkpoint_path(run, 1) / "extra.safetensors"
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    live = {"a": torch.zeros(1000)}
    with Checkpointer(run, live, at=daemon.socket) as checkpointer, pytest.raises(Damaged, match=path.name):
        checkpointer.restore()
    assert not live["a"].any()


def test_a_commit_that_its_manifest_vouches_for_is_mended_and_restored(daemon: RunningDaemon, run: str) -> None:
    """COMMIT says nothing that the manifest does not: the daemon makes it anew, and the rank goes on."""
    saved_and_checked(daemon, run, {"a": torch.ones(1000)})
    path = daemon.root / naming.checkpoint_path(run, 1) / naming.COMMIT
    sound = path.read_bytes()
    path.write_bytes(sound.replace(b'"files"', b'"filez"'))
    live = {"a": torch.zeros(1000)}
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 1
    assert live["a"].all() and path.read_bytes() == sound


def test_what_cannot_be_stored_is_refused_by_path_before_anything_is_staged(daemon: RunningDaemon, run: str) -> None:
    """A function in a nested value is named by its path; the daemon hears nothing of the step."""
    state = {"x": torch.ones(1), "loader": {"sampler": {"fn": len}}}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        with pytest.raises(InvalidRequest, match=r"loader\.sampler\.fn"):
            checkpointer.save(1)
        state["loader"] = {"sampler": {"fn": "len"}}
    assert not (daemon.root / run / naming.CHECKPOINTS).exists()


def test_declared_fragments_and_shapes_of_every_kind(daemon: RunningDaemon, run: str) -> None:
    """Hand-declared shards, empty, 0-d, strided and 8-bit tensors survive bit for bit."""
    base = torch.arange(24.0).reshape(4, 6)

    def make(fill: bool) -> dict:
        def held(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if fill else torch.zeros_like(tensor)

        flat = held(base.reshape(-1))
        return {
            "whole": Fragment(held(base), (4, 6), offset=(0, 0)),
            "flat": Fragment(flat, (4, 6), flat=(0, 24)),
            "column": held(base.T),
            "view": held(base)[:, ::2],
            "scalar": held(torch.tensor(7)),
            "empty": torch.zeros(0, 3),
            "mask": held(base > 5),
            "fp8": held(base).to(torch.float8_e4m3fn),
            "nothing": {},
        }

    saved, live = make(True), make(False)
    with Checkpointer(run, saved, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with Checkpointer(run, live, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 1
    for name, value in saved.items():
        if name == "nothing":
            continue
        a, b = (v.tensor if isinstance(v, Fragment) else v for v in (value, live[name]))
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b))), name


def test_a_daemon_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A socket that nobody answers is an error with a hint, not a hang."""
    with pytest.raises(DaemonGone, match="no daemon answers"):
        Checkpointer("r", {"x": torch.ones(1)}, at=tmp_path / "none.sock").save(1)


def test_the_daemon_dies_under_an_open_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on; where no other daemon comes in time, the ticket and the next save tell of the loss."""
    monkeypatch.setattr("holdfast.link.unix_socket.MEND_S", 0.5)
    daemon = RunningDaemon(tmp_path / "root")
    checkpointer = Checkpointer("r", {"x": torch.ones(1)}, at=daemon.socket)
    checkpointer.save(1, wait="durable")
    daemon.freeze()  # so the save stays open
    tickets: list[SaveTicket] = []
    stuck = threading.Thread(target=lambda: tickets.append(checkpointer.save(2)))
    stuck.start()
    daemon.kill()
    stuck.join(180)
    assert not stuck.is_alive()
    wait_until(lambda: tickets[0].done)
    assert isinstance(tickets[0].error, DaemonGone)
    daemon = RunningDaemon(tmp_path / "root")
    with pytest.warns(SaveWarning, match="r@2 failed") as told:
        assert checkpointer.save(3, wait="durable").done, "the client connects again by itself"
    assert told[0].filename == __file__, "it points to the line that saves, and to none of ours"
    checkpointer.close()
    assert daemon.stop() == 0


def test_more_slots_than_a_rank_may_have_are_refused() -> None:
    """By name, before anything is begun."""
    with pytest.raises(InvalidRequest, match="over the limit of 64"):
        Checkpointer("r", {"x": torch.ones(1)}, slots=100_000)


def test_a_failed_save_is_told_by_the_next_one(tmp_path: Path) -> None:
    """A save that the daemon cannot write fails its ticket, warns at the next save, and leaves the older checkpoints."""
    with running(tmp_path / "root") as daemon:
        checkpointer = Checkpointer("r", {"x": torch.ones(1)}, at=daemon.socket)
        checkpointer.save(1, wait="durable")
        staging = daemon.root / "r" / naming.STAGING
        if staging.exists():
            staging.rmdir()
        staging.write_text("in the way")
        ticket = checkpointer.save(2)
        with pytest.raises(Exception, match="storage-failed"):
            ticket.result(180)
        staging.unlink()
        with pytest.warns(SaveWarning, match="r@2 failed"):
            checkpointer.save(3, wait="durable")
        assert checkpointer.restore() == 3
        checkpointer.close()


def test_a_world_of_which_one_rank_never_saves(daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a world's save is not a checkpoint; when the rank parts, the round is aborted by name."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "once")
    monkeypatch.setenv("RANK", "0")
    first = Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket)
    monkeypatch.setenv("RANK", "1")
    second = Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket)
    ticket = first.save(1)
    assert second.restore() == 0
    with pytest.raises(DeadlineExceeded):
        ticket.result(0.2)
    second.close()
    with pytest.raises(RoundAborted):
        ticket.result(180)
    first.close(wait=False)


def test_every_rank_of_a_launch_restores_the_same_step(
    daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first restore stands for the turn, though there is something newer when the next rank asks."""
    with Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        checkpointer.save(2, wait="durable")
    first, second = two_ranks(daemon, run, monkeypatch)
    assert first.restore(step=1) == 1
    assert second.restore() == 1
    first.save(3)
    second.save(3, wait="durable")
    with ThreadPoolExecutor(2) as threads:  # each goes on when both have read it
        assert list(threads.map(lambda rank: rank.restore(), (first, second))) == [3, 3]
    first.close()
    second.close()


def test_ranks_that_come_from_different_steps_save_nothing_together(
    daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one rank has restored and the other has not, what they save is no checkpoint of one training: refused."""
    with Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    first, second = two_ranks(daemon, run, monkeypatch)
    assert first.restore(step=1) == 1
    first.save(2)
    with pytest.raises(CheckpointError, match=r"continues from|restored nothing"):
        second.save(2, wait="durable")
    first.close(wait=False)
    second.close(wait=False)


def two_ranks(daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch) -> list[Checkpointer]:
    """Both ranks of a launch, in this process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "a")
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        found.append(Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket))
    return found


def test_retention_keeps_the_newest(daemon: RunningDaemon, run: str) -> None:
    """keep_last=2: older checkpoints go once newer ones are verified, and the newest is restored."""
    directory = daemon.root / run / naming.CHECKPOINTS
    with Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket, keep_last=2) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, wait="durable")
        wait_until(lambda: sorted(p.name for p in directory.iterdir()) == ["step-00000004", "step-00000005"])
        assert checkpointer.restore() == 5
    assert json.loads((daemon.root / run / naming.RUN_FILE).read_text())["keep_last"] == 2


def test_by_url(daemon: RunningDaemon, run: str) -> None:
    """The service's address is enough on its own machine."""
    with Checkpointer(run, {"x": torch.ones(1)}, at=daemon.url) as checkpointer:
        checkpointer.save(1, wait="durable")
        assert checkpointer.restore() == 1


@pytest.mark.parametrize("arguments", [{"run": "../x"}, {"slots": 0}, {"keep_last": 0}, {"at": ""}, {"assets": 3}])
def test_bad_arguments_are_refused_at_construction(arguments: dict) -> None:
    """Names, options and combinations that cannot work are refused before anything is contacted."""
    settings = {"run": "r", "state": {"x": torch.ones(1)}, **arguments}
    with pytest.raises(InvalidRequest):
        Checkpointer(**settings)


def test_the_first_save_finds_its_memory_ready(daemon: RunningDaemon, run: str) -> None:
    """restore() reserves slots large enough for what the optimizer will add at its first step; the first save uses them."""
    model = nn.Linear(64, 64)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 0
        checkpointer._preparation._under_way.join()
        prepared = checkpointer._reservation.slots
        assert prepared is not None
        model(torch.ones(1, 64)).sum().backward()
        state["optim"].step()
        checkpointer.save(1, wait="durable")
        assert checkpointer._reservation.slots is prepared


def segment_of(run: str) -> int:
    """The descriptor of its only rank's shared memory."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            if f"memfd:holdfast-{run}-rank0" in os.readlink(entry):
                return int(entry.name)
    raise AssertionError("no shared memory")


def test_the_memory_of_one_slot_is_prepared_and_of_another_when_it_is_needed(daemon: RunningDaemon, run: str) -> None:
    """A save that cannot have the first slot, which here is being read, begins in a second one, and its pages are prepared
    meanwhile; once more after the daemon has returned them.
    """
    with Checkpointer(run, {"x": torch.ones(2**18)}, at=daemon.socket) as checkpointer:
        checkpointer.prepare(wait=True)
        slots, fd = checkpointer._reservation.slots, segment_of(run)
        assert slots is not None and have_pages(fd, slots.geometry) == {0} and slots.is_ready(0)
        checkpointer.save(1, wait="durable")
        assert have_pages(fd, slots.geometry) == {0}
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        fcntl.fcntl(reading, fcntl.F_OFD_SETLK, arena.slot_lock(slots.geometry, 0, fcntl.F_RDLCK))
        for step in (2, 3):
            checkpointer.save(step, wait="durable")
            checkpointer._reservation._touching[-1].join()
            assert have_pages(fd, slots.geometry) == {0, 1} and slots.is_ready(1)
            assert len(checkpointer._reservation._touching) == step
            arena.mark_emptied(slots.memory, slots.geometry, 1)
            assert not slots.is_ready(1)
        os.close(reading)


def test_a_save_may_outgrow_the_memory_that_is_being_prepared(daemon: RunningDaemon, run: str) -> None:
    """The thread that prepares it comes to the copy plan after the save, whose layout does not fit those slots."""
    state = {"x": torch.ones(2**10)}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        checkpointer.prepare(wait=True)
        small = checkpointer._reservation.slots
        assert small is not None
        state["x"] = torch.ones(2**20)
        checkpointer.save(1, wait="durable")
        assert checkpointer._reservation.slots is not small
        checkpointer._saves.lay_ahead(small)


def test_a_closed_checkpointer_refuses_to_save(daemon: RunningDaemon, run: str) -> None:
    """After close() nothing holds an optimizer's step back any more, so a save is refused by name."""
    checkpointer = Checkpointer(run, {"x": torch.ones(1)}, at=daemon.socket)
    checkpointer.close()
    with pytest.raises(InvalidRequest, match="closed"):
        checkpointer.save(1)


def test_steps_lists_committed_steps_and_needs_no_daemon(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Newest last; none before the first save, after which the newest is what `restore()` returns."""
    with Checkpointer(run, training_state(1), at=daemon.socket) as checkpointer:
        with pytest.raises(InvalidRequest, match="until restore"):
            checkpointer.steps()  # only a connection could tell, and that would declare a launch
        with pytest.raises(InvalidRequest, match="until restore"):
            checkpointer.read_asset(2, "notes.json")
        assert checkpointer.restore() == 0
        assert checkpointer.steps() == [] and checkpointer.latest_step() is None
        for step in (2, 10):
            checkpointer.save(step, wait="durable")
        assert checkpointer.steps() == [2, 10] and checkpointer.latest_step() == 10
        assert checkpointer.restore() == 10
    with pytest.raises(InvalidRequest, match="closed"):
        checkpointer.steps()
    with Checkpointer(run, training_state(1), at=tmp_path / "no-daemon") as unserved:
        assert unserved.steps() == []
    assert not (tmp_path / "no-daemon").exists()


@pytest.mark.parametrize("at", ["root", "url"])
def test_a_run_is_looked_at_beside_its_training(daemon: RunningDaemon, run: str, at: str) -> None:
    """By the directory or the address, as in a notebook: the launch that trains is not shut out."""
    with Checkpointer(run, training_state(1), at=daemon.socket) as training:
        training.save(1, assets={"notes.json": "{}"}, wait="durable")
        with Checkpointer(run, {}, at=getattr(daemon, at)) as beside:
            assert beside.steps() == [1] and beside.read_asset(1, "notes.json") == b"{}"
        training.save(2, wait="durable")
        assert training.steps() == [1, 2]


def test_a_socket_that_a_dead_daemon_left_is_no_daemon(
    daemon: RunningDaemon, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `at`, the directory below the current one is read then."""
    with Checkpointer(run, training_state(1), at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("holdfast").mkdir()
    Path("holdfast-data").symlink_to(daemon.root)
    with socket(AF_UNIX) as left:
        left.bind("holdfast/holdfast.sock")
    with Checkpointer(run, {}) as notebook:
        assert notebook.steps() == [1]


def test_repr_says_run_step_and_state(daemon: RunningDaemon, run: str) -> None:
    """Of a Checkpointer and of a ticket, from the first save to the close."""
    state = training_state(1)
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer {run}: rank 0 of 1>"
        ticket = checkpointer.save(3, wait="durable")
        assert repr(ticket) == f"<SaveTicket {run}@3: durable>"
        checkpointer.restore()
        assert repr(checkpointer) == f"<Checkpointer {run}: rank 0 of 1, restored step 3>"
    assert repr(checkpointer) == f"<Checkpointer {run}: rank 0 of 1, restored step 3, closed>"


def test_repr_of_a_ticket_follows_its_save() -> None:
    """Saving, staged, then how it ended; the error is named."""
    ticket = SaveTicket("llama", 7, 1)
    assert repr(ticket) == "<SaveTicket llama@7: saving>"
    ticket.awaits = "fence()"
    assert repr(ticket) == "<SaveTicket llama@7: waiting for the end of fence()>"
    ticket.mark_staged()
    assert repr(ticket) == "<SaveTicket llama@7: staged>"
    ticket.end(DaemonGone("no answer"))
    assert repr(ticket) == "<SaveTicket llama@7: failed, DaemonGone: no answer>"


def test_a_restore_logs_one_line(daemon: RunningDaemon, run: str, caplog: pytest.LogCaptureFixture) -> None:
    """Step, bytes, seconds, speed and source; a restore that finds nothing logs none."""
    with Checkpointer(run, training_state(1), at=daemon.socket) as checkpointer, caplog.at_level(logging.INFO):
        assert checkpointer.restore() == 0
        assert not [one for one in caplog.messages if one.startswith("restored ")]
        checkpointer.save(3, wait="durable")
        checkpointer.restore()
        report = checkpointer.last_restore
    assert report is not None
    [line] = [one for one in caplog.messages if one.startswith("restored ")]
    assert line.startswith(f"restored {run}@3: {report.bytes} bytes in {report.seconds:.3f} s, ")
    assert line.endswith(f" GB/s, from {report.source}")


def test_a_limit_that_is_no_number_is_refused(daemon: RunningDaemon) -> None:
    """No time is after NaN, so a wait of so many seconds would not end."""
    nan = float("nan")
    with Checkpointer("limits", {"x": torch.zeros(3)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1)
        waits: tuple[Callable[[], object], ...] = (
            lambda: ticket.result(nan),
            lambda: ticket.wait_staged(nan),
            lambda: checkpointer.on_preemption(grace_s=nan),
            lambda: Api("http://127.0.0.1:9", timeout_s=nan),
            lambda: Api("http://127.0.0.1:9").wait_job(1, nan),
        )
        for wait in waits:
            with pytest.raises(InvalidRequest, match="is not a number"):
                wait()
