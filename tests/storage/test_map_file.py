"""A named map in a file of the root: no change is lost, and a file that is held or damaged stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from holdfast_formats.errors import CorruptManifest, InUse
from holdfast_service.storage import MemoryTier, PosixTier, Tier, map_file
from holdfast_service.storage.map_file import MapContent, MapFile

FILE = ".sizes.json"


class Sizes(MapContent[int]):
    entries: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict, alias="sizes")


def sizes(tier: Tier) -> MapFile[int]:
    return MapFile(tier, FILE, Sizes, "move the file away")


def put(name: str, size: int) -> Callable[[dict[str, int]], None]:
    return lambda entries: entries.update({name: size})


@pytest.mark.parametrize("writers", ["threads", "daemons"])
def test_changes_at_once_are_all_kept(tmp_path: Path, writers: str) -> None:
    """By threads of one daemon, and by several daemons, each with its own objects."""
    own = sizes(PosixTier(tmp_path))

    def write(first: int) -> None:
        file = own if writers == "threads" else sizes(PosixTier(tmp_path))
        for number in range(first, first + 10):
            file.change(put(f"n{number:02}", number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(0, 40, 10)))
    assert own.read() == {f"n{number:02}": number for number in range(40)}
    assert [path.name for path in tmp_path.iterdir()] == [FILE], "the lock is gone"


def test_a_change_that_waits_in_vain_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(2**20)
    monkeypatch.setattr(map_file, "WAIT_S", 0.05)
    with tier.hold(f"{FILE}.lock"), pytest.raises(InUse):
        sizes(tier).change(put("a", 1))
    assert sizes(tier).read() == {}
    sizes(tier).change(put("a", 1))
    assert sizes(tier).read() == {"a": 1}


def test_what_would_not_be_read_again_is_not_written() -> None:
    """Nor is a damaged file replaced: a person may still mend it."""
    tier = MemoryTier(2**20)
    sizes(tier).change(put("a", 1))
    with pytest.raises(CorruptManifest, match=r"sizes\.b"):
        sizes(tier).change(put("b", -1))
    assert sizes(tier).read() == {"a": 1}
    tier.replace(FILE, b'{"sizes": {"a": 1, "a": 2}}')
    with pytest.raises(CorruptManifest, match="twice"):
        sizes(tier).change(put("b", 2))
    assert tier.read(FILE) == b'{"sizes": {"a": 1, "a": 2}}'


def test_a_change_by_another_daemon_is_kept() -> None:
    """It comes between the reading and the writing of this one, which then begins again with what it finds."""
    tier = MemoryTier(2**20)
    calls: list[dict[str, int]] = []

    def act(entries: dict[str, int]) -> None:
        calls.append(dict(entries))
        if len(calls) == 1:
            sizes(tier).change(put("theirs", 1))
        entries["ours"] = 2

    sizes(tier).change(act)
    assert calls == [{}, {"theirs": 1}] and sizes(tier).read() == {"ours": 2, "theirs": 1}


def test_a_file_that_others_keep_changing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of trying for ever."""
    tier = MemoryTier(2**20)
    monkeypatch.setattr(map_file, "WAIT_S", 0.05)
    counted = itertools.count()
    with pytest.raises(InUse, match="keep changing"):
        sizes(tier).change(lambda entries: sizes(tier).change(put("theirs", next(counted))))
    assert 1 < next(counted) - 1 == sizes(tier).read()["theirs"]
