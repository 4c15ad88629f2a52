"""The exam every Tier takes. A new tier's test subclasses `TierSuite`, in ten lines, and hands over the two fixtures."""

from __future__ import annotations

import itertools
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from holdfast_formats.errors import AlreadyCommitted, InUse, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_service.storage import Buffer, Tier
from tests.suites.records_suite import Raw, RecordsSuite

ESCAPES = ["/etc/passwd", "../outside", "a/../../outside", "a//b", "./a", "a/.", "a/", "a\0b", ".."]


BLOCK = 2**16  # a multiple of what any tier asks for


def aligned(size: int) -> np.ndarray:
    """Memory that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class TierSuite(RecordsSuite):
    """Subclasses give the fixtures `tier`, a fresh and empty tier, and `raw`, the way past it."""

    @pytest.fixture
    def records(self, tier: Tier) -> Tier:
        return tier

    def test_file_has_every_byte_written(self, tier: Tier, raw: Raw) -> None:
        """What is written in pieces, in any order, is the file; what is not written is zero."""
        writer = tier.create("run/staging/x/model.safetensors", 12)
        writer.write(6, [b"gh", bytearray(b"ij")])
        writer.write(0, [b"ab", memoryview(b"cdef"), b""])
        writer.finish()
        assert raw.read("run/staging/x/model.safetensors") == b"abcdefghij\0\0"

    @pytest.mark.parametrize(
        "buffer",
        [
            np.arange(6, dtype=np.float32).reshape(2, 3),
            np.arange(4, dtype=ml_dtypes.bfloat16),
            np.array(7, dtype=np.int64),
            np.empty((0, 5), dtype=np.float32),
            np.array([True, False]),
        ],
        ids=["matrix", "bfloat16", "scalar", "empty", "bool"],
    )
    def test_arrays_are_written_as_their_bytes(self, tier: Tier, raw: Raw, buffer: Buffer) -> None:
        """An array of any dtype and shape stands in the file as its row-major bytes."""
        expected = np.asarray(buffer).tobytes()
        writer = tier.create("file", len(expected))
        writer.write(0, [buffer])
        writer.finish()
        assert raw.read("file") == expected

    def test_non_contiguous_array_is_refused(self, tier: Tier) -> None:
        """An array with strides would need a copy, so it is refused rather than written in another order."""
        writer = tier.create("file", 100)
        with pytest.raises(InvalidRequest, match="contiguous"):
            writer.write(0, [np.zeros((4, 4), np.uint8)[:, ::2]])
        writer.discard()

    def test_thousands_of_buffers_in_one_write(self, tier: Tier, raw: Raw) -> None:
        """A write takes more buffers than the system takes in one call."""
        pieces = [bytes([n % 251]) * (n % 5) for n in range(5000)]
        whole = b"".join(pieces)
        writer = tier.create("file", len(whole))
        writer.write(0, pieces)
        writer.finish()
        assert raw.read("file") == whole

    def test_threads_write_disjoint_ranges(self, tier: Tier, raw: Raw) -> None:
        """Several threads fill one file."""
        writer = tier.create("file", 64 * 100)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: writer.write(n * 64, [bytes([n]) * 64]), range(100)))
        writer.finish()
        assert raw.read("file") == b"".join(bytes([n]) * 64 for n in range(100))

    def test_writers_of_several_nodes_fill_one_file(self, tier: Tier, raw: Raw) -> None:
        """Each joins it, writes ranges of its own and finishes; a writer that joins later takes nothing away."""
        size = 3 * BLOCK + 100
        content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        first, second = tier.join("run/staging/x/file", size), tier.join("run/staging/x/file", size)
        second.write(BLOCK, [content[BLOCK : 2 * BLOCK]])
        second.finish()
        first.write(0, [content[:BLOCK]])
        third = tier.join("run/staging/x/file", size)
        third.write(2 * BLOCK, [content[2 * BLOCK :]])
        third.finish()
        first.finish()
        assert raw.read("run/staging/x/file") == content.tobytes()

    def test_what_is_another_file_is_not_joined(self, tier: Tier, raw: Raw) -> None:
        """A longer one, and a directory."""
        tier.put("file", b"longer than that")
        tier.put("directory/file", b"")
        for path in ("file", "directory"):
            with pytest.raises(StorageFailed):
                tier.join(path, 3)
        assert raw.read("file") == b"longer than that"
        with pytest.raises(InvalidRequest):
            tier.join("negative", -1)

    def test_aligned_blocks_and_the_rest(self, tier: Tier, raw: Raw) -> None:
        """A large file written in aligned blocks from aligned memory, in any order, with a last block that is not whole."""
        size = 3 * 2**20 + 1234
        content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        writer = tier.create("file", size)
        assert BLOCK % writer.alignment == 0
        memory = aligned(2**20)
        for offset in (2**21, 0, 2**20, 3 * 2**20):
            part = content[offset : offset + 2**20]
            memory[: part.size] = part
            writer.write(offset, [memory[: part.size]])
        writer.finish()
        assert raw.read("file") == content.tobytes()

    def test_blocks_and_small_pieces_mixed(self, tier: Tier, raw: Raw) -> None:
        """Unaligned offsets, lengths and memory in a large file: every byte still stands where it was written."""
        size = 2**21
        content = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        memory = aligned(size)
        memory[:] = content
        writer = tier.create("file", size)
        ends = [0, 100, BLOCK, 3 * BLOCK, 3 * BLOCK + 7, 2**20, size]
        for start, stop in sorted(itertools.pairwise(ends), key=lambda pair: pair[0] % 3):
            writer.write(start, [memory[start:stop]])
        writer.finish()
        assert raw.read("file") == content.tobytes()

    def test_read_stored(self, tier: Tier, raw: Raw) -> None:
        """What is stored reads back by aligned and by other ranges; the count is short only at the end of the file."""
        content = np.random.default_rng(2).integers(0, 256, 5 * BLOCK + 77, np.uint8)
        raw.write("file", content.tobytes())
        memory = aligned(8 * BLOCK)
        for start in (0, BLOCK, 4 * BLOCK, 5 * BLOCK, 6 * BLOCK, 13):
            for length in (BLOCK, 2 * BLOCK, 5):
                expected = content[start : start + length]
                assert tier.read_stored("file", start, memory[:length]) == expected.size
                assert np.array_equal(memory[: expected.size], expected)
        for path in ("missing", "missing/file"):
            with pytest.raises(NoSuchResource):
                tier.read_stored(path, 0, memory)

    @pytest.mark.parametrize(("offset", "data"), [(5, b"xyz"), (-1, b"x"), (8, b"")])
    def test_write_outside_the_file_is_refused(self, tier: Tier, raw: Raw, offset: int, data: bytes) -> None:
        """A file never grows beyond the size it was made with."""
        writer = tier.create("file", 7)
        with pytest.raises(InvalidRequest):
            writer.write(offset, [data])
        writer.finish()
        assert raw.read("file") == b"\0" * 7

    def test_closed_writer_writes_no_more(self, tier: Tier) -> None:
        """After finish or discard, write and finish fail, and discard does nothing."""
        for path, close in (("a", "finish"), ("b", "discard")):
            writer = tier.create(path, 1)
            getattr(writer, close)()
            writer.discard()
            with pytest.raises(StorageFailed):
                writer.write(0, [b"x"])
            with pytest.raises(StorageFailed):
                writer.finish()

    def test_create_and_put_never_overwrite(self, tier: Tier, raw: Raw) -> None:
        """Something at the path already is refused and left as it is."""
        raw.write("run/file", b"old")
        with pytest.raises(StorageFailed):
            tier.create("run/file", 3)
        with pytest.raises(StorageFailed):
            tier.put("run/file", b"new")
        assert raw.read("run/file") == b"old"

    def test_create_of_a_negative_size_is_refused(self, tier: Tier) -> None:
        """A size below zero leaves nothing behind."""
        with pytest.raises(InvalidRequest):
            tier.create("file", -1)
        assert tier.list("") == []

    def test_put_makes_parents(self, tier: Tier, raw: Raw) -> None:
        """A small file appears with the directories above it."""
        tier.put("a/b/c/COMMIT", b"{}")
        assert raw.read("a/b/c/COMMIT") == b"{}"

    def test_idle(self, tier: Tier) -> None:
        """What is not there is not idle; of what is, nobody has to know the storage's clock."""
        assert tier.idle_s("run/staging/x") == 0.0
        tier.put("run/staging/x/file", b"data")
        assert tier.idle_s("run/staging/x") >= 0.0

    def test_replace_of_a_directory_is_refused(self, tier: Tier, raw: Raw) -> None:
        """A directory is never replaced by a file."""
        raw.write("run/run.json/file", b"x")
        with pytest.raises(StorageFailed):
            tier.replace("run/run.json", b"{}")
        assert raw.read("run/run.json/file") == b"x"

    def test_supplant_puts_one_file_in_the_place_of_another(self, tier: Tier, raw: Raw) -> None:
        """The new file has the old one's name, or a free one, and its own no more; the neighbours stay."""
        raw.write("run/checkpoints/a/file", b"a long damaged file")
        raw.write("run/checkpoints/a/other", b"2")
        for number, target in enumerate(("file", "missing")):
            tier.put("run/staging/new", f"sound {number}".encode())
            tier.supplant("run/staging/new", f"run/checkpoints/a/{target}")
        assert tier.list("run/checkpoints/a") == ["file", "missing", "other"]
        assert raw.read("run/checkpoints/a/file") == b"sound 0"
        assert tier.list("run/staging") == []

    def test_a_link_is_the_same_file_under_another_name(self, tier: Tier, raw: Raw) -> None:
        """It outlives the first name. Where the storage knows none, nothing is there."""
        tier.put("run/checkpoints/a/file", b"content")
        if not tier.link("run/checkpoints/a/file", "run/staging/b/file"):
            assert tier.list("run/staging/b") == []
            return
        assert raw.read("run/staging/b/file") == b"content"
        tier.put("run/staging/b/other", b"content")
        (both,), mine = (tier.identities(path) for path in ("run/checkpoints/a", "run/staging/b"))
        assert both == "file" and tier.identities("run/checkpoints/a")["file"] == mine["file"]
        assert (mine["file"].names, mine["other"].names, mine["file"].bytes) == (2, 1, 7)
        assert mine["file"].id != mine["other"].id
        tier.remove_tree("run/checkpoints/a")
        assert tier.read("run/staging/b/file") == b"content"
        assert tier.identities("run/staging/b")["file"].names == 1 and tier.identities("run/checkpoints/a") == {}

    def test_a_link_takes_no_other_place(self, tier: Tier, raw: Raw) -> None:
        """What stands there stays; what is no file has no other name."""
        tier.put("a/file", b"one")
        tier.put("b/file", b"two")
        with pytest.raises(StorageFailed):
            tier.link("a/file", "b/file")
        for source in ("a/none", "none/file", "a"):
            with pytest.raises(NoSuchResource):
                tier.link(source, "c/file")
        for path in ESCAPES:
            with pytest.raises(InvalidRequest):
                tier.link("a/file", path)
        assert raw.read("b/file") == b"two"

    def test_supplant_refuses_what_is_no_file(self, tier: Tier, raw: Raw) -> None:
        """A missing source is named, a directory is neither moved nor replaced."""
        raw.write("a/file", b"1")
        raw.write("b/directory/file", b"2")
        for source in ("missing", "b/directory"):
            with pytest.raises(NoSuchResource):
                tier.supplant(source, "a/file")
        with pytest.raises(StorageFailed):
            tier.supplant("a/file", "b/directory")
        assert (raw.read("a/file"), raw.read("b/directory/file")) == (b"1", b"2")

    def test_sync_directory(self, tier: Tier) -> None:
        """The root and every directory can be made durable; one that is not there is named."""
        tier.put("a/b/file", b"x")
        tier.sync_directory("a/b")
        tier.sync_directory("")
        with pytest.raises(NoSuchResource):
            tier.sync_directory("a/c")

    def test_publish_moves_everything(self, tier: Tier, raw: Raw) -> None:
        """A published directory has all it had, under its new name alone; the target's parents are made."""
        raw.write("run/staging/step-00000001.a1/COMMIT", b"1")
        raw.write("run/staging/step-00000001.a1/sub/file", b"2")
        raw.write("run/staging/step-00000001.a10/file", b"3")
        tier.publish("run/staging/step-00000001.a1", "run/checkpoints/step-00000001")
        assert raw.read("run/checkpoints/step-00000001/COMMIT") == b"1"
        assert raw.read("run/checkpoints/step-00000001/sub/file") == b"2"
        assert tier.list("run/staging") == ["step-00000001.a10"]
        assert tier.list("run/checkpoints") == ["step-00000001"]

    @pytest.mark.parametrize("taken", ["b/file", "b"], ids=["directory", "file"])
    def test_publish_refuses_a_taken_target(self, tier: Tier, raw: Raw, taken: str) -> None:
        """Whatever stands at the target stays, and so does the source."""
        raw.write("a/new", b"new")
        raw.write(taken, b"old")
        with pytest.raises(AlreadyCommitted):
            tier.publish("a", "b")
        assert (raw.read("a/new"), raw.read(taken)) == (b"new", b"old")

    def test_publish_refuses_an_empty_directory_as_target(self, tier: Tier) -> None:
        """An empty directory is a taken target too, although rename alone would replace it."""
        tier.put("a/file", b"x")
        tier.put("b/file", b"x")
        tier.remove_file("b/file")
        with pytest.raises(AlreadyCommitted):
            tier.publish("a", "b")
        assert tier.list("a") == ["file"]

    def test_publish_of_nothing(self, tier: Tier, raw: Raw) -> None:
        """A source that is not there, or is a file, is refused."""
        raw.write("file", b"x")
        with pytest.raises(NoSuchResource):
            tier.publish("a", "b")
        with pytest.raises(StorageFailed):
            tier.publish("file", "b")
        assert tier.list("") == ["file"]

    def test_read(self, tier: Tier, raw: Raw) -> None:
        """A range is cut at the end of the file."""
        raw.write("file", b"0123456789")
        assert tier.read("file") == b"0123456789"
        assert tier.read("file", 4) == b"456789"
        assert tier.read("file", 2, 3) == b"234"
        assert tier.read("file", 8, 2**40) == b"89"
        assert tier.read("file", 11, 5) == b""
        assert tier.read("file", 3, 0) == b""

    def test_read_into(self, tier: Tier, raw: Raw) -> None:
        """A buffer is filled, and the count is short only at the end of the file."""
        raw.write("file", bytes(range(10)))
        array = np.zeros(2, np.uint32)
        assert tier.read_into("file", 1, array) == 8
        assert array.tobytes() == bytes(range(1, 9))
        short = bytearray(b"\xff" * 5)
        assert tier.read_into("file", 7, memoryview(short)) == 3
        assert short == b"\7\x08\x09\xff\xff"
        assert tier.read_into("file", 20, short) == 0

    def test_reading_what_is_no_file(self, tier: Tier, raw: Raw) -> None:
        """A missing file and a directory are both named as no file."""
        raw.write("directory/file", b"x")
        for path in ("missing", "directory", "missing/file"):
            with pytest.raises(NoSuchResource):
                tier.read(path)
            with pytest.raises(NoSuchResource):
                tier.read_into(path, 0, bytearray(1))

    def test_reading_before_the_beginning_is_refused(self, tier: Tier, raw: Raw) -> None:
        """Negative offsets and lengths never count from the end."""
        raw.write("file", b"abc")
        for offset, length in ((-1, 1), (0, -1), (-1, None)):
            with pytest.raises(InvalidRequest):
                tier.read("file", offset, length)
        with pytest.raises(InvalidRequest):
            tier.read_into("file", -1, bytearray(1))

    def test_size(self, tier: Tier, raw: Raw) -> None:
        """A file has a size; a directory, a path below a file and nothing at all have none."""
        raw.write("directory/file", b"abc")
        raw.write("directory/empty", b"")
        assert tier.size("directory/file") == 3
        assert tier.size("directory/empty") == 0
        for path in ("directory", "missing", "missing/file", "directory/file/below"):
            assert tier.size(path) is None

    def test_list(self, tier: Tier, raw: Raw) -> None:
        """Names of files and directories, sorted; what is not a directory has none."""
        for path in ("b/file", "a", "c", "b/x/y"):
            raw.write(path, b"")
        assert tier.list("") == ["a", "b", "c"]
        assert tier.list("b") == ["file", "x"]
        assert tier.list("a") == tier.list("missing") == tier.list("missing/below") == []

    def test_the_stamp_of_a_file(self, tier: Tier, raw: Raw) -> None:
        """The same while nothing changes; another when it is replaced by as many bytes; none without a file."""
        tier.put("top/file", b"x")
        before = tier.stamp("top/file")
        tier.put("top/other", b"x")
        assert tier.stamp("top/file") == before != ""
        tier.replace("top/file", b"y")
        replaced = tier.stamp("top/file")
        assert replaced != before
        tier.remove_file("top/file")
        assert tier.stamp("top/file") == tier.stamp("top") == tier.stamp("missing/file") == ""

    def test_stamps(self, tier: Tier, raw: Raw) -> None:
        """Directories that hold all the names, by name, and what is asked for itself; nothing where there is none."""
        for path in ("top/a/ONE", "top/a/TWO", "top/b/ONE", "top/c/TWO/below", "top/c/ONE", "top/ONE", "top/TWO"):
            tier.put(path, b"x")
        found = tier.stamps("top", ("ONE", "TWO"))
        assert set(found) == {"", "a"}
        assert tier.stamps("top/a", ("ONE", "TWO")) == {"": found["a"]}
        assert set(tier.stamps("top", ("ONE",))) == {"", "a", "b", "c"}
        assert tier.stamps("missing", ("ONE",)) == tier.stamps("top/a/ONE", ("ONE",)) == {}

    def test_stamps_tell_changes(self, tier: Tier, raw: Raw) -> None:
        """The same while nothing changes and where a directory is moved; another when a file is replaced or made anew."""
        for name in ("ONE", "TWO"):
            tier.put(f"top/a/{name}", b"x")
        before = tier.stamps("top", ("ONE", "TWO"))["a"]
        tier.put("top/a/other", b"x")
        tier.publish("top/a", "top/b")
        assert tier.stamps("top", ("ONE", "TWO")) == {"b": before}
        tier.replace("top/b/TWO", b"y")
        replaced = tier.stamps("top", ("ONE", "TWO"))["b"]
        assert replaced != before
        tier.remove_file("top/b/ONE")
        assert tier.stamps("top", ("ONE", "TWO")) == {}
        tier.put("top/b/ONE", b"longer")
        assert tier.stamps("top", ("ONE", "TWO"))["b"] != replaced

    def test_remove_tree(self, tier: Tier, raw: Raw) -> None:
        """A directory goes with all below it, a file goes, nothing is fine; names that only begin alike stay."""
        for path in ("a/b/c/file", "a/b/file", "a/bc/file", "a/file"):
            raw.write(path, b"x")
        tier.remove_tree("a/b")
        assert tier.list("a") == ["bc", "file"]
        tier.remove_tree("a/file")
        tier.remove_tree("a/b")
        tier.remove_tree("nothing/at/all")
        assert tier.list("a") == ["bc"]

    def test_remove_empty(self, tier: Tier, raw: Raw) -> None:
        """An empty directory goes, nothing is fine; a directory that holds something, and a file, stay."""
        raw.write("a/b/file", b"x")
        assert not tier.remove_empty("a") and not tier.remove_empty("a/b") and not tier.remove_empty("a/b/file")
        tier.remove_file("a/b/file")
        assert tier.remove_empty("a/b") and tier.list("a") == []
        assert tier.remove_empty("a") and tier.remove_empty("a") and tier.remove_empty("nothing/at/all")

    def test_free_bytes(self, tier: Tier) -> None:
        """There is room in an empty tier."""
        assert tier.free_bytes() > 0

    @pytest.mark.parametrize("path", ESCAPES)
    def test_paths_out_of_the_root_are_refused(self, tier: Tier, path: str) -> None:
        """No call takes a path that is absolute, climbs, or has two spellings."""
        calls = [
            lambda: tier.create(path, 1),
            lambda: tier.put(path, b""),
            lambda: tier.replace(path, b""),
            lambda: tier.sync_directory(path),
            lambda: tier.publish(path, "target"),
            lambda: tier.publish("source", path),
            lambda: tier.supplant(path, "target"),
            lambda: tier.supplant("source", path),
            lambda: tier.read(path),
            lambda: tier.read_into(path, 0, bytearray(1)),
            lambda: tier.size(path),
            lambda: tier.list(path),
            lambda: tier.remove_file(path),
            lambda: tier.remove_tree(path),
            lambda: tier.remove_empty(path),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest):
                call()

    def test_the_root_itself_is_not_removed(self, tier: Tier, raw: Raw) -> None:
        """The empty path means the root only where a directory is read."""
        raw.write("file", b"x")
        with pytest.raises(InvalidRequest):
            tier.remove_tree("")
        with pytest.raises(InvalidRequest):
            tier.publish("", "target")
        assert raw.read("file") == b"x"

    def test_one_holds_a_name_at_a_time(self, tier: Tier) -> None:
        """Whoever comes second is refused by name, whoever comes later gets it; nothing is left."""
        with tier.hold("a/.out.lock"):
            with pytest.raises(InUse, match=r"a/\.out\.lock"), tier.hold("a/.out.lock"):
                raise AssertionError("two hold one name")
            with tier.hold("a/.other.lock"), tier.hold(".out.lock"):
                pass
        with pytest.raises(KeyError), tier.hold("a/.out.lock"):
            raise KeyError
        with tier.hold("a/.out.lock"):
            pass
        assert tier.list("a") == []

    def test_threads_hold_a_name_one_after_the_other(self, tier: Tier) -> None:
        """Never two at once, however often it is given on."""
        inside: list[int] = []

        def hold(number: int) -> int:
            times = 0
            while times < 20:
                try:
                    with tier.hold(".out.lock"):
                        inside.append(number)
                        assert inside == [number]
                        inside.clear()
                        times += 1
                except InUse:
                    time.sleep(0)
            return times

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(hold, range(3))) == [20, 20, 20]
