"""Admission: refuses a save that cannot fit before any byte of it is written, after removing checkpoints that may go
(I10).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from holdfast_formats.disk.packing import tensor_extent_bytes
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Damaged, NoSpace, QuotaExceeded, StorageFailed
from holdfast_formats.naming import Place
from holdfast_formats.staging.plan import WritePlan
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import commit, roots
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.team_quotas import TeamQuotas
from holdfast_service.storage import FileIdentity, RootStorage

log = logging.getLogger(__name__)

SPARE_BYTES = 2**20  # for the catalog and run files, which must be writable even if there is no room for a save
BLOCK_BYTES = 4096  # the space of a small file
SMALL_FILES = 8  # manifest, receipt, state, COMMIT, and the directories around them
INDEX_BYTES_A_TENSOR = 64  # besides its name, which is in the file's header too
MANIFEST_BYTES_A_TENSOR = 256
MANIFEST_BYTES_AN_EXTENT = 48
ADMITTED_MAX = 64  # saves whose quotas are kept for their commits: of more, those of the oldest are read again
USED_S = 0.5  # how long to wait for the catalog's answer about a run's usage

Ask = Callable[[Callable[[], Any], float], Any]  # a question to the catalog, and how long it may take


def counted_bytes(plan: WritePlan) -> int:
    """The exact bytes that the checkpoint counts for: everything in its manifest."""
    indexes = sum(len(commit.encode_index(plan, group)) for group in plan.groups)
    return _data_bytes(plan) + indexes


def disk_bytes(plan: WritePlan) -> int:
    """The most disk space that writing it takes: an upper bound for indexes, manifest and receipt, and whole blocks."""
    total = _data_bytes(plan) + (len(plan.files) + len(plan.assets) + len(plan.groups) + SMALL_FILES) * BLOCK_BYTES
    longest = plan.extent_bytes
    for file in plan.files:
        header, tensors = len(file.layout.header), len(file.tensors)
        sizes = [tensor.spec.nbytes for tensor in file.tensors]
        extents = sum(-(-size // tensor_extent_bytes(size, longest)) for size in sizes)
        total += header + tensors * INDEX_BYTES_A_TENSOR
        total += 2 * (header + tensors * MANIFEST_BYTES_A_TENSOR + extents * MANIFEST_BYTES_AN_EXTENT)
    return total


def _data_bytes(plan: WritePlan) -> int:
    return plan.bytes + sum(asset.blob.length for asset in plan.assets) + len(plan.state)


class _Quotas(NamedTuple):
    """The quotas that a run counts against: its own, None without one, and those of its teams by pattern."""

    own: int | None
    teams: Mapping[str, int]


class Admission:
    """Decides whether a plan fits: into the quotas of the run and of its teams, and onto the disk."""

    def __init__(
        self,
        storage: RootStorage,
        catalog: Catalog,
        files: RunFiles,
        rotation: Rotation,
        ask: Ask,
        empty_trash: Callable[[int, str], object],
    ) -> None:
        """`empty_trash` removes deleted runs until so many bytes are free."""
        self._store, self._catalog = storage.store, catalog
        self._files, self._rotation, self._ask = files, rotation, ask
        self._empty_trash = empty_trash
        self._teams = TeamQuotas(storage.records, catalog.database)
        # With which a step was admitted: changes are for the next one. It may end without a commit, or on another node.
        self._admitted = OrderedDict[tuple[str, int], _Quotas]()

    def admit(self, plan: WritePlan) -> None:
        """Return if the save fits. Raises `QuotaExceeded` or `NoSpace`, with the numbers, if there is no room and none can
        be made.

        Where the disk is full, deleted runs leave the trash first. Then checkpoints are removed in this order: first those
        that no rule of any run keeps; then, oldest first and no more than needed, those that this run's policy removes once
        this save is verified, if they are superseded by a verified checkpoint already (I10).
        """
        quotas = self._quotas(plan.run)
        self._keep(plan, quotas)
        shortage = self._shortage(plan, quotas)
        if isinstance(shortage, NoSpace):  # deleted runs go before kept checkpoints
            self._empty_trash(shortage.members["needed"], f"{plan.run}@{plan.step}")
            shortage = self._shortage(plan, quotas)
        if shortage is None:
            return
        self._apply_policies(plan.run)
        incoming = Candidate(plan.step, 0.0, True, plan.metrics, groups=frozenset(plan.groups))
        while (shortage := self._shortage(plan, quotas)) is not None:
            try:
                room = self._rotation.make_room(plan.run, incoming)
            except CheckpointError as error:
                raise shortage from error
            if room is None:
                raise shortage

    def shared_bytes(self, plan: WritePlan) -> int:
        """The bytes of staged files that a committed checkpoint has as well: they do not count again."""
        return sum(one.bytes for one in self._staged(plan).values() if one.names > 1)

    def _staged(self, plan: WritePlan) -> dict[str, FileIdentity]:
        names = {file.layout.name for file in plan.files}
        found = self._store.identities(Place(plan.run, plan.step, plan.attempt).path)
        return {name: identity for name, identity in found.items() if name in names}

    def check_quotas(self, run: str, step: int, need: int) -> None:
        """`QuotaExceeded` if what is written does not fit any more: other saves may have committed since it was admitted."""
        quotas = self._admitted.pop((run, step), None) or self._quotas(run)
        over = self._over_quota(run, step, need, quotas)
        if over is not None:
            raise over

    def refuse_copy(self, run: str, step: int, size: int) -> None:
        """Raise `QuotaExceeded` or `NoSpace` if so many more bytes of a committed checkpoint do not fit. Nothing is removed
        for them.
        """
        over = self._over_quota(run, step, size, self._quotas(run))
        if over is not None:
            raise over
        full = self._full(f"a copy of files of {run}@{step}", run, size + SPARE_BYTES)
        if full is not None:
            raise full

    def _keep(self, plan: WritePlan, quotas: _Quotas) -> None:
        self._admitted[plan.run, plan.step] = quotas
        while len(self._admitted) > ADMITTED_MAX:
            with suppress(KeyError):  # a commit has taken the last one meanwhile
                self._admitted.popitem(last=False)

    def quotas(self, run: str) -> dict[str, int]:
        """The quotas that a run counts against; without unreadable ones."""
        own, teams = self._quotas(run)
        return dict(teams) if own is None else {**teams, run: min(own, teams.get(run, own))}

    def _apply_policies(self, first: str) -> None:
        for run in dict.fromkeys((first, *roots.runs(self._store.files))):
            try:
                self._rotation.apply(run)
            except CheckpointError as error:  # another run's unreadable file must not keep this one from being saved
                log.error("retention of %s: %s", run, error.detail)

    def _quotas(self, run: str) -> _Quotas:
        own, teams = None, dict[str, int]()
        try:
            own = self._files.read(run).in_force.quota_bytes
        except (Damaged, StorageFailed) as error:  # a save is worth more than a limit that cannot be read
            log.error("%s", error)
        try:
            teams = self._teams.of(run)
        except (Damaged, StorageFailed) as error:
            log.error("%s", error)
        return _Quotas(own, teams)

    def _used(self, run: str) -> int:
        try:
            return int(
                self._ask(lambda: sum(c.bytes - c.shared_bytes for c in roots.all_checkpoints(self._catalog, run)), USED_S)
            )
        except CatalogUnavailable as away:  # a save is worth more than a limit that cannot be counted
            log.warning("cannot determine how much of its quota %s uses: %s", run, away.detail)
            return 0

    def _team_shortage(self, run: str, what: str, need: int, quotas: Mapping[str, int]) -> QuotaExceeded | None:
        """The error of the first team quota into which it does not fit."""
        try:
            used_by = self._ask(partial(self._teams.used, quotas), USED_S) if quotas else {}  # one wait for all of them
        except CatalogUnavailable as away:
            log.warning("cannot determine how much of their quotas the teams of %s use: %s", run, away.detail)
            return None
        for pattern, quota in quotas.items():
            used = used_by[pattern]
            if used + need > quota:
                return QuotaExceeded(
                    f"{what} needs {need} bytes; the runs {pattern} already use {used} of their quota of {quota} bytes",
                    hint=f"keep fewer checkpoints of the runs {pattern}, use `holdfast rm`, or have an admin raise it: "
                    f"`holdfast quota set '{pattern}' BYTES`",
                    needed=need,
                    used=used,
                    quota=quota,
                    pattern=pattern,
                )
        return None

    def _over_quota(self, run: str, step: int, need: int, quotas: _Quotas) -> QuotaExceeded | None:
        what = f"{run}@{step}"
        quota = quotas.own
        if quota is not None:
            used = self._used(run)
            if used + need > quota:
                return QuotaExceeded(
                    f"{what} needs {need} bytes; its run already uses {used} of its quota of {quota} bytes",
                    hint=f"raise the quota, keep fewer checkpoints, or use `holdfast rm`; `holdfast keep {run} "
                    "--dry-run` shows what is kept and why",
                    needed=need,
                    used=used,
                    quota=quota,
                )
        return self._team_shortage(run, what, need, quotas.teams)

    def _shortage(self, plan: WritePlan, quotas: _Quotas) -> CheckpointError | None:
        over = self._over_quota(plan.run, plan.step, counted_bytes(plan) - self.shared_bytes(plan), quotas)
        if over is not None:
            return over
        taken = sum(one.bytes for one in self._staged(plan).values())  # wherever else they are: they have their room
        return self._full(f"{plan.run}@{plan.step}", plan.run, disk_bytes(plan) - taken + SPARE_BYTES)

    def _full(self, what: str, run: str, room: int) -> NoSpace | None:
        """The error if the disk has no such room."""
        free = self._store.free_bytes()
        if free is None or room <= free:
            return None
        return NoSpace(
            f"{what} needs {room} bytes of disk space, but only {free} are free",
            hint=f"free space, or keep fewer checkpoints; `holdfast keep {run} --dry-run` shows what is kept and why",
            needed=room,
            free=free,
        )
