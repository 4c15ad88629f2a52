"""Quotas of teams: how many bytes all runs of a pattern may hold together. They are in a file of the root, which is read
before each save, so that no save depends on the catalog.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import func, select

from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest, LimitExceeded, NoSuchResource, StorageFailed
from holdfast_formats.rest.access import Quota, matches
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.control.database.visible import criterion
from holdfast_service.storage import Tier

QUOTAS_MAX = 1000
BYTES_MAX = 2**62
FILE_BYTES_MAX = 2**20
_Pattern = Annotated[str, Field(pattern=f"^{naming.RUN_PATTERN}$")]
_Bytes = Annotated[int, Field(ge=1, le=BYTES_MAX)]


class _File(BaseModel):
    """The file of the root."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(default=1, ge=1, le=1)
    quotas: dict[_Pattern, _Bytes] = Field(default_factory=dict)


class TeamQuotas:
    """The quotas of one root. Thread-safe; of concurrent changes by several daemons one may be lost."""

    def __init__(self, tier: Tier, database: Database) -> None:
        self._tier, self._database = tier, database
        self._lock = threading.Lock()

    def all(self) -> dict[str, int]:
        """Bytes by pattern; `Damaged` if the file cannot be read, or is none."""
        try:
            data = self._tier.read(naming.QUOTAS, 0, FILE_BYTES_MAX + 1)
        except NoSuchResource as error:
            if "errno" not in error.members and naming.QUOTAS in self._tier.list(""):
                raise _damaged("it is not a file") from error
            return {}
        except StorageFailed as error:
            raise _damaged(error.detail) from error
        if len(data) > FILE_BYTES_MAX:
            raise _damaged(f"it has over {FILE_BYTES_MAX} bytes")
        try:
            return _File.model_validate(json.loads(data.decode(), object_pairs_hook=_once)).quotas
        except ValidationError as error:
            first = error.errors()[0]
            raise _damaged(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
        except (ValueError, RecursionError) as error:
            raise _damaged(str(error).partition("\n")[0]) from error

    def set(self, pattern: str, quota_bytes: int) -> Quota:
        """Set the quota of a pattern of runs, in force from the next save on; nothing is removed because of it.

        Nothing is set where the used bytes are unknown: a refused request has changed nothing.
        """
        used, runs = self._counted(pattern)
        self._change(lambda quotas: quotas.update({pattern: quota_bytes}))
        return Quota(pattern=pattern, quota_bytes=quota_bytes, used_bytes=used, runs=runs)

    def remove(self, pattern: str) -> None:
        """`NoSuchResource` if the pattern has none."""

        def drop(quotas: dict[str, int]) -> None:
            if quotas.pop(pattern, None) is None:
                raise NoSuchResource(f"the pattern {pattern!r} has no quota", hint="list quotas with `holdfast quota ls`")

        self._change(drop)

    def _change(self, change: Callable[[dict[str, int]], None]) -> None:
        with self._lock:
            quotas = self.all()
            change(quotas)
            if len(quotas) > QUOTAS_MAX:
                raise LimitExceeded(f"there are already {QUOTAS_MAX} quotas", hint="remove one first: `holdfast quota rm`")
            file = _File(quotas=dict(sorted(quotas.items())))
            self._tier.replace(naming.QUOTAS, (file.model_dump_json(indent=1) + "\n").encode())

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
        total, runs = func.sum(CheckpointRow.bytes), func.count(func.distinct(CheckpointRow.run))
        with self._database.read() as session:
            used, number = session.execute(select(total, runs).where(criterion(CheckpointRow.run, pattern))).one()
        return int(used or 0), int(number or 0)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(unique := dict(pairs)) != len(pairs):
        raise ValueError("a member appears twice")
    return unique


def _damaged(why: str) -> CorruptManifest:
    why = why.encode(errors="backslashreplace").decode()
    hint = "move the file away; then an admin sets the quotas again with `holdfast quota set`"
    return CorruptManifest(f"the file of quotas, {naming.QUOTAS}, cannot be read: {why}", hint=hint)
