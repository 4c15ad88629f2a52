"""Links from where a framework looks for its checkpoints to their directories in the root.

An existing link keeps its checkpoint: the daemon learns which directories hold links, and reads them before it removes
anything.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from holdfast.link.session import Session
from holdfast.threads import own_threads
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest, NoSuchCheckpoint

log = logging.getLogger(__name__)


class CheckpointLinks:
    """The links of one run. Guarded by its owner's lock, as the session is."""

    def __init__(self, run: str, session: Session) -> None:
        self._run, self._session = run, session
        self._telling: list[threading.Thread] = []
        self._warned: set[str] = set()

    def make(self, of: SaveTicket | int, path: str | PathLike[str], required: bool = True) -> None:
        """As `_make`. If the link is not required, warn if it is impossible, once for each cause."""
        try:
            self._make(of, path)
        except (CheckpointError, OSError) as error:
            if required:
                raise
            detail, hint = (error.detail, error.hint) if isinstance(error, CheckpointError) else (str(error), None)
            if detail not in self._warned:
                self._warned.add(detail)
                self._session.warn(
                    f"{path} was not linked: {detail}. The checkpoint is saved all the same, and retention may remove it"
                    + (f" ({hint})" if hint else "")
                )

    def _make(self, of: SaveTicket | int, path: str | PathLike[str]) -> None:
        """Make `path` a link to the checkpoint of a ticket, which may not be committed yet, or of a committed step.

        Raises `InvalidRequest` if `path` is anything but a link to a checkpoint of this run, or if the root is not a
        directory of this machine; `NoSuchCheckpoint`.
        """
        root = self._session.root()
        if root is None:
            raise InvalidRequest(
                f"no link can lead to checkpoints of {self._run}: the daemon's directory is not on this machine, or its "
                f"{naming.ROOT_FILE} was removed",
                hint="leave the link out; `holdfast export` makes a copy. If the file was removed, start the program again: "
                "it finds the committed checkpoints",
            )
        step = of.step if isinstance(of, SaveTicket) else naming.check_step(of)
        target, link = root / naming.checkpoint_path(self._run, step), Path(os.path.abspath(path))
        self._check(link, root)
        if not isinstance(of, SaveTicket):
            self._tell(link.parent)
        _place(link, target)
        if isinstance(of, SaveTicket):
            self._watch_soon(link.parent)
            of.when_ended(lambda error: _remove_if_void(link, target, error))
        elif not self._stands(target, link.parent):
            _remove_if_void(link, target, NoSuchCheckpoint(""))
            raise NoSuchCheckpoint(
                f"{self._run}@{step} is not a checkpoint of {root}", hint="`holdfast ls` lists the checkpoints that exist"
            )

    def _stands(self, target: Path, directory: Path) -> bool:
        """Whether the checkpoint still exists after its link was made, which later removals will find."""
        self._tell(directory)
        return target.is_dir()

    def step_at(self, path: str | PathLike[str]) -> int | None:
        """The step to which this path leads; None if it is no checkpoint of this run in this root.

        Raises `NoSuchCheckpoint` for a broken link.
        """
        root, place = self._session.root(), os.path.realpath(path)
        step = naming.linked_step(self._run, place)
        if root is None or step is None or Path(place).parents[2].resolve() != root.resolve():
            return None
        if not Path(place).is_dir():
            raise NoSuchCheckpoint(
                f"{path} leads to {self._run}@{step}, which does not exist",
                hint="`holdfast ls` lists the checkpoints that exist",
            )
        return step

    def close(self) -> None:
        """Wait until every directory has been reported to the daemon."""
        for thread in self._telling:
            thread.join()
        self._telling.clear()

    def _check(self, link: Path, root: Path) -> None:
        inside = Path(os.path.realpath(link.parent))
        if inside == root or root in inside.parents:
            raise InvalidRequest(
                f"{link} would be in the root {root} itself", hint="put links into a directory outside the root"
            )
        check_free(link, self._run, root)
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"the directory {link.parent} cannot be created: {error.strerror}") from error

    def _watch_soon(self, directory: Path) -> None:
        """Report the directory in the background: the daemon writes a file for it. Repeated for every link, because the
        daemon forgets directories that are missing for a while.
        """

        def tell() -> None:
            try:
                self._tell(directory)
            except CheckpointError as error:
                self._session.warn(f"links in {directory} do not protect checkpoints from removal: {error.detail}")

        self._telling = [one for one in self._telling if one.is_alive()]
        self._telling.append(own_threads.begin(tell, "holdfast-links"))

    def _tell(self, directory: Path) -> None:
        self._session.watch_links(str(directory))


def check_free(link: Path, run: str, root: Path) -> None:
    """Raise `InvalidRequest` if anything is at this path but a link to a checkpoint of this run in this root."""
    if link.is_symlink():
        target = os.readlink(link)
        if naming.linked_step(run, target) is None:
            raise InvalidRequest(
                f"{link} exists, and is a link to {target}, which is not a checkpoint of {run}",
                hint="choose another name (another output_dir of a Trainer), or remove the link",
            )
        if os.path.isdir(target) and Path(os.path.realpath(target)).parents[2] != root.resolve():
            raise InvalidRequest(
                f"{link} leads to a checkpoint of another root, {target}, and protects that checkpoint from removal",
                hint="choose another name, or remove the link",
            )
    elif os.path.lexists(link):
        raise InvalidRequest(f"{link} exists, and is not a link", hint="choose another name, or move it away")


def unlink(links: Iterable[Path]) -> None:
    """Remove links. One that stays is warned of: it keeps its checkpoint, and training goes on."""
    for link in links:
        log.info("removing the link %s", link)
        try:
            link.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the link %s, which keeps its checkpoint, cannot be removed: %s", link, error.strerror)


def _place(link: Path, target: Path) -> None:
    """Replace the link atomically, so that the old one keeps its checkpoint until then."""
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    new = link.parent / naming.link_in_the_making(link.name)
    try:
        new.symlink_to(target)
        new.replace(link)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise InvalidRequest(
            f"the link {link} cannot be created: {error.strerror}", hint="make its directory writable"
        ) from error


def _remove_if_void(link: Path, target: Path, error: CheckpointError | None) -> None:
    """Remove a link whose save has failed, unless another daemon may still commit it."""
    if error is None or isinstance(error, DaemonGone):
        return
    try:
        if not target.is_dir() and os.readlink(link) == str(target):
            link.unlink()
    except OSError as failure:
        log.info("could not remove the link %s of a failed save: %s", link, failure)
