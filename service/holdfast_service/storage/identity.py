"""The identity of a root: an id in it, made when a daemon first serves it, and made again in a copy."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSuchResource, WrongRoot
from holdfast_formats.root_files import FILE_BYTES_MAX, RootFile, RootMark, decode, encode

from .posix import PosixTier
from .records import Records

log = logging.getLogger(__name__)


class Identity(NamedTuple):
    """A root's mark; `copy_of` is the id that was found in it if that belongs to another place."""

    mark: RootMark
    copy_of: str | None = None


class Whereabouts(NamedTuple):
    """What tells a root from a copy of it: the inode of its directory, or the address of its bucket, with the directory for
    what a daemon of this machine keeps.
    """

    directory: Path
    bucket: str = ""

    @property
    def label(self) -> str:
        return self.bucket or str(self.directory)

    def mark(self, root_id: str) -> RootMark:
        """The mark by which programs of this machine know the root."""
        at = os.stat(self.directory)
        return RootMark(id=root_id, device=at.st_dev, inode=at.st_ino)

    def file(self, root_id: str, catalog: str | None) -> RootFile:
        inode = 0 if self.bucket else os.stat(self.directory).st_ino
        return RootFile(id=root_id, inode=inode, place=self.bucket, catalog=catalog)

    def is_of(self, file: RootFile) -> bool:
        """Whether the file was made for this place."""
        return (file.place, file.inode) == (self.bucket, 0 if self.bucket else os.stat(self.directory).st_ino)


def settle(
    records: Records, where: Whereabouts, catalog: str | None = None, leave: bool = False, *, later: bool = False
) -> Identity:
    """Return the root's identity, for the holder of its lock: the existing one, or a new one for a new root and for a copy.

    A copied id is in a directory with another inode, or in a bucket with another address, than the one for which it was
    made. So a root that was restored from a backup, or moved to another file system, becomes another root; one that was
    renamed or mounted elsewhere is the same.

    `catalog` is the address of the catalog that the daemons of several nodes share, which the root stores. A daemon with
    another catalog cannot see the others, so it is refused with `WrongRoot`, unless it is to `leave` them. `later`: do not
    mark a root that is not shared yet, because it may become shared.
    """
    identity = _settled(records, where, catalog, leave, later)
    if where.bucket:
        _remember(where, identity.mark.id, catalog)
    return identity


def mark(records: Records, place: str) -> None:
    """Make a bucket to which a daemon copies a root, if it is none yet, so that it can be read, and served later."""
    if records.size(naming.ROOT_FILE) is None:
        records.put_first(naming.ROOT_FILE, encode(RootFile(id=uuid.uuid4().hex, inode=0, place=place)))


def _settled(records: Records, where: Whereabouts, catalog: str | None, leave: bool, later: bool) -> Identity:
    found = _read(records)
    marked = None if later else catalog
    if found is None:
        _refuse_emptied(where)
        root_file = where.file(uuid.uuid4().hex, marked)
        if records.size(naming.ROOT_FILE) is None and records.put_first(naming.ROOT_FILE, encode(root_file)):
            return Identity(where.mark(root_file.id))
        found = _read(records)  # what another node has made since, or what cannot be read
    if found is not None and where.is_of(found):
        if found.catalog != catalog and not (later and found.catalog is None):
            _take_over(records, where, found, catalog, leave)
        return Identity(where.mark(found.id))
    root_file = where.file(uuid.uuid4().hex, marked)
    records.replace(naming.ROOT_FILE, encode(root_file))
    return Identity(where.mark(root_file.id), found.id if found is not None else None)


def _refuse_emptied(where: Whereabouts) -> None:
    """A bucket that this machine has served and that has lost its mark is damaged, or another one: it is no new root."""
    if where.bucket and (before := known(where.directory)):
        raise WrongRoot(
            f"{where.bucket} has no {naming.ROOT_FILE} any more, but this machine has served it as the root {before}: it "
            "was emptied, or is another bucket of this name",
            hint=f"restore its objects, or correct --root and the endpoint; to begin with an empty root, remove "
            f"{where.directory}",
        )


def _remember(where: Whereabouts, root_id: str, catalog: str | None) -> None:
    """Mark the directory in which this machine's daemon keeps what is its own: programs find the daemon by it."""
    tier = PosixTier(where.directory)
    root_file = Whereabouts(where.directory).file(root_id, catalog)
    if _read(tier) != root_file:
        tier.replace(naming.ROOT_FILE, encode(root_file))


def _take_over(records: Records, where: Whereabouts, root_file: RootFile, catalog: str | None, leave: bool) -> None:
    if root_file.catalog is not None and not leave:
        raise WrongRoot(
            f"{where.label} is shared by the daemons of several nodes, with the catalog {root_file.catalog}; this one has "
            f"{catalog or 'its own catalog'}",
            hint="start it with the same --catalog. If no other daemon serves this root any more, `holdfast catalog adopt "
            f"--root {where.bucket or 'DIR'} --catalog URL` gives the root another catalog, and without --catalog its own",
        )
    records.replace(naming.ROOT_FILE, encode(root_file.model_copy(update={"catalog": catalog})))


def catalog_of(records: Records, where: Whereabouts) -> str | None:
    """The address of the catalog that the root is shared with; None if it is not shared, is new, or is a copy."""
    root_file = _read(records)
    return root_file.catalog if root_file is not None and where.is_of(root_file) else None


def known(root: Path) -> str:
    """The id of a root's directory, without changing it; "" if it has none yet or is a copy."""
    if not root.is_dir():
        return ""
    root_file = _read(PosixTier(root))
    return root_file.id if root_file is not None and Whereabouts(root).is_of(root_file) else ""


def _read(records: Records) -> RootFile | None:
    try:
        return decode(RootFile, records.read(naming.ROOT_FILE, 0, FILE_BYTES_MAX))
    except NoSuchResource:
        return None
    except CheckpointError as error:
        log.error("cannot read %s, so a new one is created: %s", naming.ROOT_FILE, error.detail)
        return None
