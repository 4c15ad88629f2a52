"""Finds the files of a save that a committed checkpoint of the run has already, and takes them from there.

The digests decide. Every extent that would be written is digested where it lies, and compared with the manifest of a
checkpoint that was read back; at the first difference the file is written. A taken file is a second name of the same bytes,
which the check after the commit reads back like all others.

One damaged byte must not be in all checkpoints of a run. So a file is taken from a checkpoint that has other bytes on the
disk than the newest one, if there is such a checkpoint.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from itertools import islice
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import Extent, FileEntry
from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging.plan import PlannedFile, PlannedTensor, WritePlan
from holdfast_service.control.catalog.catalog import ANY_FILES
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.control import Control
from holdfast_service.daemon.writing.gathering import FileBytes, Slots
from holdfast_service.daemon.writing.write_threads import Schedule, WriteThreads
from holdfast_service.daemon.writing.writer import Extents, digest_window, digesting_threads
from holdfast_service.storage import FileIdentity, StagedCheckpoint

log = logging.getLogger(__name__)

KNOWN_S = 0.5  # how long to wait for the catalog, which knows what was read back
LOOKED_AT_MAX = 16  # verified checkpoints, the newest first, among which one with other bytes on the disk is sought
KEPT_MAX = 8  # checkpoints whose digests are remembered

_Digests = Sequence[tuple[int, str]]  # length and digest of a file's extents, in the order of the file


class _Stated(NamedTuple):
    """What a manifest says of a file."""

    entry: FileEntry
    digests: _Digests


class _Source(NamedTuple):
    """A checkpoint that was read back, whose files are those that were read. `is_apart`: every file has bytes of its own."""

    step: int
    identities: Mapping[str, FileIdentity]
    is_apart: bool


class _Known(NamedTuple):
    """The newest checkpoint of a run, its verified ones, the newest first, each with the stamp of its files, and damaged
    ones.
    """

    newest: int | None
    proven: Mapping[int, str]
    damaged: Collection[int]


class _Found(NamedTuple):
    """A checkpoint with a file that may have the same bytes, and the digests that these must have."""

    step: int
    digests: _Digests


class UnchangedFiles:
    """Takes the unchanged files of saves. For one save at a time."""

    def __init__(self, control: Control) -> None:
        self._control, self._store = control, control.store
        self._known = OrderedDict[tuple[object, ...], Mapping[str, _Stated]]()
        self._is_refused = False  # the storage gives no file a second name

    def take(self, staged: StagedCheckpoint, plan: WritePlan, slots: Slots) -> dict[str, Extents]:
        """Stage the frozen files of the plan whose bytes a verified checkpoint of its run has; their extents, by name.

        What cannot be taken is left to be written. Raises errors of the store where that is not possible.
        """
        frozen = [file for file in plan.files if file.layout.frozen]
        if not frozen or self._is_refused:
            return {}
        taken: dict[str, Extents] = {}
        try:
            found = self._found(plan, frozen)
        except CheckpointError as error:
            log.info("all files of %s@%s are written: %s", plan.run, plan.step, error.detail)
            return {}
        if not found:
            return {}
        with WriteThreads(Schedule(sum(file.layout.bytes for file in frozen))) as threads:
            for file in frozen:
                at = found.get(file.layout.name)
                extents = None if at is None else _as_stated(FileBytes(file, slots, plan.extent_bytes), at.digests, threads)
                if at is not None and extents is not None and self._is_taken(staged, file, at.step):
                    taken[file.layout.name] = extents
        return taken

    def _is_taken(self, staged: StagedCheckpoint, file: PlannedFile, step: int) -> bool:
        name = file.layout.name
        try:
            identity = self._identities(staged.place.run, step).get(name)
            taken = staged.take(name, step)
            if taken and staged.files.size(f"{staged.path}/{name}") == file.layout.bytes:
                return True
        except CheckpointError as error:  # it was removed meanwhile, say
            log.info("%s is written, and not taken from step %d: %s", name, step, error.detail)
        else:
            if not taken and identity is not None and identity.names == 1:  # else it may have too many
                log.info("unchanged files are written: the storage gives no file a second name")
                self._is_refused = True
        staged.drop(name)
        return False

    def _found(self, plan: WritePlan, files: Sequence[PlannedFile]) -> dict[str, _Found]:
        """For each file, a checkpoint that has one of this name, header and length."""
        names = frozenset(file.layout.name for file in files)
        known = self._control.record_queue.query(lambda: self._known_of(plan), KNOWN_S)
        newest = self._identities(plan.run, known.newest) if known.newest is not None else {}
        sources = []
        for source in self._sources(plan.run, known):
            sources.append(source)
            if source.is_apart or all(len(_by_bytes(sources, name, newest)) > 1 for name in names):
                break
        found = {}
        for file in files:
            at = self._of(plan.run, file, _by_bytes(sources, file.layout.name, newest), names)
            if at is not None:
                found[file.layout.name] = at
        return found

    def _of(self, run: str, file: PlannedFile, sources: Sequence[_Source], names: Collection[str]) -> _Found | None:
        """The first of these `sources`, where it has the digests of the last one: that is the newest."""
        header, name = file.layout.header, file.layout.name
        entry = FileEntry(name, file.layout.bytes, len(header), digest(header))
        stated = [
            (source, there)
            for source in sources
            if (there := self._stated(run, source, names).get(name)) is not None and there.entry == entry
        ]
        for source, there in stated:
            path = f"{naming.checkpoint_path(run, source.step)}/{name}"
            if there.digests == stated[-1][1].digests and self._store.files.read(path, 0, len(header)) == header:
                return _Found(source.step, there.digests)
        return None

    def _known_of(self, plan: WritePlan) -> _Known:
        """What is known of the run's checkpoints but for this step's."""
        run, findings = plan.run, self._control.findings
        proofs = self._control.catalog.proofs(run)
        damaged = {*findings.damaged_steps(run), *(step for step in proofs if findings.seen(run, step) is not None)}
        others = sorted(proofs.keys() - {plan.step}, reverse=True)
        proven = {step: proof for step in others if (proof := proofs[step].proven) is not None and step not in damaged}
        return _Known(others[0] if others else None, proven, damaged)

    def _sources(self, run: str, known: _Known) -> Iterator[_Source]:
        """The verified checkpoints of a run, the newest first, if their files are those that were read back; without files
        that they share with a damaged one.
        """
        probe = self._control.rotation.probe
        bad = {file.id for step in known.damaged for file in self._identities(run, step).values()}
        for step, proof in islice(known.proven.items(), LOOKED_AT_MAX):
            if proof not in (ANY_FILES, probe.proof(run, step)):
                continue
            files = self._identities(run, step)
            yield _Source(step, {name: file for name, file in files.items() if file.id not in bad}, not files)

    def _identities(self, run: str, step: int) -> Mapping[str, FileIdentity]:
        return self._store.identities(naming.checkpoint_path(run, step))

    def _stated(self, run: str, source: _Source, names: Collection[str]) -> Mapping[str, _Stated]:
        """What the manifest of a checkpoint says of these files, as far as it has them."""
        directory = naming.checkpoint_path(run, source.step)
        key = (run, source.step, self._store.files.stamp(f"{directory}/{naming.COMMIT}"), names)
        known = self._known.pop(key, None)
        if known is None:
            manifest = roots.load_manifest(self._store.files, run, source.step)
            tensors = verification.tensors_by_file(manifest)
            known = {}
            for entry in manifest.files:
                if entry.name in names and entry.name in tensors:
                    ordered = sorted(tensors[entry.name].values(), key=lambda tensor: tensor.start)
                    digests = [(extent.length, extent.digest) for tensor in ordered for extent in tensor.extents]
                    known[entry.name] = _Stated(entry, digests)
        self._known[key] = known
        while len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)
        return known


def _by_bytes(sources: Sequence[_Source], name: str, newest: Mapping[str, FileIdentity]) -> list[_Source]:
    """The newest checkpoint with other bytes on the disk than the `newest` one of all has, if any; then the newest."""
    having = [source for source in sources if name in source.identities or source.is_apart]
    others = [
        one for one in having if name in newest and name in one.identities and one.identities[name].id != newest[name].id
    ]
    return [*others[:1], *having[:1]]


def _as_stated(content: FileBytes, digests: _Digests, threads: WriteThreads) -> Extents | None:
    """The extents of a file, None if one has not the digest that is stated."""
    digesting, found = digesting_threads(), list[tuple[PlannedTensor, Extent]]()
    jobs = [threads.submit(content.size(window), digest_window, digesting, content, window) for window in content.windows()]
    try:
        for job in jobs:
            extents = job.result()
            if [(extent.length, extent.digest) for _, extent in extents] != digests[len(found) : len(found) + len(extents)]:
                return None
            found += extents
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)
    return found if len(found) == len(digests) else None
