"""How long deleted runs have been in the trash, in time that daemons have measured.

A wall clock that jumps must not empty the trash: by a year ahead, or from 1970 to today, on a machine without a battery. So
each look counts the time since the last one, at most an hour; at a daemon's start, at most a day.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_files.opened import read_bounded
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_service.storage import Records

log = logging.getLogger(__name__)

START_MAX_S, LOOK_MAX_S = 86_400.0, 3_600.0
FILE_BYTES_MAX = 2**24
_MOST_S = 2e11  # of any clock: the year 8307
_Seconds = Annotated[float, Field(ge=0, le=_MOST_S, allow_inf_nan=False)]


class Ages(BaseModel):
    """`.holdfast.trash.json`: when the trash was last looked at, in seconds since 1970, and the entries' ages then."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    at: _Seconds
    seconds: dict[str, _Seconds] = {}


class TrashAges:
    """The ages of one root; for one caller at a time. Of several daemons each continues from the last one's file."""

    def __init__(self, records: Records) -> None:
        self._records, self._has_looked = records, False

    def read(self) -> Ages | None:
        """As of the last look; None where there is no readable file: then ages begin again."""
        try:
            data = read_bounded(self._records, naming.RUN_TRASH_AGES, FILE_BYTES_MAX)
            return None if data is None else Ages.model_validate_json(data)
        except (ValidationError, CheckpointError) as error:
            log.error("cannot read %s: %s", naming.RUN_TRASH_AGES, str(error)[:200])
            return None

    def update(self, now: float, deleted: Mapping[str, float]) -> dict[str, float]:
        """The ages of these entries now, in seconds; `deleted` are their wall-clock times of deletion."""
        before, at = self.read(), min(max(now, 0.0), _MOST_S)
        most = LOOK_MAX_S if self._has_looked else START_MAX_S
        passed = 0.0 if before is None else min(max(at - before.at, 0.0), most)
        known = {} if before is None else before.seconds
        ages = {
            entry: min(known[entry] + passed, _MOST_S) if entry in known else min(max(at - since, 0.0), passed)
            for entry, since in deleted.items()
        }
        self._has_looked = True
        if ages or known:
            self._write(Ages(at=at, seconds=ages))
        return ages

    def _write(self, ages: Ages) -> None:
        try:
            self._records.replace(naming.RUN_TRASH_AGES, ages.model_dump_json(indent=1).encode() + b"\n")
        except CheckpointError as error:  # a full disk: what is old enough goes all the same
            log.warning("cannot write %s: %s", naming.RUN_TRASH_AGES, error.detail)
