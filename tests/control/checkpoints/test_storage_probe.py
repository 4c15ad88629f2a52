"""A look finds what is missing, cut or replaced, and reads a manifest once."""

from __future__ import annotations

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest, NoSuchCheckpoint, NotCommitted
from holdfast_service.control.checkpoints.storage_probe import StorageProbe
from holdfast_service.storage import MemoryTier
from tests.control.published import a_manifest, put_checkpoint

RUN, DIRECTORY = "run", naming.checkpoint_path("run", 1)


@pytest.fixture
def tier() -> MemoryTier:
    made = MemoryTier()
    put_checkpoint(made, a_manifest(RUN, 1))
    return made


def test_a_whole_one_looks_the_same_until_a_file_is_written(tier: MemoryTier) -> None:
    """Also where the file that is written has the same bytes: that has to be read to be known."""
    probe = StorageProbe(tier)
    before = probe.probe(RUN, 1)
    assert probe.probe(RUN, 1) == before == StorageProbe(tier).proof(RUN, 1)
    tier.replace(f"{DIRECTORY}/{naming.STATE}", b"{}")
    assert probe.probe(RUN, 1) != before


@pytest.mark.parametrize(
    ("file", "error"),
    [(naming.COMMIT, NotCommitted), (naming.MANIFEST, CorruptManifest), (naming.STATE, CorruptManifest)],
)
def test_what_lacks_a_file_is_damaged(tier: MemoryTier, file: str, error: type[Exception]) -> None:
    """The file is named; what was seen before does not count."""
    probe = StorageProbe(tier)
    probe.probe(RUN, 1)
    tier.remove_file(f"{DIRECTORY}/{file}")
    with pytest.raises(error, match=file):
        probe.probe(RUN, 1)
    assert probe.proof(RUN, 1) == ""
    tier.remove_tree(DIRECTORY)
    with pytest.raises(NoSuchCheckpoint):
        probe.probe(RUN, 1)


def test_a_file_of_another_length_is_damaged(tier: MemoryTier) -> None:
    """The length that the manifest states is compared."""
    tier.replace(f"{DIRECTORY}/{naming.STATE}", b"{} ")
    with pytest.raises(CorruptManifest, match="has 3 bytes, not 2"):
        StorageProbe(tier).probe(RUN, 1)
