"""What a daemon tells of itself to who says hello, and whether that is who was meant."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_formats.errors import WrongRoot
from holdfast_formats.whereabouts import RootMark


class Serving(NamedTuple):
    """What the daemon tells of itself."""

    node: str
    root: str
    mark: RootMark
    version: str
    url: str | None

    def check(self, meant: RootMark | None) -> None:
        """`WrongRoot` where a rank means another root, before anything is done for it."""
        if meant is not None and not meant.is_of(self.mark):
            hint = "it was copied, moved or restored: give it a daemon of its own; or name this one with socket= or url="
            raise WrongRoot(f"the daemon serves {self.root}, which is not the root that the trainer means", hint=hint)
