"""The exam that everything which stores control files takes. A test subclasses `RecordsSuite` and gives the two fixtures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import pytest

from holdfast_formats.errors import InUse, NoSuchResource
from holdfast_service.storage import Records


class Raw(Protocol):
    """Access to what a tier stores that does not go through the tier."""

    def write(self, path: str, data: bytes) -> None: ...
    def read(self, path: str) -> bytes | None: ...


class RecordsSuite:
    """Subclasses give the fixtures `records`, fresh and empty, and `raw`, the way past it."""

    def test_put_first_makes_a_file_once(self, records: Records, raw: Raw) -> None:
        """Of many who make the same file at once, one does, and it is whole; nothing else is left behind."""
        assert records.put_first("claims/one", b"first") and not records.put_first("claims/one", b"second")
        assert raw.read("claims/one") == b"first"
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda number: records.put_first("claims/two", bytes([number]) * 1000), range(8)))
        assert made.count(True) == 1 and raw.read("claims/two") == bytes([made.index(True)]) * 1000
        assert records.list("claims") == ["one", "two"]

    def test_replace_makes_and_replaces(self, records: Records, raw: Raw) -> None:
        """A replaced file has the new bytes alone, and nothing else is left in the directory."""
        records.replace("run/run.json", b"a long first text")
        records.replace("run/run.json", b"short")
        assert raw.read("run/run.json") == b"short"
        assert records.list("run") == ["run.json"]

    def test_remove_file(self, records: Records, raw: Raw) -> None:
        """One file goes, its neighbours stay; a missing one is named."""
        raw.write("run/a", b"1")
        raw.write("run/b", b"2")
        records.remove_file("run/a")
        assert records.list("run") == ["b"]
        with pytest.raises(NoSuchResource):
            records.remove_file("run/a")

    def test_remove_empty_keeps_what_is_there(self, records: Records, raw: Raw) -> None:
        raw.write("run/rooms/file", b"1")
        assert not records.is_empty("run/rooms") and not records.is_empty("run/rooms/file")
        assert not records.remove_empty("run/rooms") and not records.remove_empty("run/rooms/file")
        records.remove_file("run/rooms/file")
        assert records.is_empty("run/rooms") and records.remove_empty("run/rooms") and records.remove_empty("run")

    def test_swap_needs_the_bytes_that_it_names(self, records: Records, raw: Raw) -> None:
        """Other bytes, a missing file and an unexpected one stay as they are; nothing else is left behind."""
        assert not records.swap("run/run.json", b"{}", b"new") and records.list("run") == []
        assert records.swap("run/run.json", None, b"first") and not records.swap("run/run.json", None, b"second")
        assert not records.swap("run/run.json", b"firs", b"second") and raw.read("run/run.json") == b"first"
        assert records.swap("run/run.json", b"first", b"") and records.swap("run/run.json", b"", b"third")
        assert raw.read("run/run.json") == b"third" and records.list("run") == ["run.json"]

    def test_of_swaps_at_once_none_is_lost(self, records: Records) -> None:
        """Each of 40 additions by four threads finds the ones before."""
        records.replace("count", b"0")

        def add(_: int) -> None:
            for _ in range(10):
                while True:
                    before = records.read("count")
                    with suppress(InUse):
                        if records.swap("count", before, str(int(before) + 1).encode()):
                            break

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(4)))
        assert records.read("count") == b"40"
