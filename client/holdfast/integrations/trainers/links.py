"""The links `checkpoint-N` in a Trainer's output directory, where its users and tools look for checkpoints."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.trainers import resuming
from holdfast.link.checkpoint_links import check_free, unlink
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint

SENTINEL = "checkpoint-is-incomplete.txt"  # a JIT checkpoint of transformers makes the directory with this alone
_NAMES_MAX = 5  # in a hint


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

    def check_free(self, checkpointer: Checkpointer, resumed: int, last: int) -> None:
        """`InvalidRequest` if no link can be made for a step after the resumed one, up to the last, because something
        else has its name.
        """
        root, taken = checkpointer.root(), []
        if root is None:
            return
        for step, path in resuming.numbered(self._output_dir).items():
            try:
                if resumed < step <= last and not _is_void(path):
                    check_free(path, self._run, root)
            except InvalidRequest as error:
                taken.append((path.name, error.detail))
        if taken:
            names = ", ".join(name for name, _ in taken[:_NAMES_MAX]) + (", …" if len(taken) > _NAMES_MAX else "")
            raise InvalidRequest(
                f"steps {resumed + 1} to {last} would be linked as checkpoint-N in output_dir, but {taken[0][1]}",
                hint=f"choose another output_dir, or move away {names}; checkpoints of the Trainer's own library can be "
                "resumed from with resume_from_checkpoint=True",
            )

    def own(self, checkpointer: Checkpointer) -> dict[int, Path]:
        """Links to checkpoints of this run in this root, by step; some may not be committed yet."""
        paths = resuming.links(self._output_dir, self._run)
        return {step: path for step, path in paths.items() if _leads_to(checkpointer, path)}

    def clear_way(self, step: int) -> None:
        """Make room for a link: the output directory exists, and an empty directory at the link's place does not."""
        path = self.path(step)
        with suppress(OSError):  # then there is no link, with a warning
            path.parent.mkdir(parents=True, exist_ok=True)
            if _is_void(path):
                (path / SENTINEL).unlink(missing_ok=True)
                path.rmdir()

    def release_after(self, checkpointer: Checkpointer, newest: int) -> None:
        """Remove links to abandoned checkpoints, beyond the newest step that counts: a linked one is never replaced."""
        unlink(link for step, link in self.own(checkpointer).items() if step > newest)

    def link(self, checkpointer: Checkpointer, ticket: SaveTicket) -> bool:
        """Link the step of a save; False, after a warning, if that is impossible."""
        path = self.path(ticket.step)
        checkpointer.link(ticket, path, required=False)
        return path.is_symlink() and naming.linked_step(self._run, os.readlink(path)) == ticket.step

    def rotate(self, checkpointer: Checkpointer, limit: int | None, best: int | None) -> None:
        """Remove the oldest links beyond the limit, except the newest and the best."""
        links = {} if limit is None else self.own(checkpointer)
        if limit is None or not links:
            return
        kept = {max(links), best} & links.keys()
        others = [step for step in links if step not in kept]
        surplus = len(links) - max(limit, len(kept))
        unlink(links[step] for step in others[: max(surplus, 0)])


def _is_void(path: Path) -> bool:
    """Whether it is a directory that gives way to a link."""
    return path.is_dir() and not path.is_symlink() and os.listdir(path) in ([], [SENTINEL])


def _leads_to(checkpointer: Checkpointer, path: Path) -> bool:
    try:
        return checkpointer.step_at(path) is not None
    except NoSuchCheckpoint:
        return True  # it is not committed yet
    except CheckpointError:
        return False  # no daemon can tell
