"""The identity of a root: an id in its directory, made when a daemon first serves it, and made again in a copy."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, WrongRoot
from holdfast_formats.root_files import FILE_BYTES_MAX, RootFile, RootMark, decode, encode

from .posix import PosixTier

log = logging.getLogger(__name__)


class Identity(NamedTuple):
    """A root's mark; `copy_of` is the id that was found in it if that belongs to another directory."""

    mark: RootMark
    copy_of: str | None = None


def settle(tier: PosixTier, catalog: str | None = None, leave: bool = False, *, later: bool = False) -> Identity:
    """Return the root's identity, for the holder of its lock: the existing one, or a new one for a new root and for a copy.

    A copied id is in a directory with another inode than the one for which it was made. So a root that was restored from a
    backup, or moved to another file system, becomes another root; one that was renamed or mounted elsewhere is the same.

    `catalog` is the address of the catalog that the daemons of several nodes share, which the root stores. A daemon with
    another catalog cannot see the others, so it is refused with `WrongRoot`, unless it is to `leave` them. `later`: do not
    mark a root that is not shared yet, because it may become shared.
    """
    at = os.stat(tier.root)
    found = _read(tier)
    marked = None if later else catalog
    if found is None:
        root_file = RootFile(id=uuid.uuid4().hex, inode=at.st_ino, catalog=marked)
        if tier.size(naming.ROOT_FILE) is None and tier.put_first(naming.ROOT_FILE, encode(root_file)):
            return Identity(RootMark(id=root_file.id, device=at.st_dev, inode=at.st_ino))
        found = _read(tier)  # what another node has made since, or what cannot be read
    if found is not None and found.inode == at.st_ino:
        if found.catalog != catalog and not (later and found.catalog is None):
            _take_over(tier, found, catalog, leave)
        return Identity(RootMark(id=found.id, device=at.st_dev, inode=at.st_ino))
    root_file = RootFile(id=uuid.uuid4().hex, inode=at.st_ino, catalog=marked)
    tier.replace(naming.ROOT_FILE, encode(root_file))
    return Identity(RootMark(id=root_file.id, device=at.st_dev, inode=at.st_ino), found.id if found is not None else None)


def _take_over(tier: PosixTier, root_file: RootFile, catalog: str | None, leave: bool) -> None:
    if root_file.catalog is not None and not leave:
        raise WrongRoot(
            f"{tier.root} is shared by the daemons of several nodes, with the catalog {root_file.catalog}; this one has "
            f"{catalog or 'its own catalog'}",
            hint="start it with the same --catalog. If no other daemon serves this root any more, `holdfast catalog adopt "
            "--root DIR --catalog URL` gives the root another catalog, and without --catalog its own",
        )
    tier.replace(naming.ROOT_FILE, encode(root_file.model_copy(update={"catalog": catalog})))


def catalog_of(tier: PosixTier) -> str | None:
    """The address of the catalog that the root is shared with; None if it is not shared, is new, or is a copy."""
    root_file = _read(tier)
    return root_file.catalog if root_file is not None and root_file.inode == os.stat(tier.root).st_ino else None


def known(root: Path) -> str:
    """The id of a root, without changing it; "" if it has none yet or is a copy."""
    if not root.is_dir():
        return ""
    root_file = _read(PosixTier(root))
    return root_file.id if root_file is not None and root_file.inode == os.stat(root).st_ino else ""


def _read(tier: PosixTier) -> RootFile | None:
    if tier.size(naming.ROOT_FILE) is None:
        return None
    try:
        return decode(RootFile, tier.read(naming.ROOT_FILE, 0, FILE_BYTES_MAX))
    except CheckpointError as error:
        log.error("cannot read %s, so a new one is created: %s", naming.ROOT_FILE, error.detail)
        return None
