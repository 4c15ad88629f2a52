"""A named map in a file of the root, such as quotas by pattern. It is read and replaced as a whole."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_formats.body import first_mistake
from holdfast_formats.errors import CorruptManifest, InUse, NoSuchResource, StorageFailed

from .records import Records

FILE_BYTES_MAX = 2**20
WAIT_S, RETRY_S = 5.0, 0.01  # for a change by another daemon

Entry = TypeVar("Entry")


class MapContent(BaseModel, Generic[Entry]):
    """The content of the file. A subclass gives `entries` their alias in the file, and the types of names and entries."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(default=1, ge=1, le=1)
    entries: dict[str, Entry]


class MapFile(Generic[Entry]):
    """The map of one root. Thread-safe; of changes at the same time, also by several daemons, none is lost."""

    def __init__(self, records: Records, path: str, content: type[MapContent[Entry]], hint: str) -> None:
        """`hint` says what to do about a damaged file."""
        self._records, self._path, self._content, self._hint = records, path, content, hint
        self._lock = threading.Lock()

    def read(self) -> dict[str, Entry]:
        """Entries by name, none without a file; `CorruptManifest` if the file cannot be read, or is not a file."""
        data = self._bytes()
        return {} if data is None else self._parse(data)

    def _bytes(self) -> bytes | None:
        try:
            return self._records.read(self._path, 0, FILE_BYTES_MAX + 1)
        except NoSuchResource as error:
            if "errno" not in error.members and self._path in self._records.list(""):
                raise self._damaged("it is not a file") from error
            return None
        except StorageFailed as error:
            raise self._damaged(error.detail) from error

    def change(self, act: Callable[[dict[str, Entry]], object]) -> None:
        """Replace the file after `act` has changed the entries; durable when this returns. `act` is called again where
        another daemon changes the file at the same time. `CorruptManifest` leaves a damaged file as it is; `InUse` if other
        daemons have been changing it for five seconds.
        """
        until = time.monotonic() + WAIT_S
        with self._lock:
            while True:
                before = self._bytes()
                entries = {} if before is None else self._parse(before)
                act(entries)
                late = time.monotonic() > until
                try:
                    if self._records.swap(self._path, before, self._encode(entries)):
                        return
                except InUse:
                    if late:
                        raise
                if late:
                    raise InUse(f"other daemons keep changing {self._path}", hint="try again in a moment")
                time.sleep(RETRY_S)

    def _encode(self, entries: dict[str, Entry]) -> bytes:
        content = self._content.model_construct(entries=dict(sorted(entries.items())))
        data = (content.model_dump_json(indent=1, by_alias=True) + "\n").encode()
        self._parse(data)
        return data

    def _parse(self, data: bytes) -> dict[str, Entry]:
        if len(data) > FILE_BYTES_MAX:
            raise self._damaged(f"it has over {FILE_BYTES_MAX} bytes")
        try:
            return self._content.model_validate(json.loads(data.decode(), object_pairs_hook=_once)).entries
        except ValidationError as error:
            raise self._damaged(first_mistake(error)) from error
        except (ValueError, RecursionError) as error:
            raise self._damaged(str(error).partition("\n")[0]) from error

    def _damaged(self, why: str) -> CorruptManifest:
        why = why.encode(errors="backslashreplace").decode()
        return CorruptManifest(f"{self._path} cannot be read: {why}", hint=self._hint)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(unique := dict(pairs)) != len(pairs):
        raise ValueError("a member appears twice")
    return unique
