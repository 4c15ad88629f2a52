"""Pins and labels, which only the run's file has, for the catalog's checkpoints; read once a request."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection

from holdfast_formats import naming
from holdfast_formats.errors import Damaged
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import check_label
from holdfast_service.control.checkpoints.run_files import RunFile, read_run_file
from holdfast_service.storage import Tier

log = logging.getLogger(__name__)


class Marks:
    """The present pins and labels of a run."""

    def __init__(self, tier: Tier, run: str) -> None:
        self._file = RunFile()
        self._problem: Damaged | None = None
        self._pins: set[int] = set()
        self._labels: defaultdict[int, list[str]] = defaultdict(list)
        if not naming.is_run_name(run):
            return  # the catalog knows no such run
        try:
            self._file = read_run_file(tier, run)
        except Damaged as error:
            self._problem = error
            log.warning("%s is listed without pins and labels: %s", run, error.detail)
        self._pins = set(self._file.pins)
        for label, steps in sorted(self._file.labels.items()):
            for step in steps:
                self._labels[step].append(label)

    def labelled(self, label: str) -> Collection[int]:
        """The steps with this label; `InvalidRequest`, or `CorruptManifest` for an unreadable file."""
        check_label(label)
        if self._problem is not None:
            raise self._problem
        return self._file.labels.get(label, ())

    def on(self, checkpoint: bodies.CheckpointInfo) -> bodies.CheckpointInfo:
        pinned, labels = checkpoint.step in self._pins, self._labels.get(checkpoint.step, [])
        return checkpoint.model_copy(update={"pinned": pinned, "labels": labels}) if pinned or labels else checkpoint
