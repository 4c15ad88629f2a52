"""The commit object of a step: the only object that makes files in a bucket a checkpoint (I8, I13; docs/format.md).

`RUN/commits/step-N` names the prefix `RUN/data/PREFIX/` that has the step's files, and the digest of their manifest. It also
names the checkpoints that this one has replaced and that are kept, so that one write replaces a checkpoint: there is no
moment at which a crash leaves a replaced checkpoint that nothing names.

It repeats what lists show of the checkpoint, so that a list of a thousand takes a small read for each. What is restored is
read from the manifest, and proven.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from holdfast_formats import decoding, lineage, naming
from holdfast_formats.errors import CorruptManifest

FORMAT = 1
COMMIT_OBJECT_BYTES_MAX = 65_536
SUMMARY_BYTES_MAX = 16_384  # of each checkpoint; without a summary its manifest is read
REPLACED_MAX = 2  # the first replaced checkpoint, and the newest
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WRITER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HINT = "Holdfast does not write such objects: repair the step from another copy, or restore another step"


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A published checkpoint: the last name of its prefix, the SHA-256 of its manifest, and what wrote it: a round, or one
    process. With the writer, a lost answer of one's own is told from another writer's equal bytes (I14). `summary` has the
    members of `rest.bodies.CheckpointInfo` that the manifest states, without those that have their defaults.
    """

    data: str
    manifest_sha256: str
    writer: str
    summary: dict[str, Any] | None = None


class CommitObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step's checkpoint, and those that it has replaced: at position K the one of `naming.replaced_place(…, K)`, None
    where there is none.
    """

    format: int
    checkpoint: Published
    replaced: tuple[Published | None, ...]

    @property
    def kept(self) -> tuple[Published, ...]:
        """All checkpoints whose files are kept, the published one first."""
        return (self.checkpoint, *(one for one in self.replaced if one is not None))


class _Stated(msgspec.Struct, frozen=True):
    """What any version of a commit object states."""

    format: int = FORMAT


_decode, _stated = decoding.decoder(CommitObject), decoding.decoder(_Stated)


def commit_object(checkpoint: Published, replaced: tuple[Published | None, ...] = ()) -> CommitObject:
    """The commit object of a checkpoint; what is None at the end of `replaced` is left out."""
    while replaced and replaced[-1] is None:
        replaced = replaced[:-1]
    return CommitObject(FORMAT, checkpoint, replaced)


def short_enough(summary: dict[str, Any]) -> dict[str, Any] | None:
    """The summary, None if it is too long for a commit object."""
    return summary if len(msgspec.json.encode(summary)) <= SUMMARY_BYTES_MAX else None


def line_of(one: Published) -> lineage.Key | None:
    """The line that the summary of a checkpoint states; None without one that does."""
    try:
        stated = None if one.summary is None else one.summary.get("rewinds", [])
        return None if stated is None else lineage.line([lineage.Rewind(*map(int, rewind)) for rewind in stated])
    except (TypeError, ValueError):
        return None


def may_name_replaced(size: int) -> bool:
    """Whether a commit object of this many bytes names replaced checkpoints, so that a list shows which ones to read."""
    return size % 2 == 0


def encode(content: CommitObject, run: str, step: int) -> bytes:
    """The bytes of the commit object at this step, one line, of a length that `may_name_replaced` understands. Raises what
    `decode` would raise, so that no object is written that cannot be read.
    """
    text = msgspec.json.encode(content)
    data = text + (b"\n" if may_name_replaced(len(text) + 1) == any(content.replaced) else b" \n")
    decode(data, run, step)
    return data


def decode(data: bytes, run: str, step: int) -> CommitObject:
    """The commit object at this step of a run; `CorruptManifest`, with its path, if it is not one, or of another step."""
    path = naming.commit_object_path(run, step)
    if len(data) > COMMIT_OBJECT_BYTES_MAX:
        raise damaged(path, f"it has over {COMMIT_OBJECT_BYTES_MAX} bytes")
    try:
        if (stated := _stated(data).format) != FORMAT:
            raise CorruptManifest(
                f"{path} has format {stated}, but this version reads format {FORMAT}",
                hint="install the version of Holdfast that wrote it",
                file=path,
                format=stated,
            )
        content = _decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise damaged(path, str(error) or "it is not a commit object") from error
    if len(content.replaced) > REPLACED_MAX:
        raise damaged(path, f"it names {len(content.replaced)} replaced checkpoints, over {REPLACED_MAX}")
    for one in content.kept:
        _check(one, path, run, step)
    return content


def damaged(path: str, why: str) -> CorruptManifest:
    """What is raised for a commit object that cannot be read."""
    return CorruptManifest(f"{path} cannot be read: {why}", hint=_HINT, file=path)


def _check(one: Published, path: str, run: str, step: int) -> None:
    place = naming.parse_data_directory(run, one.data)
    if place is None:
        raise damaged(path, f"{one.data[:80]!r} is not the name of a checkpoint's files")
    if place.step != step:
        raise damaged(path, f"it names files of step {place.step}: it was copied from another step")
    if not _SHA256.fullmatch(one.manifest_sha256) or not _WRITER.fullmatch(one.writer):
        raise damaged(path, "its digest or its writer is not as Holdfast writes them")
