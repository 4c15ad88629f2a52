"""CRC-32 of members of zip files: compared whatever the order in which they are read, and damage is named."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CorruptExtent, CorruptManifest
from holdfast_formats.mapping.listing import StoredMember
from holdfast_service.daemon.copying.member_sums import MemberPlace, MemberSums
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixTier
from tests.daemon.copies_world import copies_world
from tests.job_requests import an_import
from tests.wings.convert.transfers import Transfers

DATA = np.random.default_rng(5).integers(0, 256, 400, np.uint8)
STATE = {"a.weight": torch.arange(4000.0).reshape(40, 100), "b.bias": torch.arange(77.0), "n": torch.tensor(3)}


@given(
    members=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    reads=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 200)), max_size=12),
    flipped=st.none() | st.integers(0, 399),
)
def test_any_reads_in_any_order(members: list[int], reads: list[tuple[int, int]], flipped: int | None) -> None:
    """A member is found damaged exactly if one of its bytes is, and no byte is read a third time."""
    there = DATA.copy()
    places, at = [], 3
    for number, length in enumerate(members):
        places.append(MemberPlace("f", StoredMember(f"m{number}", at, length, crc32(DATA[at : at + length]))))
        at += length + 2
    if flipped is not None:
        there[flipped] ^= 1
    sums = MemberSums()
    sums.watch(places)

    def read_into(file: str, offset: int, buffer: np.ndarray) -> int:
        found = there[offset : offset + buffer.nbytes]
        buffer[: found.nbytes] = found
        sums.passed(file, offset, found.data)
        return found.nbytes

    for offset, length in reads:
        read_into("f", offset, np.empty(length, np.uint8))
    hurt = [place for place in places if flipped is not None and place.member.start <= flipped < place.member.stop]
    for place in places:
        if place in hurt:
            with pytest.raises(CorruptExtent) as caught:
                sums.check([place], read_into)
            assert caught.value.members["member"] == place.member.name and caught.value.members["file"] == "f"
        else:
            sums.check([place], read_into)


def test_a_file_that_is_cut_meanwhile() -> None:
    """It is named."""
    sums = MemberSums()
    place = MemberPlace("f", StoredMember("m", 0, 10, 1))
    sums.watch([place])
    with pytest.raises(CorruptManifest, match="f was truncated"):
        sums.check([place], lambda file, offset, buffer: 0)


def _torch(directory: Path) -> Path:
    torch.save(STATE, directory / "model.pt")
    return directory / "model.pt"


def _bin(directory: Path) -> Path:
    torch.save(STATE, directory / "pytorch_model.bin")
    return directory / "pytorch_model.bin"


def _dcp(directory: Path) -> Path:
    dcp.save({"model": STATE}, checkpoint_id=directory, no_dist=True)
    return directory / "__0_0.distcp"


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Transfers]:
    with copies_world(tmp_path, replicas=()) as made:
        yield Transfers(made.control, made.repairer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [_torch, _bin, _dcp])
def test_damage_in_a_source_is_named(transfers: Transfers, tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """Of a tensor, of a number, and of the pickle that says what they are; the sound file is imported, and nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    path = write(source)
    sound = path.read_bytes()
    tier = PosixTier(source)
    wanted = an_import("mine", 0)
    first = sound.index(np.arange(4000, dtype=np.float32).tobytes()[64:128])
    for at in (first, first + 9000, sound.index(np.int64(3).tobytes() + b"PK")):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        with pytest.raises(CorruptExtent, match="CRC-32") as caught:
            transfers.bring(tier, wanted, Quiet())
        assert caught.value.members["file"] == path.name and "/data/" in caught.value.members["member"]
        assert not [name for name in os.listdir(tmp_path / "root" / "mine" / "staging")]
    path.write_bytes(sound)
    assert transfers.bring(tier, wanted, Quiet())["tensors"] == 3


def test_damage_in_the_pickle(transfers: Transfers, tmp_path: Path) -> None:
    """A name that is another one now is not believed."""
    source = tmp_path / "source"
    source.mkdir()
    path = _torch(source)
    path.write_bytes(path.read_bytes().replace(b"b.bias", b"b.bjas", 1))
    with pytest.raises(CorruptExtent, match=r"data\.pkl"):
        transfers.bring(PosixTier(source), an_import("mine", 0), Quiet())


def test_torch_was_told_not_to_compute_them(transfers: Transfers, tmp_path: Path) -> None:
    """Then there is nothing to compare with, and the file is imported."""
    source = tmp_path / "source"
    source.mkdir()
    torch.serialization.set_crc32_options(False)
    try:
        path = _torch(source)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as opened:
        assert {one.CRC for one in opened.infolist()} == {0}
    assert transfers.bring(PosixTier(source), an_import("mine", 0), Quiet())["tensors"] == 3
