"""Names on disk: checkpoint ids <-> directory names, and every fixed file name. The only parser of either."""

from __future__ import annotations

import re
import uuid
from pathlib import PurePosixPath
from typing import NamedTuple

from .errors import InvalidRequest

COMMIT = "COMMIT"
MANIFEST = "manifest.json"
STATE = "state.json"
RUN_FILE = "run.json"
LAUNCHES_FILE = "launches.json"  # metadata of launches from trainers
CHECKPOINTS = "checkpoints"
STAGING = "staging"
TRASH = "trash"
RECEIPTS = "receipts"
COMMITS = "commits"  # of a run in a bucket: an object a step, which names the step's files
DATA = "data"  # of a run in a bucket: the files of its checkpoints, and of saves that are under way
LINES = "lines"  # of a run in a bucket: an empty object a prefix of files, whose name says the line of its checkpoint
LOCK = ".holdfast.lock"
DAEMON_FILE = ".holdfast.json"  # where the daemon that serves this root can be reached
ATTEMPTS = ".holdfast.attempts.json"  # the declared attempts of its runs
CLAIMS = ".holdfast.claims"  # the attempts that the daemons of several nodes have given out
ROOT_FILE = ".holdfast.root"  # the root's id
OWNER = ".holdfast.owner"  # in a bucket: the daemon that serves it without others
RUN_TRASH = ".holdfast.trash"  # deleted runs, which can be brought back
RUN_TRASH_AGES = ".holdfast.trash.json"  # for how long they have been there
RENAMING = ".holdfast.renaming"  # runs under new names, until they are complete
RENAMED_FILE = "renamed.json"  # in a run with a new name, until the old one is gone
DELETED_FILE = "deleted.json"  # in a run that is there, or is about to be
QUOTAS = ".holdfast.quotas.json"  # how much the runs of each team may hold together
VIEWS = ".holdfast.views.json"  # saved views of the overview
CATALOG = "catalog.sqlite"

STEP_MAX = 10**15 - 1
_PROGRESS = ".progress"
_GONE = "~gone"
_LINKING = ".holdfast-link"
ATTEMPT_MAX = 10**9 - 1
ROUND_ID_MAX = 10**18 - 1
_COPIES = 10**6  # of one checkpoint
REPLACED_ATTEMPT = ATTEMPT_MAX - 1  # in the name of a checkpoint that was replaced by another one of its step
NO_ATTEMPT = ATTEMPT_MAX  # in the staging name of a copy or a repair: no launch reaches this number, and a sweep knows it
RUN_CHARACTERS = f"1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter or digit, and not with {CATALOG}"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A run's name, a prefix ending in *, or * for all.
RUN_PATTERN = r"([A-Za-z0-9][A-Za-z0-9._-]{0,127}|[A-Za-z0-9][A-Za-z0-9._-]{0,126}\*|\*)"
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_NODE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_ATTEMPTS_FILE = re.compile(rf"\.holdfast\.attempts@({_NODE})\.json")
_DAEMON_FILE = re.compile(rf"\.holdfast@({_NODE})\.json")
_STEP_DIRECTORY = re.compile(r"step-(\d{8,15})")
_LINE_MARK = re.compile(r"(.+)~(0|[1-9]\d{0,18})\.(0|[1-9]\d{0,18})")
_STAGING_DIRECTORY = re.compile(r"step-(\d{8,15})\.a(\d{1,9})(?:\.r([1-9]\d{0,17}))?")
_OF_TENSORS = (".safetensors", ".safetensors.index.json")
_RESERVED_FILES = frozenset({COMMIT, MANIFEST, STATE, RECEIPTS})


class CheckpointId(NamedTuple):
    """A checkpoint by its run and step; its text is RUN@STEP."""

    run: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


class StagingName(NamedTuple):
    step: int
    attempt: int
    round_id: int = 0  # of what several nodes write together


class Place(NamedTuple):
    """Where one try to save a step keeps its files until they are published. With several nodes it names their round, so
    files written for an ended round are in a place that is never published (I11).
    """

    run: str
    step: int
    attempt: int
    round_id: int = 0

    @property
    def path(self) -> str:
        return staging_path(*self)


class LineMark(NamedTuple):
    """The place of a checkpoint's files in a bucket, and the line that the checkpoint is on."""

    place: Place
    line: tuple[int, int]


def check_run(run: str) -> str:
    """Return the run name; `InvalidRequest` if it is not a valid directory name on every system."""
    if not isinstance(run, str) or not is_run_name(run):
        raise InvalidRequest(f"run name {run!r} is not allowed", hint=f"use {RUN_CHARACTERS}")
    return run


def is_run_name(name: str) -> bool:
    """Whether a run may have this name: a valid directory name on every system, and not the catalog's."""
    return _RUN.fullmatch(name) is not None and not name.startswith(CATALOG)


def check_group(group: str) -> str:
    """Return the group name, or raise `InvalidRequest`: groups become file names."""
    if not _GROUP.fullmatch(group):
        raise InvalidRequest(
            f"group name {group!r} is not allowed", hint="use 1 to 64 of a-z 0-9 _, beginning with a letter"
        )
    return group


def check_step(step: int) -> int:
    """Return the step, or raise `InvalidRequest`."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        raise InvalidRequest(f"step must be a whole number from 0 to {STEP_MAX}, not {step!r}")
    return step


def check_asset(name: str) -> str:
    """Return the asset's file name; `InvalidRequest` if it is a path or a name that the format uses."""
    if not is_asset_name(name):
        raise InvalidRequest(
            f"asset name {name!r} is not allowed", hint="use a plain file name that the format does not reserve"
        )
    return name


def is_asset_name(name: str) -> bool:
    """Whether an asset may have this name: a plain one that the format does not use itself."""
    return is_file_name(name) and name not in _RESERVED_FILES and not name.endswith(_OF_TENSORS)


def is_file_name(name: str) -> bool:
    """Whether this is a plain file name (no path, not hidden), as allowed in a checkpoint."""
    return _FILE.fullmatch(name) is not None


def step_directory(step: int) -> str:
    return f"step-{check_step(step):08d}"


def parse_step_directory(name: str) -> int | None:
    """The step of a checkpoint's directory; None unless the name is exactly as `step_directory` makes it."""
    match = _STEP_DIRECTORY.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step_directory(step) == name else None


def linked_step(run: str, target: str) -> int | None:
    """The step to whose directory a link with this target leads, in any root with such a run; None for other links."""
    parts = PurePosixPath(target).parts[-3:]
    step = parse_step_directory(parts[-1]) if parts else None
    return step if step is not None and parts == PurePosixPath(checkpoint_path(run, step)).parts else None


def link_in_the_making(name: str) -> str:
    """The temporary name of a link until it replaces an old one."""
    return f".{name}.{uuid.uuid4().hex}{_LINKING}"


def is_link_in_the_making(name: str) -> bool:
    """Whether a link has a temporary name: one left by a killed process keeps no checkpoint."""
    return name.startswith(".") and name.endswith(_LINKING)


def staging_directory(step: int, attempt: int, round_id: int = 0) -> str:
    """`step-N.aK`, and `.rR` where several nodes write one round together."""
    if not 0 <= attempt <= ATTEMPT_MAX:
        raise InvalidRequest(f"attempt must be from 0 to {ATTEMPT_MAX}, not {attempt}")
    if not 0 <= round_id <= ROUND_ID_MAX:
        raise InvalidRequest(f"round must be from 0 to {ROUND_ID_MAX}, not {round_id}")
    return f"{step_directory(step)}.a{attempt}" + (f".r{round_id}" if round_id else "")


def parse_staging_directory(name: str) -> StagingName | None:
    match = _STAGING_DIRECTORY.fullmatch(name)
    parsed = StagingName(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
    return parsed if parsed is not None and staging_directory(*parsed) == name else None


def commit_object_path(run: str, step: int) -> str:
    """The key of the object that makes a step of a run in a bucket a checkpoint, relative to the root."""
    return f"{check_run(run)}/{COMMITS}/{step_directory(step)}"


def data_path(place: Place) -> str:
    """The prefix of a place's files in a bucket, relative to the root. The place has a round, or a number in its stead."""
    return f"{check_run(place.run)}/{DATA}/{data_directory(place)}"


def data_directory(place: Place) -> str:
    """The last name of `data_path`."""
    if not place.round_id:
        raise InvalidRequest(f"files of step {place.step} in a bucket need a round, or a number in its stead")
    return staging_directory(*place[1:])


def parse_data_directory(run: str, name: str) -> Place | None:
    """The place of a name that `data_directory` made; None for any other name."""
    parsed = parse_staging_directory(name)
    return Place(run, *parsed) if parsed is not None and parsed.round_id else None


def line_mark(run: str, data: str, line: tuple[int, int]) -> str:
    """The key of the object that says on which line a checkpoint with these files is, by attempt and turn."""
    return f"{line_marks(run, data)}{line[0]}.{line[1]}"


def line_marks(run: str, data: str = "") -> str:
    """What the keys of the marks of these files, or of all of a run, begin with."""
    return f"{check_run(run)}/{LINES}/" + (f"{data}~" if data else "")


def parse_line_mark(run: str, name: str) -> LineMark | None:
    """Files and line of a name below `line_marks(run)`; None for any other name."""
    match = _LINE_MARK.fullmatch(name)
    place = parse_data_directory(run, match[1]) if match else None
    return None if match is None or place is None else LineMark(place, (int(match[2]), int(match[3])))


def shard_file_name(group: str, position: int, count: int) -> str:
    """`model.safetensors` if one file holds the group, else Hugging Face's `model-00001-of-00004.safetensors`."""
    check_group(group)
    return f"{group}.safetensors" if count == 1 else f"{group}-{position + 1:05d}-of-{count:05d}.safetensors"


def index_file_name(group: str) -> str:
    return f"{check_group(group)}.safetensors.index.json"


def job_place(run: str, step: int, digest: str = "") -> Place:
    """Where a job stages a checkpoint that it makes of other files. `digest` identifies the work of a job that can be
    resumed; without one the place is like no other.
    """
    return Place(run, step, NO_ATTEMPT, int(digest or uuid.uuid4().hex, 16) % ROUND_ID_MAX + 1)


def copy_place(run: str, step: int, manifest_sha256: str) -> Place:
    """Where a copy of the checkpoint with this manifest is staged. No two are alike: a removal that reaches a bucket late
    finds nothing of a later copy.
    """
    return Place(run, step, NO_ATTEMPT, _copy_number(manifest_sha256) * _COPIES + uuid.uuid4().int % _COPIES)


def is_copy_of(place: Place, manifest_sha256: str) -> bool:
    """Whether `copy_place` made this place for the checkpoint with this manifest; one in 10^12 others is taken for it."""
    return is_job_place(place) and place.round_id // _COPIES == _copy_number(manifest_sha256)


def _copy_number(manifest_sha256: str) -> int:
    return int(manifest_sha256, 16) % (ROUND_ID_MAX // _COPIES) + 1


def is_job_place(place: Place | StagingName) -> bool:
    """Whether a job stages there, which may be one that can be resumed."""
    return place.attempt == NO_ATTEMPT and place.round_id > 0


def progress_path(staging: str) -> str:
    """The record of a staging directory's finished files: beside it, since all of the directory is published."""
    return f"{staging}{_PROGRESS}"


def without_progress(name: str) -> str:
    """The staging directory of a name: itself, or the one of a progress record."""
    return name.removesuffix(_PROGRESS)


def checkpoint_path(run: str, step: int) -> str:
    """The path of a committed checkpoint, relative to the root."""
    return f"{check_run(run)}/{CHECKPOINTS}/{step_directory(step)}"


def trash_entry(run: str, deleted_ms: int) -> str:
    """The name in `RUN_TRASH` of a run that was deleted then, in milliseconds since 1970."""
    return f"{check_run(run)}@{deleted_ms}"


def parse_trash_entry(name: str) -> tuple[str, int] | None:
    """Which run this is, and when it was deleted; None for anything else."""
    run, at, deleted = name.rpartition("@")
    if not at or not is_run_name(run) or not re.fullmatch("[0-9]{1,15}", deleted):
        return None
    return run, int(deleted)


def purged_entry(name: str) -> str:
    """The name of an entry of `RUN_TRASH` during its final removal: it cannot be restored any more."""
    return f"{name}{_GONE}"


def is_purged_entry(name: str) -> bool:
    return name.endswith(_GONE) and parse_trash_entry(name.removesuffix(_GONE)) is not None


def export_staging(name: str) -> str:
    """The directory beside an export's target in which it is staged."""
    return f".{name}.partial"


def export_lock(name: str) -> str:
    """The file beside an export's target that is locked during the export."""
    return f".{name}.lock"


def staging_path(run: str, step: int, attempt: int, round_id: int = 0) -> str:
    """The path of an attempt's files for a step before they are published, relative to the root."""
    return f"{check_run(run)}/{STAGING}/{staging_directory(step, attempt, round_id)}"


def replaced_place(run: str, step: int, number: int = 0) -> Place:
    """The place of a checkpoint that was replaced by another one of its step, until that one is verified. The next number is
    for one that was replaced before its own verification.
    """
    return Place(run, step, REPLACED_ATTEMPT, number)


def replaced_path(run: str, step: int) -> str:
    return replaced_place(run, step).path


def attempts_file(node: str) -> str:
    """One daemon's record of attempts, if several share a root."""
    return f".holdfast.attempts@{node}.json"


def parse_attempts_file(name: str) -> str | None:
    """The node of an attempts file; None for any other file."""
    match = _ATTEMPTS_FILE.fullmatch(name)
    return match[1] if match else None


def claim_file(run: str, attempt: int) -> str:
    """The file, in a root of several daemons, whose creator has assigned this attempt's number exclusively."""
    return f"{CLAIMS}/{check_run(run)}@{attempt}"


def parse_claim_file(name: str) -> tuple[str, int] | None:
    """Run and attempt of a claim, by its name in `CLAIMS`; None for any other file."""
    run, at, attempt = name.rpartition("@")
    if not at or not is_run_name(run) or not re.fullmatch("[1-9][0-9]{0,18}", attempt):
        return None
    return run, int(attempt)


def answer_file(run: str, attempt: int, turn: int) -> str:
    """The file, in a root of several daemons, with the answer to all ranks of an attempt about their `turn`-th restore."""
    return f"{claim_file(run, attempt)}~{turn}"


def parse_answer_file(name: str) -> tuple[str, int, int] | None:
    """Run, attempt and turn of an answer, by its name in `CLAIMS`; None for any other file."""
    claim, at, turn = name.rpartition("~")
    claim_file = parse_claim_file(claim)
    return (*claim_file, int(turn)) if at and claim_file is not None and re.fullmatch("0|[1-9][0-9]{0,18}", turn) else None


def daemon_file(node: str) -> str:
    """The connection data of a daemon, if several share a root."""
    return f".holdfast@{node}.json"


def node_lock(node: str) -> str:
    """A daemon's lock, if several share a root: only one daemon of a machine has the name."""
    return f".holdfast@{node}.lock"


def parse_daemon_file(name: str) -> str | None:
    """The node of a daemon file, "" for a root's only daemon; None for any other file."""
    if name == DAEMON_FILE:
        return ""
    match = _DAEMON_FILE.fullmatch(name)
    return match[1] if match else None


def socket_id(inode: int, changed_ns: int) -> str:
    """Distinguishes a daemon's socket from one at the same path on another machine; the same through bind mounts."""
    return f"{inode}-{changed_ns}"
