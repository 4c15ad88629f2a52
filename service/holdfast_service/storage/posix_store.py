"""A directory as a store of checkpoints: staged in `RUN/staging/`, committed by a rename to `RUN/checkpoints/`.

Nothing else moves what is under checkpoints/ (I2). It is complete and durable (I1), by the order of I3; removal has the
order of I4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from errno import EEXIST, ENOENT
from itertools import count

from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    CorruptManifest,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchResource,
    StorageFailed,
)
from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_formats.rest.bodies import CheckpointInfo

from .posix_answers import PUBLISHED, asked, confirmed, lost, published_commit
from .records import has_bytes
from .staged_directory import StagedDirectory
from .store import Alone, CommitContents, Publication
from .tier import FileIdentity, FileWriter, Tier

_OURS_ALONE = frozenset({naming.MANIFEST, naming.COMMIT, naming.RECEIPTS})
_STAMPED = (naming.COMMIT, naming.MANIFEST)
_LISTS = "`holdfast ls {}` lists them"


class PosixStore:
    """The checkpoints of a root. Stateless: several of them, on several nodes, may have the same root."""

    shares_files = True

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    @property
    def files(self) -> Files:
        return self._tier

    def begin(self, place: Place) -> PosixStaged:
        if not place.round_id:
            self._tier.remove_tree(place.path)
        return PosixStaged(self._tier, place)

    def receipts(self, place: Place) -> list[bytes]:
        directory = f"{place.path}/{naming.RECEIPTS}"
        return [self._tier.read(f"{directory}/{name}") for name in self._tier.list(directory)]

    def commit(self, place: Place, contents: CommitContents, over: bool = False) -> Publication:
        target = naming.checkpoint_path(place.run, place.step)
        try:
            if not place.round_id:
                if over:  # before something is given up for it
                    _check_there(self._tier, place, contents)
                self._complete(place, contents)
            elif over and self._has_replaced(place, target, contents.commit):
                return confirmed(self._tier, place, target)
            else:
                self._complete_jointly(place, contents)
            self._tier.sync_directory(place.path)
        except NoSuchResource as absent:
            return asked(self._tier, place, contents, over, absent)
        try:
            self._give_name(place, target, over)
        except (AlreadyCommitted, NoSuchResource) as question:
            return asked(self._tier, place, contents, over, question)
        except StorageFailed as failure:
            return lost(self._tier, contents, target, failure)
        return PUBLISHED

    def mend(self, place: Place, manifest: bytes, commit: bytes) -> None:
        """One file after the other, each by a rename over the damaged one: readers find the one or the other."""
        staging, target = place.path, naming.checkpoint_path(place.run, place.step)
        if not self._tier.list(target):
            raise NoSuchCheckpoint(f"{place.run} has no checkpoint of step {place.step}", hint=_LISTS.format(place.run))
        for name, data in ((naming.MANIFEST, manifest), (naming.COMMIT, commit)):
            if not self._holds(f"{target}/{name}", data):
                self._tier.put(f"{staging}/{name}", data)
                if self._tier.read(f"{staging}/{name}") != data:
                    raise CorruptManifest(
                        f"{staging}/{name} reads back differently from what was just written",
                        hint="check the disk",
                        file=name,
                    )
        for name in self._tier.list(staging):
            self._tier.supplant(f"{staging}/{name}", f"{target}/{name}")
        self._tier.remove_tree(staging)

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return has_bytes(self._tier, path, data)
        except CheckpointError:  # it cannot be read
            return False

    def steps(self, run: str) -> list[int]:
        found = map(naming.parse_step_directory, self._tier.list(f"{naming.check_run(run)}/{naming.CHECKPOINTS}"))
        return sorted(step for step in found if step is not None)

    def described(self, run: str, steps: Collection[int]) -> dict[int, CheckpointInfo]:
        return {}  # a manifest is read as fast as anything

    def stamps(self, run: str, step: int | None = None) -> dict[int, str]:
        if step is not None:
            texts = self._tier.stamps(naming.checkpoint_path(run, step), _STAMPED)
            return {step: texts[""]} if "" in texts else {}
        texts = self._tier.stamps(f"{naming.check_run(run)}/{naming.CHECKPOINTS}", _STAMPED)
        return {at: stamp for name, stamp in texts.items() if (at := naming.parse_step_directory(name)) is not None}

    def identities(self, path: str) -> dict[str, FileIdentity]:
        return self._tier.identities(path)

    def discard(self, place: Place) -> None:
        if not place.round_id:
            self._tier.remove_tree(place.path)
            return
        # Another name first: a late committer on another node then finds all of it, or nothing, and publishes no rest.
        if (path := self._thrown_away(place)) is not None:
            self._tier.remove_tree(path)

    def replaced(self, run: str) -> list[Place]:
        return sorted(filter(_is_replaced, _staged(self._tier, run)), reverse=True)

    def release(self, place: Place) -> str | None:
        return self._thrown_away(place)

    def take_back(self, place: Place) -> str | None:
        target = naming.checkpoint_path(place.run, place.step)
        if not self._tier.list(target):
            self._tier.publish(place.path, target)
            return None
        if self._tier.exchange(place.path, target):
            return self.release(place)
        gone = self._taken(place.run, place.step)
        self._tier.publish(place.path, target)
        return gone

    def _thrown_away(self, place: Place) -> str | None:
        path = f"{place.run}/{naming.TRASH}/{naming.staging_directory(*place[1:])}"
        self._tier.remove_tree(path)
        try:
            self._tier.publish(place.path, path)
        except NoSuchResource:
            return None
        return path

    def remove(self, run: str, step: int) -> str:
        for place in self.replaced(run):
            if place.step == step and (path := self.release(place)) is not None:
                self._tier.remove_tree(path)
        return self._taken(run, step)

    def _taken(self, run: str, step: int) -> str:
        source = naming.checkpoint_path(run, step)
        for name in _trash_names(step):
            target = f"{run}/{naming.TRASH}/{name}"
            try:
                self._tier.publish(source, target)
            except AlreadyCommitted:
                continue
            except NoSuchResource as error:
                raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=_LISTS.format(run)) from error
            return target
        raise AssertionError("no free name in trash/")

    def bring_back(self, run: str, step: int, removed: str) -> bool:
        try:
            self._tier.publish(removed, naming.checkpoint_path(run, step))
        except AlreadyCommitted:
            return False
        return True

    def free(self, removed: str) -> None:
        self._tier.remove_tree(removed)

    def put_away(self, run: str, entry: str) -> None:
        self._tier.publish(naming.check_run(run), _trashed(entry))

    def take_out(self, entry: str, run: str) -> None:
        self._tier.publish(_trashed(entry), naming.check_run(run))

    def purge(self, entry: str) -> bool:
        try:
            self._tier.publish(_trashed(entry), _trashed(naming.purged_entry(entry)))
        except (NoSuchResource, AlreadyCommitted):
            return False
        return True

    def free_purged(self) -> list[tuple[str, CheckpointError]]:
        left = []
        for name in filter(naming.is_purged_entry, self._tier.list(naming.RUN_TRASH)):
            try:
                self._tier.remove_tree(_trashed(name))
            except CheckpointError as error:
                left.append((name, error))
        return left

    def free_bytes(self) -> int:
        return self._tier.free_bytes()

    def job_places(self, run: str) -> list[Place]:
        return sorted(filter(naming.is_job_place, _staged(self._tier, naming.check_run(run))))

    def put_back(self, alone: Alone = lambda run: nullcontext()) -> list[str]:
        """Move replaced checkpoints on only after the names under checkpoints/ are durable: until then a power cut may bring
        them back.
        """
        back = []
        for run in filter(naming.is_run_name, self._tier.list("")):
            if self._whole_in_staging(run):
                with alone(run):
                    back += self._put_back(run)
        return back

    def sweep(self, live: Collection[Place] = (), idle_s: float | None = None) -> list[str]:
        """Every tree in staging/ and trash/ with a name of ours; everything else stays. A tree that may be a replaced
        checkpoint stays, renamed accordingly: a crash came between the exchange and that rename.
        """
        spared = {path for place in live for path in (place.path, naming.progress_path(place.path))}
        removed = []
        for run, room in self._rooms():
            for name in self._tier.list(f"{run}/{room}"):
                path = f"{run}/{room}/{name}"
                if path in spared or not _is_ours(room, name) or self._tier.size(path) is not None:
                    continue
                idle = idle_s is None or self._tier.idle_s(path) >= idle_s
                if idle and not (room == naming.STAGING and self._is_kept(run, name)):
                    self._tier.remove_tree(path)
                    removed.append(path)
        return removed

    def _complete(self, place: Place, contents: CommitContents) -> None:
        """As the only writer, whose files are complete and durable."""
        for name, data in contents.small.items():
            self._tier.put(f"{place.path}/{name}", data)
        self._tier.put(f"{place.path}/{naming.MANIFEST}", contents.manifest)
        self._tier.remove_tree(f"{place.path}/{naming.RECEIPTS}")
        self._tier.put(f"{place.path}/{naming.COMMIT}", contents.commit)

    def _complete_jointly(self, place: Place, contents: CommitContents) -> None:
        """As one of several nodes, which may write the same bytes at the same time."""
        _check_there(self._tier, place, contents)
        added = {**contents.small, naming.MANIFEST: contents.manifest, naming.COMMIT: contents.commit}
        for name, data in added.items():
            self._put_again(f"{place.path}/{name}", data)
        _check_there(self._tier, place, contents)  # else another node has published it, and only the small files are left

    def _has_replaced(self, place: Place, target: str, commit: bytes) -> bool:
        """Whether these bytes are published already: then `place` has what they replaced, and must not be exchanged
        again.
        """
        try:
            return published_commit(self._tier, target) == commit
        except StorageFailed:  # it is replaced because it cannot be read; but only by what this round has written
            staged = published_commit(self._tier, place.path)
            if staged is not None and not commit.startswith(staged):
                raise
            return False

    def _put_again(self, path: str, data: bytes) -> None:
        """A small file that a lost committer may have left here, complete or not."""
        if self._tier.size(path) is None:
            try:
                self._tier.put(path, data)
                return
            except StorageFailed as failure:
                if self._tier.size(path) is None:  # else it came at this moment
                    if failure.members.get("errno") in (EEXIST, ENOENT):  # others publish, and tidy up what is made again
                        raise NoSuchResource(f"{path} was there, and all that was staged is gone") from failure
                    raise
        if self._tier.read(path) != data:
            self._tier.replace(path, data)

    def _give_name(self, place: Place, target: str, over: bool) -> None:
        """Publish. A replaced checkpoint is in staging/ afterwards: after a power cut one of the two is published.

        A file system that cannot exchange names takes two renames. `put_back` repairs a crash between them.
        """
        if not over:
            self._tier.publish(place.path, target)
            return
        first, second = _asides(place.run, place.step)
        # What was replaced first may be the last that was read back; of those after it the newest is kept.
        aside = second if self._is_whole(first.path) else first
        if self._tier.list(aside.path) and (older := self.release(aside)) is not None:
            self._tier.remove_tree(older)
        if self._tier.exchange(place.path, target):
            self._tier.publish(place.path, aside.path)
        else:
            self._rename_twice(place.path, target, aside.path)
        if not self._is_whole(aside.path):  # it was replaced because of that
            self._tier.remove_tree(aside.path)

    def _rename_twice(self, source: str, target: str, aside: str) -> None:
        try:
            self._tier.publish(target, aside)
            self._tier.publish(source, target)
        except CheckpointError as error:
            if not self._tier.list(target):  # it is aside, and nothing has taken its place
                self._tier.publish(aside, target)
                if error.members.get("outcome") == "unknown":
                    raise StorageFailed(error.detail, hint=error.hint) from error
            raise

    def _is_whole(self, path: str) -> bool:
        return self._tier.size(f"{path}/{naming.COMMIT}") is not None

    def _whole_in_staging(self, run: str) -> list[str]:
        staged = f"{run}/{naming.STAGING}"
        return [name for name in self._tier.list(staged) if self._is_whole(f"{staged}/{name}")]

    def _put_back(self, run: str) -> list[str]:
        back = []
        for place in self.replaced(run):  # the newest first
            target = naming.checkpoint_path(run, place.step)
            if not self._tier.list(target) and self._is_whole(place.path):
                self._tier.publish(place.path, target)
                back.append(target)
        if self._tier.list(f"{run}/{naming.CHECKPOINTS}"):
            self._tier.sync_directory(f"{run}/{naming.CHECKPOINTS}")
            self._tier.sync_directory(f"{run}/{naming.STAGING}")
        return back

    def _rooms(self) -> Iterator[tuple[str, str]]:
        # A run whose first save was interrupted has only staging/, and is not listed otherwise.
        for run in filter(naming.is_run_name, self._tier.list("")):
            for room in (naming.STAGING, naming.TRASH):
                yield run, room

    def _is_kept(self, run: str, name: str) -> bool:
        """Whether this may be a replaced checkpoint, or is being replaced at this moment."""
        staged = naming.parse_staging_directory(name)
        if staged is None or _is_replaced(staged):
            return staged is not None
        place, aside = Place(run, *staged), naming.replaced_place(run, staged.step)
        standing = self._tier.list(naming.checkpoint_path(run, staged.step))
        if not standing or not self._is_whole(place.path) or self._tier.list(aside.path):
            return False
        self._tier.publish(place.path, aside.path)
        return True


class PosixStaged:
    def __init__(self, tier: Tier, place: Place) -> None:
        self._tier, self.place = tier, place
        self.path = place.path
        self._directory = StagedDirectory(tier, self.path)
        # A job never writes to what is there: it may be a second name of a committed file.
        self._shared = place.round_id and not naming.is_job_place(place)
        self._earlier = set[str]()  # files of an earlier start, which are written again

    @property
    def files(self) -> Files:
        return self._tier

    def create(self, file: str, size: int) -> FileWriter:
        path = self._path_of(file)
        if file in self._earlier:
            self._earlier.discard(file)
            self._directory.drop(file)
        return self._tier.join(path, size) if self._shared else self._tier.create(path, size)

    def go_on(self) -> dict[str, int]:
        names = [name for name in self._tier.list(self.path) if naming.is_file_name(name) and name not in _OURS_ALONE]
        sizes = {name: size for name in names if (size := self._tier.size(f"{self.path}/{name}")) is not None}
        for name, size in sizes.items():  # the process that wrote it may have ended before its fsync
            self._tier.join(f"{self.path}/{name}", size).finish()
        self._earlier = set(sizes)
        return sizes

    def put(self, file: str, data: bytes) -> None:
        path = self._path_of(file)
        if self._shared:
            self._tier.replace(path, data)
        else:
            self._tier.put(path, data)

    def drop(self, file: str) -> None:
        self._directory.drop(_checked(file))

    def clear(self) -> None:
        self._directory.clear()

    def sync(self, file: str) -> None:
        self._directory.sync(_checked(file))

    def take(self, file: str, step: int, run: str | None = None) -> bool:
        return self._tier.link(f"{naming.checkpoint_path(run or self.place.run, step)}/{file}", self._path_of(file))

    def put_receipt(self, node: str, data: bytes) -> None:
        name = f"{node}.json"
        if not naming.is_file_name(name):
            raise InvalidRequest(f"{node!r} cannot be the name of a node", hint="use A-Z a-z 0-9 . _ -")
        self._tier.put(f"{self.path}/{naming.RECEIPTS}/{name}", data)

    def _path_of(self, file: str) -> str:
        return f"{self.path}/{_checked(file)}"


def _checked(file: str) -> str:
    if not naming.is_file_name(file) or file in _OURS_ALONE:
        raise InvalidRequest(f"{file!r} cannot be a file of a checkpoint", hint="use a plain name, and not the format's")
    return file


def _check_there(tier: Tier, place: Place, contents: CommitContents) -> None:
    for name, size in contents.staged.items():
        size_found = tier.size(f"{place.path}/{name}")
        if size_found != size:
            stands = "is not there" if size_found is None else f"has {size_found} bytes"
            raise NoSuchResource(f"{place.path}/{name} {stands}, but the nodes have written {size}")


def _is_ours(room: str, name: str) -> bool:
    staged = naming.parse_staging_directory(naming.without_progress(name)) is not None
    return staged or (room == naming.TRASH and naming.parse_step_directory(name) is not None)


def _asides(run: str, step: int) -> tuple[Place, Place]:
    """The places of replaced checkpoints, by age."""
    return naming.replaced_place(run, step), naming.replaced_place(run, step, 1)


def _trashed(entry: str) -> str:
    return f"{naming.RUN_TRASH}/{entry}"


def _staged(tier: Tier, run: str) -> Iterator[Place]:
    names = map(naming.parse_staging_directory, tier.list(f"{run}/{naming.STAGING}"))
    return (Place(run, *name) for name in names if name is not None)


def _is_replaced(staged: Place | naming.StagingName) -> bool:
    return staged.attempt == naming.REPLACED_ATTEMPT


def _trash_names(step: int) -> Iterator[str]:
    """The checkpoint's own name, then numbered ones, for when trash/ still holds a checkpoint of the same step."""
    yield naming.step_directory(step)
    for number in count(1):
        yield naming.staging_directory(step, number)
