"""Quotas of teams: how many bytes all runs of a pattern may hold together. They are in a file of the root, which is read
before each save, so that no save depends on the catalog.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field
from sqlalchemy import func, select

from holdfast_formats import naming
from holdfast_formats.errors import LimitExceeded, NoSuchResource
from holdfast_formats.rest.access import Quota, matches
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import OCCUPIED, CheckpointRow
from holdfast_service.control.database.visible import criterion
from holdfast_service.storage import Records
from holdfast_service.storage.map_file import MapContent, MapFile

QUOTAS_MAX = 1000
BYTES_MAX = 2**62
_Pattern = Annotated[str, Field(pattern=f"^{naming.RUN_PATTERN}$")]
_Bytes = Annotated[int, Field(ge=1, le=BYTES_MAX)]


class _File(MapContent[int]):
    entries: dict[_Pattern, _Bytes] = Field(default_factory=dict, alias="quotas")


class TeamQuotas:
    """The quotas of one root. Thread-safe."""

    def __init__(self, records: Records, database: Database) -> None:
        self._database = database
        hint = "move the file away; then an admin sets the quotas again with `holdfast quota set`"
        self._file = MapFile(records, naming.QUOTAS, _File, hint)

    def all(self) -> dict[str, int]:
        """Bytes by pattern; `CorruptManifest` if the file cannot be read, or is none."""
        return self._file.read()

    def set(self, pattern: str, quota_bytes: int) -> Quota:
        """Set the quota of a pattern of runs, in force from the next save on; nothing is removed because of it.

        Nothing is set where the used bytes are unknown: a refused request has changed nothing.
        """
        used, runs = self._counted(pattern)

        def put(quotas: dict[str, int]) -> None:
            quotas[pattern] = quota_bytes
            if len(quotas) > QUOTAS_MAX:
                raise LimitExceeded(f"there are already {QUOTAS_MAX} quotas", hint="remove one first: `holdfast quota rm`")

        self._file.change(put)
        return Quota(pattern=pattern, quota_bytes=quota_bytes, used_bytes=used, runs=runs)

    def remove(self, pattern: str) -> None:
        """`NoSuchResource` if the pattern has none."""

        def drop(quotas: dict[str, int]) -> None:
            if quotas.pop(pattern, None) is None:
                raise NoSuchResource(f"the pattern {pattern!r} has no quota", hint="list quotas with `holdfast quota ls`")

        self._file.change(drop)

    def of(self, run: str) -> dict[str, int]:
        """The quotas that a run counts against; it may be several teams'."""
        return {pattern: quota for pattern, quota in self.all().items() if matches(pattern, run)}

    def used(self, patterns: Collection[str]) -> dict[str, int]:
        """Bytes of all committed checkpoints of each pattern's runs."""
        return {pattern: self._counted(pattern)[0] for pattern in patterns}

    def usage(self) -> list[Quota]:
        """All quotas, with the used bytes."""
        quotas = []
        for pattern, quota in sorted(self.all().items()):
            used, runs = self._counted(pattern)
            quotas.append(Quota(pattern=pattern, quota_bytes=quota, used_bytes=used, runs=runs))
        return quotas

    def _counted(self, pattern: str) -> tuple[int, int]:
        total, runs = func.sum(OCCUPIED), func.count(func.distinct(CheckpointRow.run))
        with self._database.read() as session:
            used, number = session.execute(select(total, runs).where(criterion(CheckpointRow.run, pattern))).one()
        return int(used or 0), int(number or 0)
