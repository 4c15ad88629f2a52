"""Ranks of one machine restore together: what several of them want is read and proven once, by their daemon."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Checkpointer, Fragment
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.disk import manifest as manifests
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import CheckpointError, CorruptExtent
from holdfast_service.daemon.shared_reads.sharing import WANTED_BY_MIN_CACHED
from tests.checkpoints import flip, forget
from tests.daemons import RunningDaemon, running, wait_until, wait_until_read_back

ROWS, COLUMNS = 96, 1024
EXTENT = 16 * 2**20
_launches = itertools.count()


def weights() -> dict[str, torch.Tensor]:
    """A tensor of two extents, one of many rows, and a small one."""
    generator = torch.Generator().manual_seed(7)
    return {
        "large": torch.randint(0, 255, (EXTENT + 4096,), dtype=torch.uint8, generator=generator),
        "rows": torch.randn((ROWS, COLUMNS), generator=generator),
        "small": torch.arange(5),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a committed step that nobody holds in memory any more."""
    with running(tmp_path_factory.mktemp("node") / "root", listen="127.0.0.1:0", patient=True) as daemon:
        save(daemon)
        yield daemon


def save(daemon: RunningDaemon) -> None:
    """Until it is read back, too: that fills the page cache again after a test has emptied it."""
    with Checkpointer("r", {"model": weights()}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    wait_until_read_back(daemon, "r", 1)


def manifest(daemon: RunningDaemon) -> Manifest:
    directory = daemon.root / naming.checkpoint_path("r", 1)
    return manifests.decode((directory / naming.MANIFEST).read_bytes(), (directory / naming.COMMIT).read_bytes())


def model_bytes(daemon: RunningDaemon) -> int:
    """Of the files of the group that is restored, headers included."""
    return sum(file.bytes for file in manifest(daemon).files if file.name.startswith("model") and file.header_bytes)


def read_bytes(daemon: RunningDaemon) -> dict[str, float]:
    """What the daemon counts as read for restores: by the node, and by ranks."""
    with Api(daemon.url) as api:
        text = api._http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {s.labels["by"]: s.value for s in families["holdfast_restore_read_bytes"].samples if s.name.endswith("_total")}


def lent_descriptors(daemon: RunningDaemon) -> list[str]:
    """The lent memory that the daemon still has open."""
    found = []
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(entry)
            if target.startswith(("/memfd:holdfast-load", "/memfd:holdfast-wish")):
                found.append(target)
    return found


States = Sequence[Mapping[str, object]]


@contextmanager
def ranks(
    daemon: RunningDaemon, states: States, monkeypatch: pytest.MonkeyPatch, cold: bool = True
) -> Iterator[list[Checkpointer]]:
    """Checkpointers of one launch, as the ranks of one machine have them; if `cold`, the step is in no cache."""
    if cold:
        forget(daemon.root / naming.checkpoint_path("r", 1))
    monkeypatch.setenv("HOLDFAST_LAUNCH", f"launch-{next(_launches)}")
    monkeypatch.setenv("WORLD_SIZE", str(len(states)))
    made = []
    try:
        for rank, state in enumerate(states):
            monkeypatch.setenv("RANK", str(rank))
            made.append(Checkpointer("r", state, at=daemon.socket))
        yield made
    finally:
        for checkpointer in made:
            checkpointer.close(wait=False)


def together(act: Callable[[Checkpointer], object], checkpointers: Sequence[Checkpointer]) -> list[object]:
    """Each rank acts at the same time; what each returned or raised."""

    def caught(checkpointer: Checkpointer) -> object:
        try:
            return act(checkpointer)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(checkpointers)) as threads:
        return list(threads.map(caught, checkpointers))


def restore(checkpointer: Checkpointer) -> int:
    return checkpointer.restore(1, groups=["model"])


def empty() -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {name: torch.zeros_like(tensor) for name, tensor in weights().items()}}


def test_replicas_read_nothing_for_themselves(saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks that want everything: the daemon reads each extent and header once, the ranks nothing; memory is freed."""
    whole = model_bytes(saved)
    states = [empty() for _ in range(3)]
    before = read_bytes(saved)
    with ranks(saved, states, monkeypatch) as checkpointers:
        assert together(restore, checkpointers) == [1, 1, 1]
        reports = [checkpointer.last_restore for checkpointer in checkpointers]
        assert [(r.node_bytes, r.own_bytes, r.source) for r in reports] == [(whole, 0, "directory")] * 3
        assert all("rank" not in note for report in reports for note in report.notes)
        assert read_bytes(saved) == {"node": before["node"] + whole, "rank": before["rank"]}
        wait_until(lambda: not lent_descriptors(saved))
    expected = weights()
    for state in states:
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())
    assert "memfd:holdfast-load" not in Path("/proc/self/maps").read_text()


def tensor_parallel(count: int) -> tuple[list[dict[str, dict[str, object]]], list[dict[str, torch.Tensor]]]:
    """Ranks that have whole tensors, and some columns, hence every extent, of one; and what they should have then."""
    states, expected = [], []
    width = COLUMNS // count
    for rank in range(count):
        full = weights()
        columns = full["rows"].narrow(1, rank * width, width)
        piece = Fragment(torch.zeros(ROWS, width), (ROWS, COLUMNS), offset=(0, rank * width))
        states.append({"model": {"large": torch.zeros_like(full["large"]), "rows": piece, "small": torch.zeros(5).long()}})
        expected.append({**full, "rows": columns})
    return states, expected


@pytest.mark.parametrize(("count", "shared"), [(3, False), (WANTED_BY_MIN_CACHED, True)])
def test_few_ranks_read_what_is_cached_for_themselves(
    saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch, count: int, shared: bool
) -> None:
    """What is in the page cache is read from there, unless so many ranks want it that reading once is faster."""
    for path in (saved.root / naming.checkpoint_path("r", 1)).iterdir():
        path.read_bytes()
    whole = model_bytes(saved)
    states = [empty() for _ in range(count)]
    before = read_bytes(saved)
    with ranks(saved, states, monkeypatch, cold=False) as checkpointers:
        assert together(restore, checkpointers) == [1] * count
        reports = [checkpointer.last_restore for checkpointer in checkpointers]
    assert [(r.node_bytes, r.own_bytes) for r in reports] == [(whole, 0) if shared else (0, whole)] * count
    more = {"node": whole, "rank": 0} if shared else {"node": 0, "rank": count * whole}
    assert read_bytes(saved) == {by: before[by] + size for by, size in more.items()}
    for state in states:
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights().items())


def test_strided_parts_are_read_once_too(saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that each want other columns want the same extents: read once, and each has its own columns."""
    states, expected = tensor_parallel(2)
    with ranks(saved, states, monkeypatch) as checkpointers:
        assert together(restore, checkpointers) == [1, 1]
        assert [(c.last_restore.node_bytes, c.last_restore.own_bytes) for c in checkpointers] == [
            (model_bytes(saved), 0)
        ] * 2
    for state, wanted in zip(states, expected, strict=True):
        for name, value in state["model"].items():
            assert torch.equal(value.tensor if isinstance(value, Fragment) else value, wanted[name])


def test_what_one_rank_wants_it_reads_itself(saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks want parts of different extents: they share the header, and each reads its extent, and is counted."""
    made = manifest(saved)
    extents = made.tensors["model"]["large"].extents
    header = next(file.header_bytes for file in made.files if file.name == made.tensors["model"]["large"].file)
    first, last = extents[0], extents[-1]
    full = weights()["large"]
    cuts = [(0, 100), (last.offset + 10, last.length - 20)]
    states = [{"model": {"large": Fragment(torch.zeros(n, dtype=torch.uint8), full.shape, offset=(at,))}} for at, n in cuts]
    before = read_bytes(saved)

    def restore_large(checkpointer: Checkpointer) -> int:
        return checkpointer.restore(1, groups=["model"], ignore=("model/rows", "model/small"))

    with ranks(saved, states, monkeypatch) as checkpointers:
        assert together(restore_large, checkpointers) == [1, 1]
        reports = [checkpointer.last_restore for checkpointer in checkpointers]
    assert [(r.node_bytes, r.own_bytes) for r in reports] == [(header, extent.length) for extent in (first, last)]
    assert read_bytes(saved) == {
        "node": before["node"] + header,
        "rank": before["rank"] + first.length + last.length,
    }
    for state, (at, n) in zip(states, cuts, strict=True):
        assert torch.equal(state["model"]["large"].tensor, full[at : at + n])


def test_a_rank_alone_asks_nobody(saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, or the only one of its machine, is not gathered: it reads for itself at once, and nothing is counted."""
    before = read_bytes(saved)
    for world, local in (("1", ""), ("4", "1")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("HOLDFAST_LAUNCH", f"alone-{world}")
        state = empty()
        with Checkpointer("r", state, at=saved.socket) as checkpointer:
            assert restore(checkpointer) == 1
            report = checkpointer.last_restore
        assert (report.node_bytes, report.own_bytes) == (0, model_bytes(saved))
        assert report.seconds < 0.45, "nobody was waited for"
    assert read_bytes(saved) == before


def test_ranks_that_see_no_daemon_read_for_themselves(saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP there is no memory to lend: nothing is asked for, and all is right."""
    state = empty()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "remote")
    monkeypatch.setattr("holdfast.link.connect._socket_of", lambda url: None)
    with Checkpointer("r", state, at=saved.url) as checkpointer:
        assert restore(checkpointer) == 1
        report = checkpointer.last_restore
    assert (report.source, report.node_bytes, report.own_bytes) == ("http", 0, model_bytes(saved))


@pytest.mark.parametrize("prove_first", [False, True])
def test_damage_is_the_same_error_at_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove_first: bool) -> None:
    """One wrong bit: each rank that wants the extent gets the error a rank alone gets, and nothing wrong is handed over."""
    with running(tmp_path / "root", listen="127.0.0.1:0", patient=True) as daemon:
        save(daemon)
        entry = manifest(daemon).tensors["model"]["large"]
        flip(daemon.root / naming.checkpoint_path("r", 1) / entry.file, entry.start + EXTENT + 100)
        (alone,) = outcomes(daemon, 1, monkeypatch, prove_first)
        assert isinstance(alone, CorruptExtent) and alone.members["tensor"] == "large" and alone.hint
        for found in outcomes(daemon, 3, monkeypatch, prove_first):
            assert isinstance(found, CorruptExtent)
            assert (found.detail, found.hint, found.members) == (alone.detail, alone.hint, alone.members)
        wait_until(lambda: not lent_descriptors(daemon))


def outcomes(daemon: RunningDaemon, count: int, monkeypatch: pytest.MonkeyPatch, prove_first: bool) -> list[object]:
    """What so many replicas got from a restore; what changed in their tensors is what was saved, or nothing has."""
    states = [empty() for _ in range(count)]
    with ranks(daemon, states, monkeypatch) as checkpointers:
        found = together(lambda c: c.restore(1, groups=["model"], prove_first=prove_first), checkpointers)
    for state in states:
        for name, tensor in weights().items():
            live = state["model"][name]
            assert bool(((live == 0) | (live == tensor)).all()) and not (prove_first and bool(live.any()))
    return found


def test_what_memory_has_no_room_for_each_rank_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget for the small tensors only, they are shared, and each rank says how much was not."""
    with running(tmp_path / "root", listen="127.0.0.1:0", patient=True) as daemon:
        save(daemon)
    with running(tmp_path / "root", "--arena-bytes-max", "1000000", patient=True) as daemon:
        states = [empty() for _ in range(2)]
        with ranks(daemon, states, monkeypatch) as checkpointers:
            assert together(restore, checkpointers) == [1, 1]
            for report in (checkpointer.last_restore for checkpointer in checkpointers):
                assert 100_000 < report.node_bytes < 1_000_000
                assert report.node_bytes + report.own_bytes == model_bytes(daemon)
                assert "memory has room for 0." in report.notes[-1] and "reads the rest separately" in report.notes[-1]
    for state in states:
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights().items())
