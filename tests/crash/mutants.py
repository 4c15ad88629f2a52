"""What `mutations` takes away, one at a time: every fsync, every digest check, the fence, the checks of leases and locks."""

from __future__ import annotations

from typing import NamedTuple

_POSIX = "service/holdfast_service/storage/posix.py"
_CUT = "tests/crash/test_power_cut.py"
_REPAIRS = "tests/crash/test_repairs.py"
_FLIPS = "tests/crash/test_flips.py"


class Mutation(NamedTuple):
    """`old`, which stands once in a file, becomes `new`; one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # every fsync (I3, I4)
    Mutation(
        "fsync of a tensor file",
        _POSIX,
        "                _fsync(descriptor)  # of the file",
        "                # of the file",
        (_CUT,),
    ),
    Mutation(
        "fsync of a small file",
        _POSIX,
        "        _write_all(descriptor, 0, [memoryview(data)])\n        _fsync(descriptor)\n",
        "        _write_all(descriptor, 0, [memoryview(data)])\n",
        (_CUT,),
    ),
    Mutation(
        "fsync of directories",
        _POSIX,
        "                with self._directory(names[:depth]) as directory:\n                    _fsync(directory)\n",
        "                with self._directory(names[:depth]):\n                    pass\n",
        (_CUT,),
    ),
    Mutation(
        "fsync of the directories above",
        _POSIX,
        "range(len(names), -1, -1)",
        "range(len(names), len(names) - 1, -1)",
        (_CUT,),
    ),
    Mutation(
        "fsync of where a rename went",
        _POSIX,
        '            self.sync_directory("/".join(target_parent))\n',
        "",
        (_CUT,),
    ),
    Mutation(
        "fsync of where a rename came from",
        _POSIX,
        '            self.sync_directory("/".join(source_parent))\n',
        "",
        (_CUT,),
    ),
    Mutation(
        "fsync of a replaced name",
        _POSIX,
        'dst_dir_fd=directory)\n        self.sync_directory("/".join(parent))\n',
        "dst_dir_fd=directory)\n",
        (_CUT,),
    ),
    Mutation(
        "fsync of where a mended file went",
        _POSIX,
        '        self.sync_directory("/".join(there_parent))\n',
        "",
        (_REPAIRS,),
    ),
    Mutation(
        "fsync of a mended file",
        "service/holdfast_service/daemon/mending.py",
        "        writer.finish()\n",
        "",
        (_REPAIRS,),
    ),
    Mutation(
        "digest check of what mends",
        "service/holdfast_service/daemon/proven_sources.py",
        "return len(data) == piece.length and digest(data) == piece.digest",
        "return len(data) == piece.length",
        ("tests/daemon/test_repair.py",),
    ),
    Mutation(
        "digest check of what is copied",
        "service/holdfast_service/daemon/copies.py",
        "                proof.check(piece, data)\n",
        "",
        ("tests/daemon/test_replicas.py",),
    ),
    Mutation(
        "fsync of the staged directory",
        "service/holdfast_service/control/commit.py",
        "    tier.sync_directory(staging)\n",
        "",
        (_CUT,),
    ),
    Mutation(
        "fsync of a new root's name",
        _POSIX,
        "            try:\n                _fsync(descriptor)\n            finally:\n                os.close(descriptor)\n",
        "            os.close(descriptor)\n",
        ("tests/storage/test_posix.py",),
    ),
    Mutation(
        "errors of writing out",
        "service/holdfast_service/storage/writeback.py",
        "            if error.errno not in _UNKNOWN:\n                raise\n",
        "",
        ("tests/storage/test_writeback.py",),
    ),
    # the order of things (I3, I4, I10)
    Mutation(
        "COMMIT after the manifest",
        "service/holdfast_service/control/commit.py",
        '    tier.put(f"{staging}/{naming.MANIFEST}", encoded)\n',
        '    tier.put(f"{staging}/{naming.COMMIT}.early", encoded)\n    tier.put(f"{staging}/{naming.MANIFEST}", encoded)\n',
        ("tests/daemon/test_write_order.py",),
    ),
    Mutation(
        "exclusive rename",
        "service/holdfast_service/storage/libc.py",
        "_RENAME_NOREPLACE = 1",
        "_RENAME_NOREPLACE = 0",
        ("tests/storage/test_posix.py",),
    ),
    Mutation(
        "verified before an older one goes",
        "service/holdfast_service/control/retention.py",
        "    verified = sorted((c for c in candidates if c.verified), key=_step)\n",
        "    verified = sorted(candidates, key=_step)\n",
        ("tests/control/test_retention.py",),
    ),
    # every digest check (I1, I5, I7)
    Mutation(
        "digest of any piece",
        "formats/holdfast_formats/proof.py",
        "    if held == piece.length and found == (expected or piece.digest):\n",
        "    if held == piece.length:\n",
        (_FLIPS,),
    ),
    Mutation(
        "length of files",
        "formats/holdfast_formats/proof.py",
        "    if entry is None or size == entry.bytes:\n",
        "    if entry is None or size is not None:\n",
        (_FLIPS,),
    ),
    Mutation(
        "header of a shard file",
        "formats/holdfast_formats/proof.py",
        "    if stated != listed:\n",
        "    if False:\n",
        ("tests/formats/test_proof.py", "tests/client/test_reader.py"),
    ),
    Mutation(
        "index of a group",
        "formats/holdfast_formats/proof.py",
        "    if weight_map != {",
        "    if False and weight_map != {",
        ("tests/formats/test_proof.py", "tests/client/test_reader.py"),
    ),
    Mutation(
        "COMMIT over the manifest, before it is parsed",
        "formats/holdfast_formats/manifest.py",
        "    if hashlib.sha256(manifest_bytes).hexdigest() != commit.manifest_sha256:\n",
        "    if False:\n",
        ("tests/formats/test_manifest.py",),
    ),
    Mutation(
        "COMMIT word for word",
        "formats/holdfast_formats/manifest.py",
        "    if commit_bytes != _encode_commit(commit.manifest_sha256, size, len(files)):\n",
        "    if False:\n",
        ("tests/formats/test_manifest.py",),
    ),
    Mutation(
        "digests that are digests",
        "formats/holdfast_formats/digest.py",
        "    if not _SPELLED.fullmatch(text):\n",
        "    if False:\n",
        ("tests/formats/test_manifest.py",),
    ),
    Mutation(
        "digests in the check after a commit",
        "service/holdfast_service/daemon/verifier.py",
        "    proof.check(piece, data)\n",
        "",
        ("tests/daemon/test_verifier.py",),
    ),
    Mutation(
        "digests of what a failing disk gives after all",
        "service/holdfast_service/daemon/verifier.py",
        '            proof.check(piece, tier.read(f"{directory}/{piece.file}", piece.start, piece.length))\n',
        '            tier.read(f"{directory}/{piece.file}", piece.start, piece.length)\n',
        ("tests/daemon/test_verifier.py",),
    ),
    Mutation(
        "digests of what is tried in another layout",
        "service/holdfast_service/daemon/sampling.py",
        "                proof.check(proof.tensor_piece(group, part.tensor, entry, extent), data)\n",
        "",
        ("tests/daemon/test_sampling.py",),
    ),
    Mutation(
        "lengths in the check after a commit",
        "service/holdfast_service/daemon/verifier.py",
        '            proof.check_size(made, file.name, tier.size(f"{directory}/{file.name}"))\n',
        "            pass\n",
        ("tests/daemon/test_verifier.py",),
    ),
    Mutation(
        "digests of what a reader streams",
        "client/holdfast/reader.py",
        "                proof.check(piece, part)\n",
        "",
        ("tests/client/test_reader.py",),
    ),
    Mutation(
        "digests of small pieces, in every pass",
        "client/holdfast/passes.py",
        "        if digest.digest(mine) != extent.digest or len(mine) != extent.length:\n",
        "        if len(mine) != extent.length:\n",
        ("tests/client/test_reader.py", "tests/client/test_passes.py"),
    ),
    Mutation(
        "digests of large pieces",
        "client/holdfast/passes.py",
        "        proof.check_found(piece, held, found.hexdigest())\n",
        "",
        ("tests/client/test_passes.py",),
    ),
    Mutation(
        "every extent of what was read in place",
        "client/holdfast/passes.py",
        "            if len(part.extents) == 1:\n",
        "            if True:\n",
        ("tests/client/test_passes.py",),
    ),
    Mutation(
        "what was read in place and is wrong goes",
        "client/holdfast/passes.py",
        "            np.frombuffer(into, np.uint8)[:] = 0\n",
        "            pass\n",
        ("tests/client/test_passes.py",),
    ),
    Mutation(
        "small pieces before a load",
        "client/holdfast/passes.py",
        "            _check(part, data[part.start - start : part.stop - start])\n",
        "            pass\n",
        ("tests/client/test_passes.py",),
    ),
    Mutation(
        "large pieces before a load",
        "client/holdfast/passes.py",
        "            self._reading.check(_piece(first, first.extents[0]))\n",
        "",
        ("tests/client/test_passes.py",),
    ),
    Mutation(
        "digests of what is read for several askers",
        "service/holdfast_service/daemon/extents.py",
        "            proof.check(piece, target[at : min(at + piece.length, size)])\n",
        "            pass\n",
        ("tests/daemon/test_extents.py",),
    ),
    Mutation(
        "digest of config.json, by which shards are planned",
        "service/holdfast_service/api/planned.py",
        "        proof.check(contents.pieces[CONFIG][0], encoded)\n",
        "",
        ("tests/api/test_planned.py",),
    ),
    Mutation(
        "digests of what leaves over HTTP",
        "service/holdfast_service/api/delivery.py",
        "        proof.check(piece, data[piece.start - batch[0].start : piece.stop - batch[0].start])\n",
        "        pass\n",
        ("tests/api/test_files.py",),
    ),
    Mutation(
        "lengths of what leaves over HTTP",
        "service/holdfast_service/api/files.py",
        '        proof.check_size(held.manifest, name, services.tier.size(f"{held.directory}/{name}"))\n',
        "        pass\n",
        ("tests/api/test_files.py",),
    ),
    Mutation(
        "digest of a chunk that comes in",
        "service/holdfast_service/daemon/remote.py",
        "        if found != chunk.digest:\n",
        "        if False:\n",
        ("tests/daemon/test_remote.py",),
    ),
    Mutation(
        "what one call has proven",
        "client/holdfast/proving.py",
        "there, rows, count, at) == count)\n",
        "there, rows, count, at) <= count)\n",
        ("tests/client/test_proving.py",),
    ),
    Mutation(
        "what one call has read and proven",
        "client/holdfast/proving.py",
        "offset, rows, count, digest.native()) == count)\n",
        "offset, rows, count, digest.native()) <= count)\n",
        ("tests/client/test_proving.py",),
    ),
    Mutation(
        "a function that digests otherwise",
        "formats/holdfast_formats/digest.py",
        "        if all(found(data, len(data)) == number(data) for data in",
        "        if all(found(data, len(data)) or True for data in",
        ("tests/formats/test_digest.py",),
    ),
    Mutation(
        "digest of a chunk that comes again",
        "service/holdfast_service/daemon/remote.py",
        "                if digest(upload.span(part)[chunk.offset : stop]) != chunk.digest:\n",
        "                if False:\n",
        ("tests/daemon/test_remote.py",),
    ),
    Mutation(
        "digest of a table that came in chunks",
        "service/holdfast_service/daemon/remote.py",
        '            if digest(upload.span("table")[: whole.table_bytes]) != whole.table_digest:\n',
        "            if False:\n",
        ("tests/daemon/test_remote.py",),
    ),
    Mutation(
        "digest of a sealed table",
        "service/holdfast_service/daemon/segment.py",
        "        if digest(encoded) != table_digest or int(table_digest, 16) != header.seal:\n",
        "        if False:\n",
        ("tests/daemon/test_segment.py",),
    ),
    Mutation(
        "digest of a held table, in the daemon",
        "service/holdfast_service/daemon/holds.py",
        'digest(segment.memory[start : start + header.table_bytes]) == f"{header.seal:016x}"\n',
        "True\n",
        ("tests/daemon/test_segment.py",),
    ),
    Mutation(
        "digest of a held table, in the rank",
        "client/holdfast/warm.py",
        '        stated = (header.step, f"{header.seal:016x}", digest(encoded))\n',
        '        stated = (header.step, f"{header.seal:016x}", part.table_digest)\n',
        ("tests/daemon/test_holds.py", "tests/daemon/test_segment.py"),
    ),
    # what is staged is what was there when the save was called, and goes to the disk as it was digested
    Mutation(
        "samples of what was copied",
        "client/holdfast/copier.py",
        "        return [*self._plain.copy().tolist(), *(other.copy() for other in self._other)]\n",
        "        return [False for _ in (*self._plain.copy().tolist(), *(other.copy() for other in self._other))]\n",
        ("tests/client/test_copier.py",),
    ),
    Mutation(
        "the blocks where tensors meet",
        "service/holdfast_service/daemon/gathering.py",
        "            target[:head], target[cut.length - tail :] = there[:head], there[cut.length - tail :]\n",
        "",
        ("tests/daemon/test_writer.py",),
    ),
    Mutation(
        "how a slot lies to the blocks of the disk",
        "service/holdfast_service/daemon/gathering.py",
        "(there.ctypes.data - cut.start) % alignment == 0 else None",
        "True else None",
        ("tests/daemon/test_writer.py",),
    ),
    # what a failed restore has overwritten in part is neither saved nor trained on
    Mutation(
        "a state overwritten in part is saved",
        "client/holdfast/checkpointer.py",
        "        self._state.wholeness.check()\n        self._hooks.renew()\n",
        "        self._hooks.renew()\n",
        ("tests/client/test_wholeness.py",),
    ),
    Mutation(
        "a state overwritten in part is trained on",
        "client/holdfast/checkpointer.py",
        "            self._state.wholeness.check()\n            self._prepare_unasked()\n",
        "            self._prepare_unasked()\n",
        ("tests/client/test_wholeness.py",),
    ),
    Mutation(
        "a step that another rank could not read is gone on from",
        "client/holdfast/falling_back.py",
        "            loading.taken_back()\n",
        "",
        ("tests/distributed/test_fallback.py::test_who_read_a_step_that_another_could_not_does_not_go_on_from_it",),
    ),
    # the fence (I6)
    Mutation(
        "a second job is let in",
        "service/holdfast_service/daemon/fencing.py",
        "            living = [] if hello.take_over else _others(saver, decisions, hello)\n",
        "            living: list[Participant] = []\n",
        ("tests/crash/test_second_job.py",),
    ),
    Mutation(
        "fence, when a round is opened",
        "service/holdfast_service/control/attempts.py",
        "        if attempt < newest:\n            raise StaleAttempt(\n",
        "        if False:\n            raise StaleAttempt(\n",
        ("tests/control/test_attempts.py",),
    ),
    Mutation(
        "fence, when a newer launch comes",
        "service/holdfast_service/daemon/saver.py",
        "if k.run == who.run and k.attempt < who.attempt]:\n",
        "if False]:\n",
        ("tests/daemon/test_saver.py",),
    ),
    # readers hold what they read, and what is lent was proven (I4, I7)
    Mutation(
        "a reader's hold against removal",
        "service/holdfast_service/control/readers.py",
        "            free = all(until <= now for until in self._holds.get((run, step), {}).values())\n",
        "            free = True\n",
        ("tests/control/test_readers.py", "tests/control/test_rotation.py"),
    ),
    Mutation(
        "a removal under way against readers",
        "service/holdfast_service/control/readers.py",
        "            if (run, step) in self._removing:\n",
        "            if False:\n",
        ("tests/control/test_readers.py",),
    ),
    Mutation(
        "the digest of what is lent",
        "service/holdfast_service/daemon/lent.py",
        'np.array(found, np.uint64) == self._wanted.rows["digest"][job.first : job.last]\n',
        "len(found) > 0\n",
        ("tests/daemon/test_loader.py",),
    ),
    Mutation(
        "the seal of what is lent",
        "service/holdfast_service/daemon/lent.py",
        "        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)\n",
        "",
        ("tests/daemon/test_loader.py",),
    ),
    # leases and locks
    Mutation(
        "lease, when a slot is sealed",
        "service/holdfast_service/daemon/saver.py",
        "            if current is None or lease is None or lease.slot != slot:\n",
        "            if current is None or lease is None:\n",
        ("tests/daemon/test_segment.py",),
    ),
    Mutation(
        "a lease's deadline",
        "service/holdfast_service/daemon/saver.py",
        "if lease.deadline < now)\n                if late or current.deadline < now:\n",
        "if False)\n                if late:\n",
        ("tests/daemon/test_saver.py",),
    ),
    Mutation(
        "the lock of a slot that is read",
        "service/holdfast_service/daemon/segment.py",
        "    except (BlockingIOError, PermissionError):\n        return False\n",
        "    except (BlockingIOError, PermissionError):\n        return True\n",
        ("tests/daemon/test_holds.py",),
    ),
    Mutation(
        "the lock of a root",
        "service/holdfast_service/storage/locking.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        ("tests/storage/test_posix.py",),
    ),
    Mutation(
        "pins",
        "service/holdfast_service/control/rotation.py",
        "        if step in file.pins:\n            raise Pinned(",
        "        if False:\n            raise Pinned(",
        ("tests/control/test_rotation.py",),
    ),
)
