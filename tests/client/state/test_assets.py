"""Assets: what may be one, and those of a single save, from the trainer to every copy of the checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.state import assets
from holdfast_formats import naming
from holdfast_formats.errors import Damaged, InvalidRequest, LimitExceeded, NoSuchCheckpoint, StateMismatch
from tests.daemons import RunningDaemon, copy_served, running, wait_until
from tests.kit.commands import call, call_json

NAN = float("nan")
MIB = 2**20


def circular() -> list:
    """A list that holds itself."""
    made: list = []
    made.append(made)
    return made


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon, with a replica, for the tests of this file; each uses a run of its own."""
    directory = tmp_path_factory.mktemp("assets")
    with running(directory / "root", "--replica", f"far={directory / 'far'}", listen="127.0.0.1:0") as daemon:
        yield daemon


def stored(where: object, name: str) -> bytes:
    """An asset as a reader of the checkpoint gets it, checked against its digest."""
    with holdfast.open(str(where)) as checkpoint:
        return bytes(checkpoint.reader.read_file(name))


def test_what_a_step_may_have(tmp_path: Path) -> None:
    """Bytes as they are, text as UTF-8, JSON as the constructor writes it, and what the file at a path holds now."""
    (tmp_path / "log").write_bytes(b"\0\1")
    given = {"b": b"\xff", "m": memoryview(b"xyz")[::2], "t": "größer", "j": {"epoch": 3}, "n": None, "p": tmp_path / "log"}
    found = assets.of_step(given, 0)
    assert found == {
        "b": b"\xff",
        "m": b"xz",
        "t": "größer".encode(),
        "n": b"null\n",
        "p": b"\0\1",
        "j": assets.collect({"j": {"epoch": 3}})["j"],
    }
    assert json.loads(found["j"]) == {"epoch": 3}
    assert assets.of_step(None, 0) == {}


@pytest.mark.parametrize(
    "content",
    [NAN, [float("inf")], {"loss": {"x": -float("inf")}}, {1, 2}, object(), torch.ones(2), "\ud800", ["\ud800"], circular()],
    ids=["nan", "inf", "nested", "set", "object", "tensor", "surrogate", "inside", "circular"],
)
@pytest.mark.parametrize("take", [assets.collect, lambda given: assets.of_step(given, 0)], ids=["constructor", "step"])
def test_what_is_no_content_is_refused_by_name(take, content: object) -> None:
    """The constructor and a step have one rule, and the error names the asset."""
    with pytest.raises(InvalidRequest, match=r"asset 'log\.json' is neither") as refused:
        take({"log.json": content})
    assert "NaN" in refused.value.hint


@pytest.mark.parametrize(
    "name", ["", "a/b", "../x", ".hidden", "COMMIT", "manifest.json", "state.json", "receipts", "x.safetensors", 7, None]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_name_is_refused_on_every_rank(name: object, rank: int) -> None:
    """Paths, hidden files and files of the format. All ranks that pass the same are refused alike."""
    with pytest.raises(InvalidRequest, match="asset name"):
        assets.of_step({name: b""}, rank)  # type: ignore[dict-item]


def test_only_a_mapping_is_taken() -> None:
    """A path or a list, as the constructor takes it, has no names to check before."""
    for given in ("file", ["a"], b"bytes", 3):
        with pytest.raises(InvalidRequest, match="assets of a save must be a mapping"):
            assets.of_step(given, 1)  # type: ignore[arg-type]


def test_other_ranks_contents_are_not_looked_at(tmp_path: Path) -> None:
    """A file may exist on rank 0's machine only."""
    assert assets.of_step({"log": tmp_path / "missing", "other": NAN}, 1) == {}


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a directory, a pipe and a file over the limit are refused by the asset's name, without being read."""
    os.mkfifo(tmp_path / "pipe")
    for path, says in ((tmp_path / "no", "No such file"), (tmp_path, "directory"), (tmp_path / "pipe", "regular file")):
        with pytest.raises(InvalidRequest, match=rf"asset 'log'.*{says}"):
            assets.of_step({"log": path}, 0)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(assets.ASSET_BYTES_MAX + 1)
    with pytest.raises(LimitExceeded, match="asset 'log' has"):
        assets.of_step({"log": tmp_path / "sparse"}, 0)
    monkeypatch.setattr(assets, "ASSET_BYTES_MAX", 10)
    with pytest.raises(LimitExceeded, match="asset 'log' has 11 bytes"):
        assets.of_step({"log": "12345678901"}, 0)


def test_a_steps_assets_stand_beside_those_of_all_steps(daemon: RunningDaemon, run: str) -> None:
    """The step's wins where both have a name, and the next save has the constructor's again."""
    state = {"model": torch.nn.Linear(2, 2)}
    with Checkpointer(run, state, at=daemon.socket, assets={"config.json": {"a": 1}, "notes": "all"}) as checkpointer:
        for step, given in ((1, None), (2, {"notes": "two", "trainer_state.json": {"epoch": 2}}), (3, {})):
            checkpointer.save(step, assets=given, wait="durable")
        with pytest.raises(InvalidRequest, match=r"asset name 'manifest\.json'"):
            checkpointer.save(4, assets={"manifest.json": "{}"})
        with pytest.raises(InvalidRequest, match="asset 'log' is neither"):
            checkpointer.save(4, assets={"log": NAN})
        checkpointer.save(4, assets={"log": "right"}, wait="durable")
    directories = {step: daemon.root / naming.checkpoint_path(run, step) for step in (1, 2, 3, 4)}
    assert [stored(directories[step], "notes") for step in (1, 2, 3)] == [b"all", b"two", b"all"]
    assert json.loads(stored(directories[2], "trainer_state.json")) == {"epoch": 2}
    assert [step for step, found in directories.items() if (found / "trainer_state.json").exists()] == [2]
    assert stored(directories[4], "log") == b"right", "a refused save has left nothing of itself"


def test_what_is_changed_after_the_call_is_not_saved(daemon: RunningDaemon, run: str) -> None:
    """The bytes are those of the call of save()."""
    log = bytearray(b"one")
    with Checkpointer(run, {"x": torch.ones(3)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(1, assets={"log": log})
        log[:] = b"two"
        ticket.result()
    assert stored(daemon.root / naming.checkpoint_path(run, 1), "log") == b"one"


@pytest.mark.parametrize("way", ["socket", "url"])
@pytest.mark.parametrize("prepared", [False, True])
def test_assets_may_outgrow_the_slots(daemon: RunningDaemon, run: str, way: str, prepared: bool) -> None:
    """After a small first save, 5 MiB of assets get larger slots and a notice; what grows slowly does not at every save."""
    state = {"model": torch.nn.Linear(4, 4)}
    at = daemon.socket if way == "socket" else daemon.url
    large = os.urandom(5 * MIB)
    with Checkpointer(run, state, at=at) as checkpointer:
        if prepared:
            checkpointer.prepare(wait=True)
        checkpointer.save(1, assets={"log": "small"}, wait="durable")
        assert checkpointer.notices == ()
        checkpointer.save(2, assets={"log": large}, wait="durable")
        (notice,) = checkpointer.notices
        assert "only other values or assets changed" in notice
        for step in range(3, 8):
            checkpointer.save(step, assets={"log": large + bytes(step * 2**16)}, wait="durable")
        assert checkpointer.notices == (notice,)
        state["model"].weight.data.zero_()
        assert checkpointer.restore(2) == 2
    assert stored(daemon.root / naming.checkpoint_path(run, 2), "log") == large
    assert stored(daemon.root / naming.checkpoint_path(run, 7), "log") == large + bytes(7 * 2**16)
    assert state["model"].weight.any()


def test_every_copy_has_them(
    daemon: RunningDaemon, run: str, tmp_path: Path, forked_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified, exported, imported and replicated like every other file; a flipped bit is found."""
    monkeypatch.setenv("HOLDFAST_URL", "")
    content = {"trainer_state.json": {"epoch": 2, "name": "größer"}, "raw": os.urandom(1000)}
    with Checkpointer(run, {"model": torch.nn.Linear(2, 2)}, at=daemon.socket) as checkpointer:
        checkpointer.save(7, assets=content, wait="durable")
    saved = daemon.root / naming.checkpoint_path(run, 7)
    expected = {name: (saved / name).read_bytes() for name in content}
    assert expected["raw"] == content["raw"]
    assert call("verify", saved).exit_code == 0
    assert call_json("export", f"{run}@7", tmp_path / "whole", "--root", daemon.root)["committed"]
    assert call("export", f"{run}@7", tmp_path / "model", "--model-only", "--root", daemon.root).exit_code == 0
    assert call("import", tmp_path / "model", "imported@7", "--root", tmp_path / "new").exit_code == 0
    imported = tmp_path / "new" / naming.checkpoint_path("imported", 7)
    far = daemon.root.parent / "far" / naming.checkpoint_path(run, 7)
    path = f"{daemon.url}/v1/runs/{run}/checkpoints/7/replicas"
    wait_until(lambda: bool(httpx.get(path, trust_env=False).raise_for_status().json()["items"]) and far.exists())
    for copy in (tmp_path / "whole", imported, far):
        assert {name: stored(copy, name) for name in content} == expected, copy
    damaged = bytearray((tmp_path / "whole" / "raw").read_bytes())
    damaged[500] ^= 1
    (tmp_path / "whole" / "raw").write_bytes(damaged)
    assert call("verify", tmp_path / "whole").exit_code == 5


def test_a_trainer_reads_what_it_has_saved(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    """Through its daemon, over HTTP, and from a directory that no daemon serves."""
    state = {"model": {"w": torch.ones(2)}}
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, assets={"trainer_state.json": "{}"}, wait="durable")
        assert checkpointer.read_asset(1, "trainer_state.json") == b"{}"
        with pytest.raises(StateMismatch, match=r"has no file 'other\.json'"):
            checkpointer.read_asset(1, "other.json")
        with pytest.raises(NoSuchCheckpoint):
            checkpointer.read_asset(2, "trainer_state.json")
    with Checkpointer(run, state, at=daemon.url) as remote:
        assert remote.read_asset(1, "trainer_state.json") == b"{}"
    root = tmp_path / "root"
    copy_served(daemon.root / run, root / run)
    alone = Checkpointer(run, state, at=root)
    assert alone.read_asset(1, "trainer_state.json") == b"{}"
    damaged = root / naming.checkpoint_path(run, 1) / "trainer_state.json"
    damaged.write_bytes(b"[]")
    with pytest.raises(Damaged):
        alone.read_asset(1, "trainer_state.json")
    alone.close(wait=False)
