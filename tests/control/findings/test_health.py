"""Health: which checkpoints are unhealthy, what is kept of that, and what is found by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import naming
from holdfast_formats.errors import CorruptStatistics, InvalidRequest, NoSuchCheckpoint, NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.statistics import NOWHERE, PartStatistics, collect, tabulate
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.statistics import HISTORY_STEPS, NonFinite, StatisticsStore
from holdfast_service.control.control import Control
from holdfast_service.control.database.schema import StatisticsRow
from holdfast_service.control.findings import selection
from holdfast_service.control.findings.health import judge
from holdfast_service.storage import PosixTier, stored_in
from tests.checkpoints import build
from tests.control.published import mark_verified
from tests.databases import sqlite_url

RUN = "tiny"
NAMES = st.sampled_from(["a", "b", "c"])
COUNTS = st.lists(st.integers(0, 3), min_size=2, max_size=2)
BROKEN = st.dictionaries(st.sampled_from(["model", "master", "optim", "ema", "extra"]), st.dictionaries(NAMES, COUNTS))


class House:
    """Control over a root, and checkpoints whose numbers the test says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tier = PosixTier(root)
        self.catalog = Catalog.open(sqlite_url(f"{root}/catalog.sqlite"))
        self.control = Control(stored_in(self.tier), self.catalog, None)
        self.store: StatisticsStore = self.control.statistics

    def save(self, step: int, verified: bool = True, **groups: dict[str, list[float]]) -> bodies.CheckpointInfo:
        """A checkpoint of these tensors, examined and verified."""
        arrays = {g: {n: np.array(values, np.float32) for n, values in held.items()} for g, held in groups.items()}
        made = build(self.root / naming.checkpoint_path(RUN, step), arrays, run=RUN, step=step).manifest
        self.catalog.record_checkpoint(bodies.describe(made))
        parts = []
        for held in made.tensors:
            for name in made.tensors[held]:
                data = arrays[held][name]
                finite = data[np.isfinite(data)]
                nan, inf = int(np.isnan(data).sum()), int(np.isinf(data).sum())
                zeros = int((data == 0).sum())
                parts.append(PartStatistics(finite.size, nan, inf, zeros, 0.0, 1.0, 0.5, float(np.linalg.norm(finite))))
        self.control.health.take(made, collect(tabulate(parts), np.full(len(parts), NOWHERE)))
        if verified:
            mark_verified(self.catalog, RUN, step)
            self.control.rotation.due(RUN)
        return self.catalog.checkpoint(RUN, step)

    def events(self) -> list[dict[str, Any]]:
        return [event.detail for event in self.control.events.after(0, 100, kind="checkpoint-unhealthy")]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    try:
        yield made
    finally:
        made.control.close()
        made.catalog.close()


@given(BROKEN, BROKEN, st.booleans())
def test_new_is_what_was_not_there(now: NonFinite, before: NonFinite, known: bool) -> None:
    """More NaN than before are new in every group but the trainer's own; what is as it was never is."""
    found = {(s.group, s.name) for s in judge(now, before, lambda *_: known)}
    for group, tensors in now.items():
        for name, (nan, inf) in tensors.items():
            nan_before, inf_before = before.get(group, {}).get(name, (0, 0))
            compared = known or group in ("master", "optim")
            expected = group != "extra" and (nan > nan_before or (inf > inf_before and compared))
            assert ((group, name) in found) == expected
    assert judge(now, now, lambda *_: True) == []


def test_a_planted_nan_is_named(house: House) -> None:
    """The checkpoint is unhealthy, an event names the tensor, and it stays so until the NaN is gone."""
    assert house.save(1, model={"w": [1.0, 2.0], "v": [1.0]}).healthy is True
    bad = house.save(2, model={"w": [1.0, np.nan], "v": [1.0]})
    assert (bad.healthy, bad.nonfinite, bad.state) == (False, 1, "unhealthy")
    assert house.events() == [
        {"tensors": [{"group": "model", "name": "w", "nan": 1, "inf": 0}], "count": 1, "compared_with": 1}
    ]
    assert house.save(3, model={"w": [1.0, np.nan], "v": [1.0]}).healthy is False
    assert house.save(4, model={"w": [1.0, 5.0], "v": [1.0]}).healthy is True


def test_masks_are_meant(house: House) -> None:
    """Infinities that a model has from the first on are no fault; new ones in a tensor that was finite are."""
    assert house.save(1, model={"mask": [0.0, -np.inf], "w": [1.0]}).healthy is True
    assert house.save(2, model={"mask": [0.0, -np.inf], "w": [1.0]}).healthy is True
    assert house.save(3, model={"mask": [0.0, -np.inf], "w": [np.inf]}).healthy is False
    assert house.save(4, model={"mask": [0.0, -np.inf], "w": [1.0], "longer": [-np.inf] * 3}).healthy is True


def test_the_first_one(house: House) -> None:
    """Without one before, NaN anywhere and infinities in the optimizer are faults; what the trainer keeps is its own."""
    assert house.save(1, optim={"m": [np.inf]}).healthy is False
    assert house.save(2, model={"w": [np.nan]}).healthy is False
    assert house.save(3, extra={"best": [np.inf, np.nan]}, model={"w": [1.0]}).healthy is True
    assert house.save(4, extra={"best": [np.nan, np.nan]}, model={"w": [1.0]}).healthy is True


def test_a_baseline_that_cannot_be_read(house: House) -> None:
    """Its statistics still say how many there were; that the tensor was there nobody can say, so infinities pass."""
    house.save(1, model={"w": [1.0]})
    (house.root / naming.checkpoint_path(RUN, 1) / naming.MANIFEST).unlink()
    assert house.save(2, model={"w": [np.inf]}).healthy is True
    assert house.control.health.before(RUN, 2) is None


def test_what_is_meant_by_a_name(house: House) -> None:
    """The newest healthy one and the best one are verified, sound and not unhealthy; nobody having looked is no fault."""
    database = house.catalog.database
    assert selection.newest_healthy(database, RUN) is None
    assert selection.best(database, RUN, "loss", "min") is None
    assert house.control.restores.choose(RUN, house.control.launches.declare(RUN, "l1", 1, None), 0, None, (), True) is None
    house.save(1, model={"w": [1.0]})
    house.save(2, model={"w": [2.0]})
    house.save(3, model={"w": [np.nan]})
    house.save(4, verified=False, model={"w": [3.0]})
    assert selection.newest_healthy(database, RUN) == 2
    assert selection.newest_healthy(database, RUN, ("optim",)) is None
    assert selection.newest_before(database, RUN, 4) == 3
    for step, loss in ((1, 0.5), (2, 0.5), (3, 0.1), (4, 0.2)):
        found = house.catalog.checkpoint(RUN, step).model_copy(update={"metrics": {"loss": loss}})
        house.catalog.record_checkpoint(found)
    assert selection.best(database, RUN, "loss", "min") == 1
    assert selection.best(database, RUN, "loss", "max") == 1
    assert selection.best(database, RUN, "accuracy", "max") is None
    unknown = house.catalog.checkpoint(RUN, 3).model_copy(update={"healthy": None})
    house.catalog.record_checkpoint(unknown)
    assert selection.newest_healthy(database, RUN) == 3
    assert selection.best(database, RUN, "loss", "min") == 3


def test_restoring_the_newest_healthy(house: House) -> None:
    """A launch that asks for it gets it; where there are others only, it is refused and not sent back to the start."""
    house.save(1, model={"w": [np.nan]})
    attempt = house.control.launches.declare(RUN, "l1", 1, None)
    with pytest.raises(NoSuchCheckpoint, match="known to be healthy"):
        house.control.restores.choose(RUN, attempt, 0, None, ("model",), True)
    house.save(2, model={"w": [1.0]})
    house.save(3, model={"w": [np.nan]})
    assert house.control.restores.choose(RUN, attempt, 0, None, ("model",), True) == 2
    assert house.control.restores.choose(RUN, attempt, 1, None, ("model",)) == 3


def test_layers_outlive_their_checkpoint(house: House) -> None:
    """Columns go with it, the summary stays for plots."""
    for step in (1, 2, 3):
        house.save(step, model={"l.0.w": [3.0, 4.0], "l.1.w": [float(step), np.nan]})
    house.catalog.forget_checkpoint(RUN, 1)
    with pytest.raises(NoSuchResource, match="no statistics of tiny@1"):
        house.store.load(RUN, 1)
    shown = house.store.layers(RUN, "model", 50)
    assert shown.steps == [1, 2, 3]
    assert list(shown.layers) == ["l.0", "l.1"]
    cells = [cell for cell in shown.layers["l.1"] if cell is not None]
    assert [(cell.step, cell.nonfinite, cell.rms) for cell in cells] == [(1, 1, 1.0), (2, 1, 2.0), (3, 1, 3.0)]
    assert house.store.layers(RUN, "model", 2).steps == [2, 3]
    assert house.store.layers(RUN, "optim", 50).layers == {}
    assert house.store.layers("nobody", "model", 50).steps == []
    for wrong in (0, HISTORY_STEPS + 1):
        with pytest.raises(InvalidRequest):
            house.store.layers(RUN, "model", wrong)


def test_history_is_bounded(house: House) -> None:
    """Summaries of checkpoints that are gone are kept for so many steps; those of checkpoints that are there stay."""
    house.save(1, model={"w": [1.0]})
    house.save(2, model={"w": [1.0]})
    with house.catalog.database.write() as session:
        for step in range(10, 10 + HISTORY_STEPS):
            session.add(StatisticsRow(run=RUN, step=step, tensors=1, data=b"", layers={}))
    house.catalog.forget_checkpoint(RUN, 2)
    with pytest.raises(NoSuchResource):
        house.store.load(RUN, 2)
    assert len(house.store.load(RUN, 1)) == 1
    with house.catalog.database.read() as session:
        assert session.get(StatisticsRow, (RUN, 2)) is None
        assert session.get(StatisticsRow, (RUN, 10)) is not None


def test_a_removed_checkpoint_gets_no_statistics(house: House) -> None:
    """It went while it was examined: nothing is left of it."""
    made = build(house.root / naming.checkpoint_path(RUN, 1), {"model": {"w": np.zeros(2)}}, run=RUN, step=1).manifest
    house.control.launches.declare(RUN, "l1", 1, None)
    found = collect(tabulate([PartStatistics(2, 0, 0, 2, 0.0, 0.0, 0.0, 0.0)]), np.array([NOWHERE]))
    house.control.health.take(made, found)
    with pytest.raises(NoSuchResource):
        house.store.load(RUN, 1)


def test_damaged_statistics_are_named(house: House) -> None:
    """They cannot be read, by name; the checkpoint, the heat map and the next save are as before."""
    house.save(1, model={"w": [1.0]})
    with house.catalog.database.write() as session:
        session.get_one(StatisticsRow, (RUN, 1)).data = b"\x28\xb5\x2f\xfdnothing"
    with pytest.raises(CorruptStatistics):
        house.store.load(RUN, 1)
    assert house.catalog.checkpoint(RUN, 1).healthy is True
    assert house.store.layers(RUN, "model", 5).steps == [1]
    assert house.save(2, model={"w": [np.nan]}).healthy is False


def test_retention_keeps_the_newest_healthy(house: House) -> None:
    """Though the policy keeps one, the healthy one stays beside newer ones that are not."""
    attempt_policy = house.control.launches.declare(RUN, "l1", 1, 1)
    assert attempt_policy == 1
    for step, value in ((1, 1.0), (2, 2.0), (3, np.nan), (4, np.nan), (5, np.nan)):
        house.save(step, model={"w": [value]})
    assert house.control.rotation.wait_until_applied()
    assert [c.step for c in house.catalog.checkpoints(RUN, None, 100).items] == [5, 2]
    kept = {v.step: v.reasons for v in house.control.rotation.verdicts.preview(RUN).verdicts}
    assert kept[2] == ["it is the newest healthy checkpoint"]
    house.save(6, model={"w": [1.0]})
    assert house.control.rotation.wait_until_applied()
    assert [c.step for c in house.catalog.checkpoints(RUN, None, 100).items] == [6]
