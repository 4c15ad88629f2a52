"""A bucket as a store of checkpoints: files below `RUN/data/PREFIX/`, published by the commit object `RUN/commits/step-N`.

The commit object is the only arbiter (I13). It is put last, when all else is there, and removed first (I8). No prefix is
used twice: it has the round's id, or a random number where a place has no round; so a place without a round is known to the
store alone that began it. Every doubtful answer is settled by reading back (I14), which compares the whole commit object.

What a crash leaves, after each write of a commit and of a removal:

| last write | what stands | what removes the rest |
|---|---|---|
| parts of an upload | the checkpoint before, if any | `sweep` aborts the upload, unless its place is live: a copy goes on |
| files, small files, manifest, COMMIT, mark | the checkpoint before | `sweep`: no commit object names the prefix |
| commit object, new or in place of another | the new checkpoint, whose commit object names what it replaced | `release` |
| removal: commit object deleted | nothing | `sweep` |
| discarded round: fence, some of its files | nothing | `sweep` |

A replaced checkpoint is named by the commit object of the one in its place (`CommitObject.replaced`), so that one write
replaces, releases or takes back. Commit objects are replaced only under the lock of the run, and by their tag.

Files cannot be removed at one moment, as a rename does it. So the files of a round are removed behind a fence, an object
beside its prefix, and a committer that finds the fence, or no file, after it has published withdraws that.

Beside its files, a checkpoint has an empty object whose name says its line, so that a reader finds the newest checkpoint of
the living line without reading all commit objects. It is put before the commit object, and removed with the files. So what
a commit object names has its mark, and a step with one mark has that one's line; marks of files that are not published, or
that are kept because they were replaced, make it two. A mark alone means nothing.

`shares_files` is False: parts of an object have at least 5 MiB and are put together by one request, so that nodes would have
to agree on parts and on the id of the upload. The planner gives whole files to nodes.

`stamps` are ETags of commit objects: files below a prefix do not change once they are published. A file that is overwritten
by hand is found by verification alone.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from holdfast_files.objects import commit_objects
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.commit_objects import Published, commit_object
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_formats import lineage, naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import (
    CheckpointError,
    CorruptManifest,
    Damaged,
    NoSuchCheckpoint,
    NoSuchResource,
    StorageFailed,
)
from holdfast_formats.naming import CheckpointId, Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.bodies import CheckpointInfo
from holdfast_service.storage.store import Alone, CommitContents, Publication
from holdfast_service.storage.tier import FileIdentity

from .conditional_puts import ConditionalPuts
from .object_sweep import Sweep, job_places
from .prefixes import erase_data, exists, fence_of, has_objects
from .staged_objects import StagedObjects, StoredObjects
from .step_commits import Standing, StepCommits, data_of
from .trashed_runs import Confirm, TrashedRuns
from .unfinished_uploads import erase_staged
from .uploads import RETRY_S, Uploads

REPLACEMENTS_MAX = 4  # tries, each after another writer has changed the commit object
HEADS_AT_ONCE = 16
_PUBLISHED = Publication("published")

log = logging.getLogger(__name__)


class ObjectStore:
    """The checkpoints of a root in a bucket. Safe for threads."""

    shares_files = False

    def __init__(
        self, uploads: Uploads, puts: ConditionalPuts, files: ObjectFiles | None = None, confirm: Confirm | None = None
    ) -> None:
        """`files` are the root's, where others read them too: what this store changes is read again there. `confirm` raises
        if this process may not remove anything any more, because another daemon has the root.
        """
        self._confirm = confirm or (lambda: None)
        self._uploads, self._bucket, self._patient, self._puts = uploads, uploads.bucket, uploads.patient, puts
        self._writer = secrets.token_hex(8)  # of this process, in commit objects of places without a round
        self._committed = files or ObjectFiles(self._bucket)
        self._commits = StepCommits(self._bucket, puts, self._committed)
        self._trash = TrashedRuns(self._bucket, puts, self._confirm)
        self._begun: dict[Place, StagedObjects] = {}  # places without a round
        self._lock = threading.Lock()
        self.files = StoredObjects(self._committed, self._prefix)

    def begin(self, place: Place) -> StagedObjects:
        naming.staging_path(*place)
        if place.round_id:
            return self._staged(place, place)
        self.discard(place)
        staged = self._staged(place, place._replace(round_id=10**17 + secrets.randbelow(9 * 10**17)))
        with self._lock:
            self._begun[place] = staged
        return staged

    def receipts(self, place: Place) -> list[bytes]:
        naming.staging_path(*place)
        begun = self._begun.get(place)
        return [] if begun is None else list(begun.receipts.values())

    def commit(self, place: Place, contents: CommitContents, over: bool = False) -> Publication:
        prefix = self._prefix(place)
        standing = self._commits.standing(_id(place))
        mine, mark = _offered(place, prefix or "", contents.manifest, contents.commit, self._writer)
        answer = _answer(standing, mine, over)
        if answer is None:
            missing = f"{place.path} was not begun here" if prefix is None else self._missing(place, prefix, contents)
            if prefix is None or missing:
                return Publication("gone", missing)
            answer = self._complete(place, prefix, contents)
            answer = answer or self._publish(place, _Offered(mine, mark), contents, _Wish(standing, over))
        if answer.outcome == "published":
            self._end(place)
        return answer

    def mend(self, place: Place, manifest: bytes, commit: bytes) -> None:
        """Copies the files that are not staged into the place, on the server, and publishes it in place of the old one."""
        prefix, which = self._prefix(place), _id(place)
        standing = self._commits.standing(which)
        if standing is None:
            raise _no_checkpoint(*which)
        old = standing.checkpoint
        if old is None:
            raise commit_objects.damaged(naming.commit_object_path(*which), "a repair needs to know its files")
        if prefix is None or standing.names(_name(prefix)):
            raise StorageFailed(f"nothing is staged at {place.path}", path=place.path)
        staged = {naming.MANIFEST, naming.COMMIT, *self._committed.list(prefix)}
        for page in self._bucket.pages(f"{data_of(place.run, old)}/"):
            for one in page.objects:
                name = _name(one.key)
                if name not in staged:
                    self._patient.copy(one.key, f"{prefix}/{name}", one.size)
                    _check_size(self._bucket, f"{prefix}/{name}", one.size)
        self._patient.put(f"{prefix}/{naming.MANIFEST}", manifest)
        self._patient.put(f"{prefix}/{naming.COMMIT}", commit)
        mine, mark = _offered(place, prefix, manifest, commit, self._writer)
        self._commits.mark(mark)
        self._commits.change(which, commit_object(mine, standing.replaced), standing)
        self._end(place)
        _erase_unneeded(self._bucket, place.run, old)

    def steps(self, run: str) -> list[int]:
        return list(self._commits.listed(run))

    def described(self, run: str, steps: Collection[int]) -> dict[int, CheckpointInfo]:
        return self._commits.described(run, steps)

    def stamps(self, run: str, step: int | None = None) -> dict[int, str]:
        if step is not None:
            found = self._bucket.head(naming.commit_object_path(run, step))
            return {} if found is None else {step: found.etag}
        return dict(self._commits.listed(run))

    def identities(self, path: str) -> dict[str, FileIdentity]:
        return {}  # what is taken from a checkpoint is copied

    def discard(self, place: Place) -> None:
        """What is published, or kept because it was replaced, stays; and what a damaged commit object may name."""
        prefix = self._prefix(place)
        if prefix is None:
            return
        self._throw_away(place, prefix)
        self._end(place)

    def replaced(self, run: str) -> list[Place]:
        found = []
        for step, content in self._commits.replacing(run).items():
            kept = enumerate(content.replaced)
            found += [naming.replaced_place(run, step, number) for number, one in kept if one is not None]
        return sorted(found, reverse=True)

    def release(self, place: Place) -> str | None:
        standing = self._commits.standing(_id(place))
        one = None if standing is None else standing.replaced_at(place)
        if standing is None or standing.checkpoint is None or one is None:
            return None
        self._commits.change(_id(place), commit_object(standing.checkpoint, standing.without(place)), standing)
        return data_of(place.run, one)

    def take_back(self, place: Place) -> str | None:
        standing = self._commits.standing(_id(place))
        one = None if standing is None else standing.replaced_at(place)
        if standing is None or standing.checkpoint is None or one is None:
            raise NoSuchResource(f"{place.path} is gone", path=place.path)
        gone = data_of(place.run, standing.checkpoint)
        self._commits.change(_id(place), commit_object(one, standing.without(place)), standing)
        return gone if has_objects(self._bucket, gone) else None

    def remove(self, run: str, step: int) -> str:
        """Returns the commit object, with its path, which `bring_back` puts again."""
        which = CheckpointId(run, step)
        standing = self._commits.standing(which)
        if standing is None:
            raise _no_checkpoint(run, step)
        self._confirm()
        self._commits.delete(which)
        encoded = b"unreadable" if standing.content is None else commit_objects.encode(standing.content, run, step)
        return f"{naming.commit_object_path(run, step)} {encoded.decode().strip()}"

    def bring_back(self, run: str, step: int, removed: str) -> bool:
        content = commit_objects.decode(removed.partition(" ")[2].encode(), run, step)
        done = self._commits.put(CheckpointId(run, step), content, None)
        if done.outcome == "unknown":
            raise StorageFailed(f"step {step} of {run} may not be back: {done.detail}")
        return done.outcome == "done"

    def free(self, removed: str) -> None:
        self._confirm()
        for run, data, marks in _removed_data(removed):
            self._erase_removed(run, data, marks)

    def _erase_removed(self, run: str, data: str, marks: list[str] | None = None) -> None:
        place = naming.parse_data_directory(run, data)
        assert place is not None
        standing = self._commits.standing(_id(place))
        if standing is None or not standing.may_name(data):  # a job may have made it again
            erase_data(self._bucket, naming.data_path(place), marks)

    def put_away(self, run: str, entry: str) -> None:
        self._trash.put_away(run, entry)
        self._commits.forget_all()

    def take_out(self, entry: str, run: str) -> None:
        self._trash.take_out(entry, run)
        self._commits.forget_all()

    def purge(self, entry: str) -> bool:
        return self._trash.purge(entry)

    def free_purged(self) -> list[tuple[str, CheckpointError]]:
        return self._trash.free_purged()

    def free_bytes(self) -> int | None:
        return None

    def put_back(self, alone: Alone) -> list[str]:
        """Replacements need no repair, since one write replaces; moves of whole runs are finished."""
        return self._trash.finish_moves(alone)

    def sweep(self, live: Collection[Place] = (), idle_s: float | None = None) -> list[str]:
        for place in live:
            naming.staging_path(*place)
        sweep = Sweep(self._bucket, self._commits, self._trash)
        removed = []
        for place, prefix in sweep.found(live, idle_s):
            self._confirm()
            if self._throw_away(place, prefix):
                removed.append(prefix)
        return removed

    def job_places(self, run: str) -> list[Place]:
        return job_places(self._bucket, run)

    def _staged(self, place: Place, stored_at: Place) -> StagedObjects:
        return StagedObjects(place, naming.data_path(stored_at), self._uploads, self.files, self._commits)

    def _prefix(self, place: Place) -> str | None:
        """The prefix of a place's files; None for one without a round that this store has not begun, and for a replaced
        checkpoint that is gone.
        """
        naming.staging_path(*place)
        if place.attempt == naming.REPLACED_ATTEMPT:
            standing = self._commits.standing(_id(place))
            one = None if standing is None else standing.replaced_at(place)
            return None if one is None else data_of(place.run, one)
        if place.round_id:
            return naming.data_path(place)
        begun = self._begun.get(place)
        return None if begun is None else begun.prefix

    def _missing(self, place: Place, prefix: str, contents: CommitContents) -> str:
        """Which staged file is not there as it was written; empty if all are (I20). What this process has asked for since it
        put it together is not asked for again, where nothing else can remove it.
        """
        begun = self._begun.get(place)
        unseen = {n: size for n, size in contents.staged.items() if begun is None or not begun.has_seen(n, size)}
        with ThreadPoolExecutor(min(HEADS_AT_ONCE, max(len(unseen), 1)), "holdfast-head") as pool:
            found = pool.map(self._patient.head, [f"{prefix}/{name}" for name in unseen])
            for (name, size), one in zip(unseen.items(), found, strict=True):
                if one is None or one.size != size:
                    stands = "is not there" if one is None else f"has {one.size} bytes"
                    return f"{prefix}/{name} {stands}, but {size} were written"
        return ""

    def _complete(self, place: Place, prefix: str, contents: CommitContents) -> Publication | None:
        """Add the small files, the manifest, and COMMIT last (I3). `gone` if another committer of the round has added other
        bytes, which stay.
        """
        added = {**contents.small, naming.MANIFEST: contents.manifest, naming.COMMIT: contents.commit}
        for name, data in added.items():
            key = f"{prefix}/{name}"
            if not place.round_id or naming.is_job_place(place):  # one writer
                self._patient.put(key, data)
                continue
            done = self._puts.first(key, data, RETRY_S)
            if done.outcome == "unknown":
                raise StorageFailed(f"{key} may not be written: {done.detail}", path=key)
            if done.outcome == "exists" and self._bucket.read(key, 0, len(data) + 1) != data:
                return Publication("gone", f"{key} has other bytes, of another committer of the round")
        return None

    def _publish(self, place: Place, offered: _Offered, contents: CommitContents, wish: _Wish) -> Publication:
        (standing, over), mine = wish, offered.published
        self._commits.mark(offered.mark)
        for _ in range(REPLACEMENTS_MAX):
            kept = _Kept((), None) if standing is None else self._kept(place, standing)
            done = self._commits.put(_id(place), commit_object(mine, kept.replaced), standing)
            if done.outcome == "unknown":
                return Publication("unknown", f"{naming.commit_object_path(*_id(place))}: {done.detail}")
            if done.outcome == "done":
                if kept.displaced is not None:
                    _erase_unneeded(self._bucket, place.run, kept.displaced)
                return self._confirmed(place, offered, contents)
            standing = self._commits.standing(_id(place))
            answer = _answer(standing, mine, over)
            if answer is not None:
                return answer
        return Publication("taken", "other writers keep replacing the checkpoint")

    def _confirmed(self, place: Place, offered: _Offered, contents: CommitContents) -> Publication:
        """After the commit object is there: whether its files were thrown away meanwhile. They are only while the round's
        fence is there, which is removed after them.
        """
        if not place.round_id:
            return _PUBLISHED
        mine, mark = offered
        prefix, witness = data_of(place.run, mine), next(iter(contents.staged), naming.COMMIT)
        try:
            if not exists(self._bucket, fence_of(prefix)) and exists(self._bucket, f"{prefix}/{witness}"):
                return _PUBLISHED
            self._commits.withdraw(_id(place), mine.data)
            if mark is not None:
                self._bucket.delete([mark])
        except CheckpointError as error:
            return Publication("unknown", f"{prefix} is published, and may have been discarded: {error.detail}")
        return Publication("gone", f"{prefix} was discarded")

    def _throw_away(self, place: Place, prefix: str) -> bool:
        """Remove files that no commit object names; False, and they stay, if one names them by now. A committer that was
        held up withdraws what it publishes behind the fence.
        """
        if place.round_id:
            if self._is_named(place, prefix):  # no fence then: another committer of the round would withdraw the checkpoint
                return False
            self._bucket.put(fence_of(prefix), b"")
            if self._is_named(place, prefix):
                self._bucket.delete([fence_of(prefix)])
                return False
        erase_staged(self._bucket, place, prefix)
        if place.round_id:
            self._bucket.delete([fence_of(prefix)])
        return True

    def _is_named(self, place: Place, prefix: str) -> bool:
        standing = self._commits.standing(_id(place))
        return standing is not None and standing.may_name(prefix)

    def _kept(self, place: Place, standing: Standing) -> _Kept:
        """What the new commit object names as replaced: the first one, which may be the last that was read back, and the
        newest. One without COMMIT was replaced because of that, and is not kept.
        """
        old = standing.checkpoint
        if old is None:
            return _Kept((), None)
        first, second = (*standing.replaced, None, None)[:2]
        if not exists(self._bucket, f"{data_of(place.run, old)}/{naming.COMMIT}"):
            return _Kept((first, second), old)
        return _Kept((old, second), None) if first is None else _Kept((first, old), second)

    def _end(self, place: Place) -> None:
        with self._lock:
            self._begun.pop(place, None)


class _Offered(NamedTuple):
    """A checkpoint that is to be published, and the key of the mark of its line, None where its manifest cannot be read."""

    published: Published
    mark: str | None


class _Wish(NamedTuple):
    """What a commit has found at its step, and whether it may replace that."""

    standing: Standing | None
    over: bool


class _Kept(NamedTuple):
    """What a new commit object names as replaced, and a checkpoint that is not kept."""

    replaced: tuple[Published | None, ...]
    displaced: Published | None


def _removed_data(removed: str) -> Iterator[tuple[str, str, list[str] | None]]:
    """The run, files and marks of what `remove`, `release` or `take_back` has returned."""
    path, _, encoded = removed.partition(" ")
    run, _, name = path.split("/")
    if not encoded:
        yield run, name, None
        return
    step = naming.parse_step_directory(name)
    assert step is not None
    with suppress(CorruptManifest):  # a sweep frees what it named
        yield from ((run, one.data, _marks(run, one)) for one in commit_objects.decode(encoded.encode(), run, step).kept)


def _answer(standing: Standing | None, mine: Published, over: bool) -> Publication | None:
    """What a commit returns because of what stands; None if it may go on."""
    if standing is None:
        return None
    stands = standing.checkpoint
    if stands is not None and stands.data == mine.data:
        if stands == mine:
            return _PUBLISHED
        return Publication("taken", f"the commit object of {mine.data} names another manifest, of {stands.writer}")
    if not over:
        by = "a commit object that cannot be read" if stands is None else f"{stands.data}, written by {stands.writer}"
        return Publication("taken", f"the step has {by}")
    if standing.names(mine.data):
        return Publication("taken", f"{mine.data} was published, and has been replaced since")
    return None


def _offered(place: Place, prefix: str, manifest: bytes, commit: bytes, process: str) -> _Offered:
    writer = f"r{place.round_id}" if place.round_id else process
    data, digest = _name(prefix), hashlib.sha256(manifest).hexdigest()
    try:
        stated = manifests.decode(manifest, commit)
    except Damaged:  # the read-back says what is wrong with it
        return _Offered(Published(data, digest, writer), None)
    summary = commit_objects.short_enough(bodies.summary(stated))
    mark = naming.line_mark(place.run, data, lineage.line(stated.rewinds))
    return _Offered(Published(data, digest, writer, summary), mark)


def _marks(run: str, one: Published) -> list[str] | None:
    """The mark of the line that the summary states; None where that is not known."""
    line = commit_objects.line_of(one)
    return None if line is None else [naming.line_mark(run, one.data, line)]


def _check_size(bucket: Bucket, key: str, size: int) -> None:
    found = bucket.head(key)
    if found is None or found.size != size:
        raise StorageFailed(f"{key} does not have the {size} bytes that were copied", path=key)


def _erase_unneeded(bucket: Bucket, run: str, one: Published) -> None:
    prefix = data_of(run, one)
    try:
        erase_data(bucket, prefix, _marks(run, one))
    except CheckpointError as error:  # a sweep removes it
        log.warning("cannot remove %s: %s", prefix, error.detail)


def _id(place: Place) -> CheckpointId:
    return CheckpointId(place.run, place.step)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _no_checkpoint(run: str, step: int) -> NoSuchCheckpoint:
    return NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"`holdfast ls {run}` lists them")
