"""launches.json of a run: git commit, command and config of its launches (docs/format.md § 9).

It is informational only. The newest launches are kept; where they are too large, fewer.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_files.opened import read_bounded
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.rest.runs import NOTES_LENGTH_MAX, OWNER_LENGTH_MAX, RunLaunch
from holdfast_formats.staging.messages import INFO_BYTES_MAX
from holdfast_formats.tags import TAGS_MAX, is_tag
from holdfast_service.storage import Records

log = logging.getLogger(__name__)

LAUNCHES_MAX = 16
FILE_BYTES_MAX = 2**20
_OWNERS = ("owner", "user")  # keys that name a run's owner; the first one present counts


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    launches: Annotated[tuple[RunLaunch, ...], Field(max_length=LAUNCHES_MAX)] = ()


class LaunchRecords:
    """The launches of a root's runs. Thread-safe."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._writing = threading.Lock()

    def note(self, run: str, run_launch: RunLaunch) -> bool:
        """Store a launch, durably; False where it is stored already. A repeated launch replaces its record."""
        with self._writing:
            known = read(self._records, run)
            if any((one.attempt, one.info) == (run_launch.attempt, run_launch.info) for one in known):
                return False
            kept = [one for one in known if one.attempt != run_launch.attempt]
            kept = sorted([*kept, run_launch], key=lambda one: one.attempt)[-LAUNCHES_MAX:]
            while len(encoded := _encode(kept)) > FILE_BYTES_MAX and len(kept) > 1:
                kept = kept[1:]
            self._records.replace(_path(run), encoded)
            return True


def read(records: Files, run: str) -> list[RunLaunch]:
    """The stored launches of a run, the newest last; empty where they cannot be read."""
    try:
        data = read_bounded(records, _path(run), FILE_BYTES_MAX)
        return [] if data is None else list(_File.model_validate_json(data).launches)
    except (ValidationError, CheckpointError) as error:
        log.error("cannot read %s: %s", _path(run), str(error)[:200])
        return []


def check(info: Mapping[str, Any]) -> str | None:
    """Why this cannot be stored; None if it can."""
    size = len(json.dumps(info))
    return f"it takes {size} bytes, over {INFO_BYTES_MAX}" if size > INFO_BYTES_MAX else None


def owner_of(launches: list[RunLaunch]) -> str | None:
    """The owner that the newest launch names."""
    info = launches[-1].info if launches else {}
    return next((text[:OWNER_LENGTH_MAX] for name in _OWNERS if isinstance(text := info.get(name), str) and text), None)


def notes_of(launches: list[RunLaunch]) -> str:
    """The notes of the newest launch."""
    notes = launches[-1].info.get("notes") if launches else None
    return notes[:NOTES_LENGTH_MAX] if isinstance(notes, str) else ""


def tags_of(launches: list[RunLaunch]) -> tuple[str, ...]:
    """The tags of the newest launch, sorted; what is not allowed as one is left out, and so are those beyond the limit."""
    tags = launches[-1].info.get("tags") if launches else None
    return tuple(sorted({tag for tag in tags if is_tag(tag)})[:TAGS_MAX]) if isinstance(tags, list) else ()


def _path(run: str) -> str:
    return f"{naming.check_run(run)}/{naming.LAUNCHES_FILE}"


def _encode(launches: list[RunLaunch]) -> bytes:
    return _File(launches=tuple(launches)).model_dump_json(indent=1).encode() + b"\n"
