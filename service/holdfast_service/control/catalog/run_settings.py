"""Settings of a run's files in the catalog, so that lists and summaries need not read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import select

from holdfast_formats.rest import bodies
from holdfast_formats.rest.runs import TaggedRuns
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.pages import bounded, decode_cursor, page
from holdfast_service.control.database.run_rows import lock_run
from holdfast_service.control.database.schema import RunRow


class RunSettings(NamedTuple):
    """A run's owner and tags, when it was archived, and the attempt whose death was acknowledged, with person and time."""

    owner: str | None = None
    tags: tuple[str, ...] = ()
    archived: str | None = None
    acknowledged: int | None = None
    acknowledged_by: str | None = None
    acknowledged_at: str | None = None


COLUMNS = tuple(getattr(RunRow, name) for name in RunSettings._fields)


def note(catalog: Catalog, run: str, settings: RunSettings, known_only: bool = False) -> None:
    """Record settings; with `known_only` not for a run that the catalog does not know, since it was deleted meanwhile."""
    with catalog.database.write(hasty=True) as session:
        if known_only and session.get(RunRow, run) is None:
            return
        row = lock_run(session, run)
        for name, value in settings._asdict().items():
            setattr(row, name, value)


def known(catalog: Catalog, runs: Collection[str] | None = None) -> dict[str, RunSettings]:
    """The settings of these runs, or of all, as far as the request may see them."""
    columns = select(RunRow.name, *COLUMNS)
    with catalog.database.read() as session:
        rows = session.execute(columns if runs is None else columns.where(RunRow.name.in_(runs)))
        return {name: RunSettings(*settings) for name, *settings in rows}


def tags(catalog: Catalog, prefix: str, cursor: str | None, limit: int) -> bodies.Page[TaggedRuns]:
    """A page of the tags that begin with `prefix`, sorted, with the number of runs, as far as the request may see them."""
    after = decode_cursor("tags", cursor) or ""
    with catalog.database.read() as session:
        counts = Counter(
            tag for of_run in session.scalars(select(RunRow.tags).where(RunRow.tags.is_not(None))) for tag in of_run or ()
        )
    wanted = sorted(tag for tag in counts if tag > after and tag.startswith(prefix))[: bounded(limit) + 1]
    cut = page("tags", wanted, limit, lambda tag: tag)
    return bodies.Page(items=[TaggedRuns(tag=tag, runs=counts[tag]) for tag in cut.items], next=cut.next)
