"""A listing of another program's checkpoint stands in for a committed one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping import equality
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.exports.source import of_committed, of_listing
from holdfast_service.wings.convert.foreign.hugging_face import KIND
from tests.checkpoints import build

NAN = np.array([0x7FC00001, 5, 0x7FC00000], np.uint32).view(np.float32)
ARRAYS = {
    "layers.10.w": np.arange(300, dtype=np.float32),
    "layers.2.w": np.arange(300, dtype=np.float32),
    "layers.3.w": np.where(np.arange(300) == 299, -1, np.arange(300)).astype(np.float32),
    "nan": NAN,
    "same nan": NAN.copy(),
    "other nan": NAN[::-1].copy(),
    "plain": np.arange(300, dtype=np.int32),
}


def key(name: str) -> TensorKey:
    return TensorKey("model", name)


def listed(directory: Path) -> tuple[PosixTier, ForeignListing]:
    directory.mkdir()
    save_file(ARRAYS, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text("{}")
    files = PosixTier(directory)
    return files, KIND.read(files, ReadOptions())


@pytest.mark.parametrize("kind", ["listing", "committed"])
def test_equal_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Bit by bit, over whatever is read at once, or by digests."""
    monkeypatch.setattr(equality, "COMPARED_BYTES", 64)
    if kind == "listing":
        source = of_listing(*listed(tmp_path / "hf"))
    else:
        built = build(tmp_path / "ours", {"model": ARRAYS})
        source = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest)
    assert source.equal(key("layers.10.w"), key("layers.2.w")) and source.equal(key("nan"), key("same nan"))
    for one, other in (("layers.10.w", "layers.3.w"), ("nan", "other nan"), ("layers.10.w", "plain"), ("plain", "nan")):
        assert not source.equal(key(one), key(other))


def test_a_listing_has_the_order_of_a_checkpoint(tmp_path: Path) -> None:
    """In which an import would store it, with the assets that were translated, and JSON as it is stored."""
    files, listing = listed(tmp_path / "hf")
    listing = listing._replace(
        documents={"optim": {"optimizer": {"b": (1, 2), "a": {"z": 1, "y": 2}}}}, made_assets={"made.json": b"[]"}
    )
    source = of_listing(files, listing)
    built = build(tmp_path / "ours", {"model": ARRAYS})
    ours = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest)
    assert list(source.group("model")) == list(ours.group("model")) and source.groups == ("model",)
    assert source.assets == ("config.json", "made.json")
    assert [source.read_asset(name) for name in source.assets] == [b"{}", b"[]"]
    assert source.listing.documents["optim"] == {"optimizer": {"a": {"y": 2, "z": 1}, "b": [1, 2]}}


def test_names_that_no_checkpoint_can_have(tmp_path: Path) -> None:
    """A tensor's, and a file's that would lead out of the target."""
    files, listing = listed(tmp_path / "hf")
    with pytest.raises(InvalidRequest):
        of_listing(files, listing._replace(made_assets={"../out": b""}))
    (first, tensor), *_ = listing.tensors.items()
    twice = {first: tensor, key("again"): tensor}
    with pytest.raises(StateMismatch, match="two tensors"):
        of_listing(files, listing._replace(tensors=twice))


def test_tied_tensors_are_listed_once_in_their_group(tmp_path: Path) -> None:
    """Under the name that they are stored under; the other name is a tensor of the listing too."""
    built = build(tmp_path / "ours", {"model": ARRAYS}, aliases={"model": {"head": "plain"}})
    source = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest)
    assert "head" not in source.group("model") and source.ties("model") == {"head": "plain"}
    assert source.ties("optim") == {} and source.listing.tensors[key("head")].pieces[0].file
    assert source.equal(key("head"), key("plain"))
