"""A directory with exports of a run: the old ones are removed there, if they still are what was exported."""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LEDGER = ".holdfast-exports.json"  # the sizes of each export's files, by run and step


class ExportPlace:
    """The exports checkpoint-N of one run in a directory that may have anything else, also those of other runs.

    An export counts once it is noted. Every step's directory is compared with its note before it is removed.
    """

    def __init__(self, directory: str, run: str) -> None:
        self._directory, self._run = Path(directory), run

    def path(self, step: int) -> Path:
        return self._directory / f"checkpoint-{step}"

    def note(self, step: int) -> None:
        self._write(self._noted() | {step: _sizes(self.path(step))})

    def rotate(self, limit: int, best: int | None) -> None:
        """Remove the oldest exports beyond the limit, except the newest and the best."""
        noted = {step: sizes for step, sizes in self._noted().items() if self.path(step).is_dir()}
        kept = {max(noted, default=0), best} & noted.keys()
        others = sorted(noted.keys() - kept)
        surplus = others[: max(len(noted) - max(limit, len(kept)), 0)]
        for step in surplus:
            path = self.path(step)
            if path.is_symlink() or _sizes(path) != noted[step]:
                log.warning("%s is no longer what was exported, and stays", path)
            else:
                log.info("removing the export %s", path)
                shutil.rmtree(path)
        if surplus:
            self._write({step: sizes for step, sizes in noted.items() if step not in surplus})

    def _noted(self) -> dict[int, dict[str, int]]:
        found = self._ledger().get(self._run)
        return {int(step): sizes for step, sizes in found.items()} if isinstance(found, dict) else {}

    def _ledger(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            ledger = json.loads((self._directory / LEDGER).read_text())
            return ledger if isinstance(ledger, dict) else {}
        return {}

    def _write(self, noted: dict[int, dict[str, int]]) -> None:
        (self._directory / LEDGER).write_text(json.dumps(self._ledger() | {self._run: noted}, indent=1))


def _sizes(directory: Path) -> dict[str, int]:
    """The size of every file below, by its path; -1 for what is no plain file."""
    found: dict[str, int] = {}
    for place, directories, names in os.walk(directory):
        for path in (Path(place, name) for name in (*names, *directories)):
            if path.is_symlink() or not path.is_dir():
                plain = path.is_file() and not path.is_symlink()
                found[str(path.relative_to(directory))] = path.stat().st_size if plain else -1
    return found
