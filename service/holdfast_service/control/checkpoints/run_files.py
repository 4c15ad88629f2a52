"""run.json, what people have set of a run: its retention policy, pins, labels, owner, notes and tags, and whether it is
archived.
docs/format.md § 9 states it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from holdfast_files.opened import read_bounded
from holdfast_formats import naming
from holdfast_formats.body import first_mistake
from holdfast_formats.errors import CorruptManifest, LimitExceeded, NoSuchRun, PreconditionFailed
from holdfast_formats.files import Files
from holdfast_formats.rest.retention import COUNT_MAX, STEPS_MAX, RetentionPolicy, Step
from holdfast_formats.rest.runs import NOTES_LENGTH_MAX, OWNER_LENGTH_MAX
from holdfast_formats.tags import TAG_PATTERN, TAGS_MAX
from holdfast_service.storage import Records

RUN_FILE_BYTES_MAX = 2**20
LABELS_MAX = 1000
PATH_MAX = 4096
SHOWN_MAX = 4096  # files that are remembered for lists
BY_LENGTH_MAX = 128
ANY_ETAG = "*"  # If-Match: whatever is there now


_Tag = Annotated[str, Field(pattern=f"^{TAG_PATTERN}$")]


class LinkDirectory(BaseModel):
    """A directory whose links keep checkpoints, and the number of the device that it was on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, Field(max_length=PATH_MAX)]
    device: Annotated[int, Field(strict=True, ge=0, le=2**64 - 1)]


class RunFile(BaseModel):
    """The content of run.json. `keep_last` is the trainer's, in force while no policy is set; it removes nothing that was
    committed by attempts before `keep_last_since`, the first to set it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    keep_last: Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)] | None = None
    keep_last_since: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] = 0
    pins: tuple[Step, ...] = ()
    labels: dict[str, tuple[Step, ...]] = {}
    policy: RetentionPolicy | None = None
    link_directories: tuple[LinkDirectory, ...] = ()
    owner: Annotated[str, Field(max_length=OWNER_LENGTH_MAX)] = ""
    notes: Annotated[str, Field(max_length=NOTES_LENGTH_MAX)] = ""
    tags: Annotated[tuple[_Tag, ...], Field(max_length=TAGS_MAX)] | None = None  # None: the trainer's
    archived: Annotated[str, Field(max_length=40)] = ""  # when
    acknowledged: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] = 0  # the attempt whose death was seen,
    acknowledged_by: Annotated[str, Field(max_length=BY_LENGTH_MAX)] = ""
    acknowledged_at: Annotated[str, Field(max_length=40)] = ""  # person and time

    _usual: RetentionPolicy = PrivateAttr(default_factory=RetentionPolicy)  # not in the file

    @property
    def in_force(self) -> RetentionPolicy:
        """The policy in force: the one that was set, else the trainer's `keep_last`, with the root's defaults."""
        if self.policy is not None:
            return self.policy
        last = None if self.keep_last is None else min(self.keep_last, COUNT_MAX)
        return self._usual.model_copy(update={"last": last})

    def with_usual(self, usual: RetentionPolicy) -> RunFile:
        """With the root's defaults for runs without a policy."""
        self._usual = usual
        return self

    @property
    def etag(self) -> str:
        """The strong validator (ETag) of the policy in force."""
        stated = f"{self.policy is not None}{self.in_force.model_dump_json()}"
        return f'"{hashlib.sha256(stated.encode()).hexdigest()[:32]}"'

    def labels_of(self, step: int) -> tuple[str, ...]:
        return tuple(sorted(label for label, steps in self.labels.items() if step in steps))


def read_run_file(records: Files, run: str) -> RunFile:
    """The content of run.json, the defaults without one; `CorruptManifest` when it cannot be read."""
    path = f"{naming.check_run(run)}/{naming.RUN_FILE}"
    try:
        data = read_bounded(records, path, RUN_FILE_BYTES_MAX)
    except CorruptManifest as error:
        raise _unreadable(path, error.detail) from error
    if data is None:
        return RunFile()
    try:
        return RunFile.model_validate_json(data)
    except ValidationError as error:
        raise _unreadable(path, first_mistake(error)) from error


def write_run_file(records: Records, run: str, file: RunFile) -> None:
    """Replace run.json, atomically and durably; `LimitExceeded` for more marks than it may hold."""
    path = f"{naming.check_run(run)}/{naming.RUN_FILE}"
    marks = max(len(file.pins), sum(map(len, file.labels.values())))
    encoded = file.model_dump_json(indent=1).encode() + b"\n"
    if marks > STEPS_MAX or len(file.labels) > LABELS_MAX or len(encoded) > RUN_FILE_BYTES_MAX:
        raise LimitExceeded(
            f"{path} would hold {marks} marks and {len(file.labels)} labels in {len(encoded)} bytes",
            hint=f"at most {STEPS_MAX} pins or labelled steps, {LABELS_MAX} labels, {RUN_FILE_BYTES_MAX} bytes: remove some",
        )
    records.replace(path, encoded)


class _Shown(NamedTuple):
    """A run's file as it was read then."""

    file: RunFile
    at: float


class RunFiles:
    """The run files of a root. Every change reads and replaces under one lock, so that none is lost.

    `elsewhere` is a lock of a run against the daemons of other nodes, if any; it yields a check that raises once it is lost.
    For a run without a directory, `is_run` says whether it exists, such as a launch that has saved nothing, and `has_saved`
    whether its newest launch has saved: then it had a directory.
    """

    def __init__(
        self,
        records: Records,
        usual: RetentionPolicy | None = None,
        *,
        is_run: Callable[[str], bool] = lambda run: True,
        has_saved: Callable[[str], bool] = lambda run: False,
        elsewhere: Callable[[str], AbstractContextManager[Callable[[], object]]] | None = None,
        shown_s: float = 0.0,
    ) -> None:
        """`usual` is the policy of runs without one of their own, besides how many are kept. `shown` reads a file again
        after `shown_s`.
        """
        self._records, self._usual = records, usual or RetentionPolicy()
        self._is_run, self._has_saved, self._elsewhere = is_run, has_saved, elsewhere or (lambda run: nullcontext(bool))
        self.changing = threading.Lock()  # held while a file is read and replaced, or removed with its run
        self._leaving: set[str] = set()  # runs that are being deleted
        self._shown_s = shown_s
        self._shown: dict[str, _Shown] = {}
        self._changes = 0

    @contextmanager
    def exclusively(self, run: str) -> Iterator[Callable[[], object]]:
        """Lock the run's file against all nodes within the block. Call what it yields before writing: this process may have
        been suspended for so long that another node has changed the file.
        """
        with self.changing, self._elsewhere(run) as still:
            try:
                yield still
            finally:
                self._forget(run)

    @contextmanager
    def leaving(self, run: str) -> Iterator[None]:
        """The run is deleted within the block: where its directory is gone, changes do not create another."""
        with self.changing:
            self._leaving.add(run)
        try:
            yield
        finally:
            with self.changing:
                self._leaving.discard(run)
                self._forget(run)

    def read(self, run: str) -> RunFile:
        return read_run_file(self._records, run).with_usual(self._usual)

    def shown(self, run: str) -> RunFile:
        """`read` for lists and pages: with all that this process has changed, and with what other nodes have changed after a
        while, where reading it costs a request.
        """
        known, changes = self._shown.get(run), self._changes
        if known is not None and time.monotonic() - known.at < self._shown_s:
            return known.file
        file = self.read(run)
        if self._shown_s and changes == self._changes:
            if len(self._shown) >= SHOWN_MAX:
                self._shown.clear()
            self._shown[run] = _Shown(file, time.monotonic())
        return file

    def _forget(self, run: str) -> None:
        self._changes += 1
        self._shown.pop(run, None)

    def change(self, run: str, act: Callable[[RunFile], RunFile]) -> RunFile:
        """Replace the run's file by what `act` makes of it; an unchanged one is not written. `NoSuchRun` if the run was
        deleted or moved away, also after the caller's check: a file would create another run of that name.
        """
        before = self.read(run)
        if act(before) == before:
            return before
        with self.exclusively(run) as still:
            self.refuse_gone(run)
            before = self.read(run)
            after = act(before)
            if after != before:
                still()
                write_run_file(self._records, run, after)
            return after

    def refuse_gone(self, run: str) -> None:
        """`NoSuchRun` if the run is gone. Call it under `exclusively`, before its file is written."""
        if self._records.list(run):
            return
        if run in self._leaving or not self._is_run(run):
            raise NoSuchRun(f"the run {run!r} was deleted in the meantime", hint="`holdfast undelete` brings it back")
        if self._has_saved(run):
            raise NoSuchRun(
                f"the directory of the run {run!r} is gone: something other than Holdfast moved or removed it",
                hint=f"put it back, or remove the run from the lists with `holdfast rm {run}`",
            )

    def set_policy(self, run: str, policy: RetentionPolicy, etag: str) -> RunFile:
        """Set the run's policy if `etag` is the validator of the one in force; else `PreconditionFailed`."""

        def act(before: RunFile) -> RunFile:
            check_etag(before, etag)
            return before.model_copy(update={"policy": policy})

        return self.change(run, act)


def check_etag(file: RunFile, header: str) -> None:
    """`PreconditionFailed` unless an If-Match header names the policy in force (RFC 9110 § 13.1.1)."""
    etags = [etag.strip() for etag in header.split(",")]
    if ANY_ETAG not in etags and file.etag not in etags:
        raise PreconditionFailed(
            "the policy has changed since it was read",
            hint="read the policy again, then send its new ETag in If-Match",
            etag=file.etag,
        )


def pinned(file: RunFile, step: int) -> RunFile:
    return file.model_copy(update={"pins": tuple(sorted({*file.pins, step}))})


def unpinned(file: RunFile, step: int) -> RunFile:
    return file.model_copy(update={"pins": tuple(s for s in file.pins if s != step)})


def labelled(file: RunFile, step: int, label: str) -> RunFile:
    steps = tuple(sorted({*file.labels.get(label, ()), step}))
    return file.model_copy(update={"labels": {**file.labels, label: steps}})


def unlabelled(file: RunFile, step: int, label: str) -> RunFile:
    left = tuple(s for s in file.labels.get(label, ()) if s != step)
    others = {name: steps for name, steps in file.labels.items() if name != label}
    return file.model_copy(update={"labels": {**others, label: left} if left else others})


def differences(before: RunFile, after: RunFile) -> Iterator[tuple[int, str, str]]:
    """The changes of pins and labels: step, a sentence, and the mark."""
    for step in sorted({*before.pins} ^ {*after.pins}):
        yield step, f"step {step} was {'pinned' if step in after.pins else 'unpinned'}", "pin"
    for label in sorted({*before.labels} | {*after.labels}):
        old, new = {*before.labels.get(label, ())}, {*after.labels.get(label, ())}
        for step in sorted(old ^ new):
            yield step, f"step {step} {'got' if step in new else 'lost'} the label {label}", f"label {label}"


def _unreadable(path: str, why: str) -> CorruptManifest:
    return CorruptManifest(
        f"cannot read {path}: {why}",
        hint="repair or remove it; a new one has no pins, labels or policy",
        file=naming.RUN_FILE,
    )
