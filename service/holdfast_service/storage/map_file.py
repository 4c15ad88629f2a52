"""A named map in a file of the root, such as quotas by pattern. It is read and replaced as a whole."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_formats.body import first_mistake
from holdfast_formats.errors import CorruptManifest, InUse, NoSuchResource, StorageFailed

from .tier import Tier

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

    def __init__(self, tier: Tier, path: str, content: type[MapContent[Entry]], hint: str) -> None:
        """`hint` says what to do about a damaged file."""
        self._tier, self._path, self._content, self._hint = tier, path, content, hint
        self._lock = threading.Lock()

    def read(self) -> dict[str, Entry]:
        """Entries by name, none without a file; `CorruptManifest` if the file cannot be read, or is not a file."""
        try:
            data = self._tier.read(self._path, 0, FILE_BYTES_MAX + 1)
        except NoSuchResource as error:
            if "errno" not in error.members and self._path in self._tier.list(""):
                raise self._damaged("it is not a file") from error
            return {}
        except StorageFailed as error:
            raise self._damaged(error.detail) from error
        return self._parse(data)

    def change(self, act: Callable[[dict[str, Entry]], object]) -> None:
        """Replace the file after `act` has changed the entries; durable when this returns. `CorruptManifest` leaves a
        damaged file as it is; `InUse` if another daemon has been changing it for five seconds.
        """
        with self._exclusively():
            entries = self.read()
            act(entries)
            content = self._content.model_construct(entries=dict(sorted(entries.items())))
            data = (content.model_dump_json(indent=1, by_alias=True) + "\n").encode()
            self._parse(data)
            self._tier.replace(self._path, data)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        until = time.monotonic() + WAIT_S
        with self._lock, ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._tier.hold(f"{self._path}.lock"))
                    break
                except InUse:
                    if time.monotonic() > until:
                        raise
                    time.sleep(RETRY_S)
            yield

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
