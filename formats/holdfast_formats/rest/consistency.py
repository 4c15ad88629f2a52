"""Bodies that say where a catalog and the directories contradict each other, and what was mended."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

CONTRADICTIONS_MAX = 1000

Kind = Literal[
    "not-listed",  # a sound checkpoint or a run's file is on storage, and the catalog does not list it
    "listed-but-gone",  # the catalog lists a checkpoint that is not on storage
    "listed-but-unreadable",  # the catalog lists a checkpoint whose COMMIT or manifest cannot be read
    "unreadable",  # a directory stands among the checkpoints and cannot be listed
    "differs",  # the catalog says something else of it than its manifest, or than the run's file
    "fence-too-low",  # an attempt is on record that is newer than the newest declared one (I6)
    "round-nobody-writes",  # a round is going on, and no daemon writes it
    "job-nobody-runs",  # a job is running on a node that is gone
    "statistics-of-nothing",  # statistics of a checkpoint that is not listed
]


class Contradiction(BaseModel):
    """One place where the catalog says something else than what is there."""

    kind: Kind
    run: str | None = None
    step: int | None = None
    text: str = Field(description="one sentence for people")


class CatalogCheck(BaseModel):
    """What a look at the catalog and the directories found. `items` are the first ones; `count` counts all."""

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


class CatalogRebuild(BaseModel):
    """What was made anew: `mended` is what was wrong before, `left` is what still is."""

    mended: list[Contradiction]
    left: list[Contradiction]
    set_aside: str | None = Field(default=None, description="where the damaged database was moved, if there was one")
    salvaged: dict[str, int] = Field(default_factory=dict, description="rows recovered from it, by table")
    runs: int
    checkpoints: int


class CatalogAdoption(BaseModel):
    """A catalog was made a root's own."""

    catalog: str = Field(description="its URL, without the password")
    root: str
    before: str | None = Field(description="path of the root that it belonged to before; None if none or this one")
