"""What a daemon reports about itself in its welcome, and the check that it serves the expected root."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_formats.errors import WrongRoot
from holdfast_formats.root_files import RootMark


class Serving(NamedTuple):
    """What the daemon reports about itself."""

    node: str
    root: str
    mark: RootMark
    version: str
    url: str | None

    def check(self, meant: RootMark | None) -> None:
        """`WrongRoot` if a rank expects another root, before anything is done for it."""
        if meant is not None and not meant.is_of(self.mark):
            hint = (
                "the root was copied, moved or restored: start a separate daemon for it, or address this daemon "
                "by its socket or URL: at="
            )
            raise WrongRoot(f"the daemon serves {self.root}, which is not the root that the trainer expects", hint=hint)
