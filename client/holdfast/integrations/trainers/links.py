"""The links `checkpoint-N` in a Trainer's output directory, where its users and tools look for checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.trainers import resuming
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint

log = logging.getLogger(__name__)

SENTINEL = "checkpoint-is-incomplete.txt"  # a JIT checkpoint of transformers makes the directory with this alone


class OutputLinks:
    """The links of one run. A link protects its checkpoint; retention removes what is not linked."""

    def __init__(self, output_dir: str, run: str) -> None:
        self._output_dir, self._run = output_dir, run

    def path(self, step: int) -> Path:
        return Path(self._output_dir, f"checkpoint-{step}")

    def check_place(self, checkpointer: Checkpointer) -> None:
        """`InvalidRequest` for an output directory inside the root, before anything is trained. Starts the daemon."""
        root, place = checkpointer.root(), Path(os.path.realpath(self._output_dir))
        if root is not None and place.is_relative_to(root.resolve()):
            raise InvalidRequest(
                f"output_dir={self._output_dir} is inside the root {root}, where only Holdfast may write",
                hint="choose an output_dir outside of the root; links in it lead to the checkpoints",
            )

    def own(self, checkpointer: Checkpointer) -> dict[int, Path]:
        """Links to checkpoints of this run in this root, by step; some may not be committed yet."""
        paths = resuming.links(self._output_dir, self._run)
        return {step: path for step, path in paths.items() if _leads_to(checkpointer, path)}

    def clear_way(self, step: int) -> None:
        """Make room for a link: the output directory exists, and an empty directory at the link's place does not."""
        path = self.path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink() and os.listdir(path) in ([], [SENTINEL]):
            (path / SENTINEL).unlink(missing_ok=True)
            path.rmdir()

    def release_after(self, checkpointer: Checkpointer, newest: int) -> None:
        """Remove links to abandoned checkpoints, beyond the newest step that counts: a linked one is never replaced."""
        unlink(link for step, link in self.own(checkpointer).items() if step > newest)

    def link(self, checkpointer: Checkpointer, ticket: SaveTicket) -> None:
        checkpointer.link(ticket, self.path(ticket.step))

    def rotate(self, checkpointer: Checkpointer, limit: int | None, best: int | None) -> None:
        """Remove the oldest links beyond the limit, except the newest and the best."""
        if limit is None:
            return
        links = self.own(checkpointer)
        kept = {max(links), best} & links.keys()
        others = [step for step in links if step not in kept]
        surplus = len(links) - max(limit, len(kept))
        unlink(links[step] for step in others[: max(surplus, 0)])


def unlink(links: Iterable[Path]) -> None:
    for link in links:
        log.info("removing the link %s", link)
        link.unlink(missing_ok=True)


def _leads_to(checkpointer: Checkpointer, path: Path) -> bool:
    try:
        return checkpointer.step_at(path) is not None
    except NoSuchCheckpoint:
        return True  # it is not committed yet
