"""A run's tags as people and trainers set them, against a model, on every database."""

from __future__ import annotations

from itertools import count

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast_formats.rest.runs import RunChange, RunLaunch
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.listing import named
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.checkpoints.run_metadata import RunMetadata
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.storage import MemoryTier

AT = "2030-01-01T00:00:00Z"
TAGS = ("lr", "LR", "lr2", "l", "r:1", "r_1")
some = st.lists(st.sampled_from(TAGS), max_size=3)
acts = st.lists(st.one_of(st.tuples(some, some), st.lists(st.sampled_from((*TAGS, "no tag", 7)), max_size=3)), max_size=8)
_runs = count()


@given(acts)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tags_are_what_was_set_else_the_trainers(
    catalog: Catalog, acts: list[tuple[list[str], list[str]] | list[object]]
) -> None:
    """Whatever comes first: once people have changed them, a trainer's do not count until they are the same again."""
    run, tier = f"r{next(_runs)}", MemoryTier()
    metadata = RunMetadata(tier, catalog, RunFiles(tier), Events(catalog.database, "node", lambda: AT))
    catalog.declare_attempt(run, "launch", 1, AT)
    trainers: set[str] = set()
    chosen: set[str] | None = None
    for number, act in enumerate(acts, 1):
        if isinstance(act, tuple):
            tag, untag = act
            metadata.change(run, RunChange(tag=tag, untag=untag), "idle", False, "ann")
            if tag or untag:
                tags = ((trainers if chosen is None else chosen) | set(tag)) - set(untag)
                chosen = None if tags == trainers else tags
        else:
            metadata.launched(run, RunLaunch(attempt=number, at=AT, world=1, info={"tags": act}))
            trainers = {tag for tag in act if tag in TAGS}
        expected = sorted(trainers if chosen is None else chosen)
        assert metadata.of(catalog.run(run)).tags == expected
        settings_found = roots.settings_of(tier, run)
        assert settings_found is not None and list(settings_found.tags) == expected
    found = metadata.of(catalog.run(run)).tags
    for tag in TAGS:
        with catalog.database.read() as session:
            assert (run in session.scalars(named(run, (), [tag])).all()) == (tag in found)
        assert WantedRuns.parse(tags=[tag]).has(run, found) == (tag in found)
