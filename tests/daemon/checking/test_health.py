"""What a check finds of a checkpoint's tensors is what numpy finds in them, wherever extents cut; it fails nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.rest import statistics
from holdfast_formats.rest.measurements import TensorStatistics
from holdfast_formats.rest.statistics import Statistics
from holdfast_service.daemon.checking.health import Examination, examination, report
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage import PosixTier
from tests.checkpoints import Arrays, build, flip, varied_arrays
from tests.daemon.saver_world import RUN, SaverWorld, saver_world

FINE = 2e-6


class Pair(NamedTuple):
    """Two checkpoints of a run on disk, one after the other."""

    tier: PosixTier
    before: Manifest
    made: Manifest

    def examine(self, before: Manifest | None) -> dict[tuple[str, str], TensorStatistics]:
        found = self.found(before)
        assert found is not None
        listed = statistics.tensors_of(self.made)
        return {(t[0], t[1]): statistics.describe(found, i, *t) for i, t in enumerate(listed)}

    def found(self, before: Manifest | None) -> Statistics | None:
        examined = Examination(self.tier, before)
        verify(self.tier, naming.checkpoint_path(self.made.run, self.made.step), passed=examined.passed)
        return examined.result(self.made)


def pair(root: Path, before: Arrays, made: Arrays, **options: Any) -> Pair:
    first = build(root / naming.checkpoint_path("tiny", 5), before, step=5, **options)
    second = build(root / naming.checkpoint_path("tiny", 10), made, step=10, **options)
    return Pair(PosixTier(root), first.manifest, second.manifest)


def close(found: float | None, exact: float) -> bool:
    return found == pytest.approx(exact, rel=FINE, abs=FINE * abs(exact) + 1e-30)


@pytest.mark.parametrize("extent_bytes", [8, 104, 1000, 2**18])
def test_equal_to_numpy(tmp_path: Path, extent_bytes: int) -> None:
    """Of every tensor of both, whatever dtype and shape it has and however many extents it is cut into."""
    before, made = varied_arrays(1), varied_arrays(2)
    two = pair(tmp_path, before, made, extent_bytes=extent_bytes)
    found = two.examine(two.before)
    assert set(found) == {(group, name) for group, held in made.items() for name in held}
    for (group, name), one in found.items():
        now, old = (held[group][name].astype(np.float64) for held in (made, before))
        assert (one.elements, one.nan, one.inf, one.shape) == (now.size, 0, 0, list(now.shape))
        assert one.changed_from == 5
        assert close(one.change, float(np.linalg.norm(now - old)))
        if now.size:
            assert (one.minimum, one.maximum) == (now.min(), now.max())
            assert one.mean == pytest.approx(now.mean(), rel=FINE, abs=FINE * np.abs(now).mean())
            assert close(one.rms, float(np.sqrt(np.mean(now**2))))
            assert one.zeros == np.count_nonzero(now == 0) / now.size


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    """NaN and infinities, by tensor; moments go on without them."""
    made = {"model": {"w": np.array([np.nan, 1.0, -np.inf, 3.0, np.inf, 0.0], np.float32), "v": np.full(3, np.nan)}}
    two = pair(tmp_path, made, made)
    found = two.examine(None)
    w, v = found["model", "w"], found["model", "v"]
    assert (w.nan, w.inf, w.minimum, w.maximum, w.zeros, w.change) == (1, 2, 0.0, 3.0, 1 / 6, None)
    assert w.mean == pytest.approx(4 / 3)
    assert (v.nan, v.minimum, v.mean, v.rms) == (3, None, None, None)


def test_equal_extents_are_not_read_again(tmp_path: Path) -> None:
    """What has the digest that it had has not moved, even where the old bytes are gone."""
    arrays = varied_arrays()
    two = pair(tmp_path, arrays, arrays)
    for file in two.before.files:
        (tmp_path / naming.checkpoint_path("tiny", 5) / file.name).unlink()
    assert {one.change for one in two.examine(two.before).values()} == {0.0}


def test_changes_that_are_not_known(tmp_path: Path) -> None:
    """Of new tensors, of those with another form or dtype, and of those whose old bytes are damaged or gone."""
    rng = np.random.default_rng(3)
    names = ("damaged", "form", "kind", "sound")
    before = {"model": {name: rng.standard_normal(300).astype(np.float32) for name in names}}
    made = {"model": {name: rng.standard_normal(300).astype(np.float32) for name in (*names, "new")}}
    made["model"]["form"] = made["model"]["form"].reshape(30, 10)
    made["model"]["kind"] = made["model"]["kind"].astype(np.float64)
    two = pair(tmp_path, before, made)
    entry = two.before.tensors["model"]["damaged"]
    flip(tmp_path / naming.checkpoint_path("tiny", 5) / entry.file, entry.start)
    found = two.examine(two.before)
    assert {name for (_, name), one in found.items() if one.change is None} == {"damaged", "form", "kind", "new"}
    assert all((one.changed_from is None) == (one.change is None) for one in found.values())
    for file in two.before.files:
        (tmp_path / naming.checkpoint_path("tiny", 5) / file.name).unlink(missing_ok=True)
    assert {one.change for one in two.examine(two.before).values()} == {None}


def test_another_cut(tmp_path: Path) -> None:
    """Extents of another length: nothing of the old ones is compared with."""
    arrays = {"model": {"w": np.arange(600, dtype=np.float32)}}
    first = build(tmp_path / naming.checkpoint_path("tiny", 5), arrays, step=5, extent_bytes=1000)
    moved = {"model": {"w": np.arange(600, dtype=np.float32) + 1}}
    second = build(tmp_path / naming.checkpoint_path("tiny", 10), moved, step=10, extent_bytes=800)
    found = Pair(PosixTier(tmp_path), first.manifest, second.manifest).examine(first.manifest)
    assert found["model", "w"].change is None
    assert found["model", "w"].mean == pytest.approx(300.5)


def test_saves_come_first(tmp_path: Path) -> None:
    """While a save is being written nothing of the checkpoint before is read; what did not move is known all the same."""
    before, made = varied_arrays(1), varied_arrays(2)
    made["model"]["embed.weight"] = before["model"]["embed.weight"]  # type: ignore[index]
    two = pair(tmp_path, before, made)
    seen: dict[str, float | None] = {}

    class Slow(PosixTier):
        def create(self, path: str, size: int) -> Any:
            seen.update({name: one.change for (_, name), one in two.examine(two.before).items()})
            return super().create(path, size)

    with saver_world(Slow(tmp_path / "other")) as world:
        world.saved(1)
    assert (seen["embed.weight"], seen["layers.0.q.weight"]) == (0.0, None)
    assert two.examine(two.before)["model", "layers.0.q.weight"].change


def test_a_failure_is_no_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong while bytes pass: the check goes on to its end, and says once what it was."""
    two = pair(tmp_path, varied_arrays(1), varied_arrays(2))
    monkeypatch.setattr("holdfast_service.daemon.checking.health.measure_alike", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR):
        assert two.found(two.before) is None
    assert "no statistics of tiny@10" in caplog.text


def drop(world: SaverWorld, table: str) -> None:
    """The catalog's database has lost a table."""
    with world.catalog.database.engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
        connection.exec_driver_sql(f"DROP TABLE {table}")


@pytest.fixture
def world() -> Iterator[SaverWorld]:
    with saver_world() as world:
        yield world


def test_every_save_is_examined(world: SaverWorld) -> None:
    """Through the saver: when a checkpoint counts as verified, what its tensors are like is known."""
    ranks = world.launch(2)
    for step in (1, 2):
        for rank in ranks:
            rank.save(step)
        assert all(rank.wait(step).state == "committed" for rank in ranks)
    world.checked()  # a saver that is closed leaves checks to the next start where the catalog does not answer in time
    found = world.control.statistics.load(RUN, 2)
    assert found["mean"].tolist() == [(14 + 15) / 2]
    assert found["change"].tolist() == [pytest.approx(7 * np.sqrt(128))]
    assert world.catalog.checkpoint(RUN, 2).healthy is True
    assert world.catalog.checkpoint(RUN, 2).nonfinite == 0
    assert world.catalog.checkpoint(RUN, 2).verified


def test_no_save_fails_for_its_statistics(world: SaverWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is committed and verified; how healthy it is nobody knows."""
    monkeypatch.setattr("holdfast_service.daemon.checking.health.measure_alike", lambda *_: 1 / 0)
    world.saved(1)
    world.checked()
    made = world.catalog.checkpoint(RUN, 1)
    assert (made.verified, made.healthy, made.nonfinite) == (True, None, None)


def test_what_control_cannot_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without its catalog there is nothing to compare with, and nothing is recorded; both are logged, neither is raised."""
    two = pair(tmp_path, varied_arrays(1), varied_arrays(2))
    with saver_world(two.tier) as world:
        world.control.recovery.recover()
        drop(world, "checkpoints")
        with examination(two.tier, world.control, "tiny", 10) as examined:
            assert examined is not None
            verify(two.tier, naming.checkpoint_path("tiny", 10), passed=examined.passed)
        found = examined.result(two.made)
        assert found is not None
        assert np.isnan(found["change"]).all()
        report(world.control, two.made, lambda: examined.result(two.made))
    assert "cannot compare tiny@10 with an earlier checkpoint" in caplog.text
    assert "cannot record the statistics of tiny@10" in caplog.text


def test_a_second_check_examines_nothing(world: SaverWorld) -> None:
    """What has statistics keeps them; they never change."""
    world.saved(1)
    world.checked()
    with examination(world.tier, world.control, RUN, 1) as examined:
        assert examined is None
    before = world.control.statistics.load(RUN, 1)
    report(world.control, world.control.health.before(RUN, 2), lambda: None)  # type: ignore[arg-type]
    assert world.control.statistics.load(RUN, 1)["mean"].tolist() == before["mean"].tolist()


def test_what_passes_twice_counts_once(tmp_path: Path) -> None:
    """A file that is read again, after a repair; and what has not passed at all makes no statistics."""
    two = pair(tmp_path, varied_arrays(1), varied_arrays(2))
    examined = Examination(two.tier, two.before)
    assert examined.result(two.made) is None
    for _ in range(2):
        verify(two.tier, naming.checkpoint_path("tiny", 10), passed=examined.passed)
    found, once = examined.result(two.made), two.found(two.before)
    assert found is not None
    assert once is not None
    assert all(np.array_equal(found[name], once[name], equal_nan=True) for name in found.columns)
