"""A restarted trainer finds the newest commit in the slots it was saved from, whatever its world; if not, on the disk."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import Checkpointer, Fragment
from holdfast.link.unix_socket import SocketLink
from holdfast.read.directory_root import committed_steps
from holdfast.read.held_slots import take_held
from holdfast.read.memory_load import HeldSlotsSource, fill
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.root_directory import open_checkpoint
from holdfast.rest.api import Api
from holdfast_formats.errors import CorruptExtent
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, wire
from tests.crash.rank_process import content
from tests.daemons import RunningDaemon, running, wait_until, wait_until_read_back
from tests.forked import Forked
from tests.kit.daemons import own_daemon

SIZE = 20_000_003  # many extents a rank, and neither rank's part begins at an extent
WORLD = 2
_launches = itertools.count()


daemon = own_daemon(scope="function")


def start(daemon: RunningDaemon, world: int, step: int, in_turn: bool = False) -> list[Forked]:
    """The ranks of a launch, which save a step and then wait; `in_turn`, each once the one before it has sealed its part."""
    launch = f"launch-{next(_launches)}"
    words = ["-m", "tests.crash.rank_process", daemon.socket, "r"]
    ranks = []
    for number in range(world):
        ranks.append(Forked([*words, number, world, launch, step, SIZE], talks=True))
        if in_turn:
            assert ranks[-1].stdout is not None
            assert f"sealed {step}\n" in iter(ranks[-1].stdout.readline, "")
    return ranks


def kill(ranks: list[Forked]) -> None:
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.communicate()


def saved_and_killed(daemon: RunningDaemon, world: int = WORLD) -> None:
    """Step 1 is committed and read back, and everybody who saved it is dead: what is damaged now, nobody has found yet."""
    ranks = start(daemon, world, 1)
    wait_until(lambda: committed_steps(daemon.root, "r") == [1])
    kill(ranks)
    wait_until_read_back(daemon, "r", 1)


def restored(daemon: RunningDaemon, world: int = WORLD) -> Checkpointer:
    """A new trainer, of a world of one, after its restore: the values are the saved ones, from wherever they came."""
    state = {"model": {"w": torch.zeros(world * SIZE, dtype=torch.uint8)}}
    checkpointer = Checkpointer("r", state, at=daemon.socket)
    assert checkpointer.restore(groups=["model"]) == 1
    assert np.array_equal(state["model"]["w"].numpy(), content(1, 0, world * SIZE))
    return checkpointer


def asking(daemon: RunningDaemon) -> SocketLink:
    """The link of a trainer that knows which step it will restore."""
    link = SocketLink(daemon.socket, lambda outcome: None, lambda error: None)
    link.request(wire.Hello(id=link.next_id(), run="r", rank=0, world=1, launch="new"), wire.Welcome)
    assert link.request(wire.Choose(id=link.next_id(), turn=0, wait_s=30), wire.Chosen).step == 1
    return link


def arena_bytes(daemon: RunningDaemon) -> int:
    with Api(daemon.url) as api:
        return api.nodes()[0].arena_bytes


def shared_memory(daemon: RunningDaemon) -> list[str]:
    """The segments that the daemon has open, as paths that can be opened."""
    found = []
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith("/memfd:holdfast-r-rank"):
                found.append(str(entry))
    return found


def test_a_killed_trainer_restores_from_the_slots(daemon: RunningDaemon) -> None:
    """Both ranks are dead; a trainer of another world finds their parts in memory, also a second time."""
    saved_and_killed(daemon)
    for _ in range(2):
        checkpointer = restored(daemon)
        assert checkpointer.last_restore.source == "slot" and checkpointer.last_restore.notes == ()
        checkpointer.close(wait=False)


def test_memory_does_not_double_on_restart(daemon: RunningDaemon) -> None:
    """The same ranks of the next launch get the very segments of the last one, and save into them, also one that is there
    only after another has saved.
    """
    saved_and_killed(daemon)
    before = arena_bytes(daemon)
    inodes = {os.stat(path).st_ino for path in shared_memory(daemon)}
    ranks = start(daemon, WORLD, 2, in_turn=True)
    wait_until(lambda: committed_steps(daemon.root, "r") == [2, 1])
    assert arena_bytes(daemon) == before
    assert {os.stat(path).st_ino for path in shared_memory(daemon)} == inodes
    kill(ranks)
    with open_checkpoint(daemon.root, None, "r", 2) as reader:
        assert np.array_equal(reader.read("model", "w"), content(2, 0, WORLD * SIZE))


def test_after_an_orderly_end_nothing_is_held(daemon: RunningDaemon) -> None:
    """close() gives the memory back at once; the next restore reads the directory."""
    saved_and_killed(daemon)
    restored(daemon).close()
    wait_until(lambda: arena_bytes(daemon) == 0)
    checkpointer = restored(daemon)
    assert checkpointer.last_restore.source == "directory"
    checkpointer.close()


def damage_slots(daemon: RunningDaemon, where: int, ranks: int = 1) -> None:
    """One bit of the tensor turned round in every slot of so many ranks."""
    segments = {os.stat(path).st_ino: path for path in shared_memory(daemon)}  # some are open twice
    for path in list(segments.values())[:ranks]:
        with open(path, "r+b") as file:
            made = arena.read_superblock(memoryview(file.read()))
            for slot in range(made.slots):
                file.seek(made.data_offset(slot) + where)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("where", [0, SIZE // 2, SIZE - 1])
def test_a_damaged_slot_is_made_good_from_the_directory(daemon: RunningDaemon, where: int) -> None:
    """One wrong bit in memory, wherever: the directory is read instead, the report says why, and every value is right."""
    saved_and_killed(daemon)
    damage_slots(daemon, where)
    checkpointer = restored(daemon)
    assert checkpointer.last_restore.source == "directory"
    assert "in-memory checkpoint" in checkpointer.last_restore.notes[-1] and "'w'" in checkpointer.last_restore.notes[-1]
    checkpointer.close()


def test_damage_everywhere_says_what_became_of_live_tensors(daemon: RunningDaemon) -> None:
    """Where neither slots nor directory are sound, the error says that live tensors have been partly overwritten.

    What was overwritten is what was saved: nothing unproven ever arrives.
    """
    saved_and_killed(daemon)
    damage_slots(daemon, SIZE - 1, WORLD)
    for file in (daemon.root / "r" / "checkpoints" / "step-00000001").glob("*.safetensors"):
        with open(file, "r+b") as tensors:
            tensors.seek(-10, os.SEEK_END)  # where the slots are damaged as well: elsewhere either mends the other
            tensors.write(b"damage")
    state = {"model": {"w": torch.full((WORLD * SIZE,), 7, dtype=torch.uint8)}}
    checkpointer = Checkpointer("r", state, at=daemon.socket)
    with pytest.raises(CorruptExtent) as caught:
        checkpointer.restore(groups=["model"])
    assert "partly overwritten" in caught.value.hint
    live, saved = state["model"]["w"].numpy(), content(1, 0, WORLD * SIZE)
    arrived = live == saved
    assert ((live == 7) | arrived).all() and 0 < arrived.sum() < WORLD * SIZE
    checkpointer.close()


def test_without_slots_damage_touches_nothing_where_all_is_proven_first(daemon: RunningDaemon) -> None:
    """Where nothing is held and the directory is damaged, the live state is what it was."""
    saved_and_killed(daemon)
    restored(daemon).close()
    wait_until(lambda: arena_bytes(daemon) == 0)
    for file in (daemon.root / "r" / "checkpoints" / "step-00000001").glob("*.safetensors"):
        with open(file, "r+b") as tensors:
            tensors.seek(WORLD * SIZE - 10)
            tensors.write(b"damage")
    state = {"model": {"w": torch.full((WORLD * SIZE,), 7, dtype=torch.uint8)}}
    checkpointer = Checkpointer("r", state, at=daemon.socket)
    with pytest.raises(CorruptExtent) as caught:
        checkpointer.restore(groups=["model"], prove_first=True)
    assert "overwritten" not in caught.value.hint
    assert bool((state["model"]["w"] == 7).all())
    checkpointer.close()


@pytest.mark.parametrize("prove_first", [False, True])
def test_a_damaged_slot_touches_nothing_where_all_is_proven_first(daemon: RunningDaemon, prove_first: bool) -> None:
    """Of what slots and directory hold: with the proof first, nothing arrives before either of them is found sound."""
    saved_and_killed(daemon)
    damage_slots(daemon, SIZE - 1, WORLD)
    into = np.zeros(WORLD * SIZE, np.uint8)
    seen: list[bool] = []
    link = asking(daemon)

    def begins() -> None:
        seen.append(bool(into.any()))

    with open_checkpoint(daemon.root, None, "r", 1) as reader:
        wants = [Want("model", "w", Box((0,), (WORLD * SIZE,)), into)]
        filled = fill(reader, wants, link, 0, Overwriting(begins, prove_first))
    assert filled.notes and not filled.from_slots
    assert seen == ([False] if prove_first else [False, True])
    link.close()


def test_the_daemon_dies_while_its_slots_are_read(tmp_path: Path) -> None:
    """The lock and the memory are the kernel's: who has begun to read goes on, though the daemon is gone."""
    daemon = RunningDaemon(tmp_path / "root", listen="127.0.0.1:0")
    saved_and_killed(daemon)
    link = asking(daemon)

    into = np.zeros(WORLD * SIZE, np.uint8)
    with open_checkpoint(daemon.root, None, "r", 1) as reader:
        wants = [Want("model", "w", Box((0,), (WORLD * SIZE,)), into)]
        filled = fill(reader, wants, link, 0, Overwriting(daemon.kill))
        assert filled[:3] == (True, (), WORLD * SIZE)
    assert np.array_equal(into, content(1, 0, WORLD * SIZE))
    link.close()


def test_trainer_and_daemon_are_killed(tmp_path: Path) -> None:
    """The next daemon finds the committed slots where the holder kept them, and holds them again."""
    daemon = RunningDaemon(tmp_path / "root", listen="127.0.0.1:0")
    saved_and_killed(daemon)
    daemon.kill()
    with running(tmp_path / "root") as daemon:
        checkpointer = restored(daemon)
        assert checkpointer.last_restore.source == "slot"
        checkpointer.close()


def shards(world: int, columns: bool) -> tuple[torch.Tensor, list[dict[str, dict[str, Fragment]]]]:
    """A tensor, and what each rank of a world holds of it: some of its columns, or some of its rows."""
    full = torch.arange(48 * 24, dtype=torch.float32).reshape(48, 24)
    parts = []
    for rank in range(world):
        width = (24 if columns else 48) // world
        offset = (0, rank * width) if columns else (rank * width, 0)
        piece = full.narrow(1 if columns else 0, rank * width, width).clone()
        parts.append({"model": {"w": Fragment(piece, (48, 24), offset=offset)}})
    return full, parts


@pytest.mark.parametrize(("columns", "other"), [(True, False), (False, True), (True, True)])
def test_any_sharding_from_any_other(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, columns: bool, other: bool
) -> None:
    """Three ranks saved columns or rows; two ranks find theirs, strided or not, in the slots of all three."""
    _, parts = shards(3, columns)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "a")
    with ExitStack() as stack:
        for rank, state in enumerate(parts):
            monkeypatch.setenv("RANK", str(rank))
            checkpointer = Checkpointer("r", state, at=daemon.socket)
            stack.callback(checkpointer.close, wait=False)
            ticket = checkpointer.save(1)
        ticket.result(180)
    _, wanted = shards(2, other)
    _, empty = shards(2, other)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "b")
    ranks = []
    for rank, state in enumerate(empty):
        monkeypatch.setenv("RANK", str(rank))
        state["model"]["w"].tensor.zero_()
        ranks.append(Checkpointer("r", state, at=daemon.socket))
    with ThreadPoolExecutor(2) as threads:  # each goes on when both have read it
        assert list(threads.map(lambda checkpointer: checkpointer.restore(), ranks)) == [1, 1]
    for rank, checkpointer in enumerate(ranks):
        assert checkpointer.last_restore.source == "slot"
        assert torch.equal(empty[rank]["model"]["w"].tensor, wanted[rank]["model"]["w"].tensor)
        checkpointer.close(wait=False)


def test_every_file_can_be_read_through_held_slots(daemon: RunningDaemon) -> None:
    """Verified from header to last byte, in whatever pieces: the slots and the directory give the same files."""
    saved_and_killed(daemon)
    link = asking(daemon)
    with open_checkpoint(daemon.root, None, "r", 1) as reader:
        slots = take_held(link, 1)
        source = HeldSlotsSource(reader.source, reader.manifest, slots, 0)
        held = CheckpointReader(source, reader.manifest, reader.manifest_bytes, reader.commit_bytes)
        assert held.verify() == []
        for file in reader.manifest.files:
            for start in (0, 1, file.header_bytes, SIZE - 1, file.bytes - 5):
                size = max(min(3_000_001, file.bytes - start), 0)
                ours, theirs = bytearray(size), bytearray(size)
                assert source.read_into(file.name, start, memoryview(ours)) == size
                assert reader.source.read_into(file.name, start, memoryview(theirs)) == size
                assert ours == theirs
                seen = source.view(file.name, start, start + size)
                assert seen is None or bytes(seen) == bytes(theirs)
        for slot in slots:
            slot.close()
    link.close()
