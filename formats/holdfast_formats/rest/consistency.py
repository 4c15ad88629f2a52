"""Bodies that state contradictions between a catalog and the directories, and what was repaired."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast_formats.body import Body

CONTRADICTIONS_MAX = 1000

Kind = Literal[
    "not-listed",  # a sound checkpoint or a run's file is on storage, and the catalog does not list it
    "listed-but-gone",  # the catalog lists a checkpoint that is not on storage
    "listed-but-unreadable",  # the catalog lists a checkpoint whose COMMIT or manifest cannot be read
    "unreadable",  # a directory is among the checkpoints and cannot be listed
    "differs",  # the catalog states something else of it than its manifest, or than the run's file
    "fence-too-low",  # an attempt is on record that is newer than the newest declared one (I6)
    "orphaned-round",  # the record of a save is open, and no daemon writes it
    "orphaned-job",  # a job is running on a node that is gone
    "statistics-of-nothing",  # statistics of a checkpoint that is not listed
]


class Contradiction(Body):
    """One place where the catalog contradicts the directories."""

    kind: Kind
    run: str | None = None
    step: int | None = None
    text: str = Field(description="one sentence for people")


class CatalogCheck(Body):
    """The result of comparing the catalog with the directories. `items` are the first ones; `count` counts all."""

    catalog: str = Field(description="its URL, without the password")
    runs: int
    checkpoints: int = Field(description="listed ones")
    manifests_read: int = Field(
        description="manifests read: of checkpoints that changed since they were listed; of all, if thorough"
    )
    thorough: bool
    count: int
    items: list[Contradiction]

    @property
    def sound(self) -> bool:
        return self.count == 0


class CatalogRebuild(Body):
    """The result of a rebuild: `mended` was wrong before, `left` is still wrong."""

    mended: list[Contradiction]
    left: list[Contradiction]
    set_aside: str | None = Field(default=None, description="where the damaged database was moved, if there was one")
    salvaged: dict[str, int] = Field(default_factory=dict, description="rows recovered from it, by table")
    runs: int
    checkpoints: int


class CatalogAdoption(Body):
    """The result of handing a catalog over to a root."""

    catalog: str = Field(description="its URL, without the password")
    root: str
    before: str | None = Field(description="path of the root that it belonged to before; None if none or this one")
