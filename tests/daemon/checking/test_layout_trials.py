"""A check tries other layouts: what a rank of them would hold comes back as it was stored, or is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast_formats.errors import CorruptExtent, CorruptManifest
from holdfast_formats.layout.rank_tensors import HeldTensors, LayoutHoldings
from holdfast_service.daemon.checking import layout_trials
from holdfast_service.daemon.checking.layout_trials import TRIED, LayoutTrials, identical
from holdfast_service.daemon.checking.verifier import examine
from holdfast_service.storage import PosixTier
from tests.checkpoints import build, varied_arrays

STEPS = range(1, 25)


def test_whatever_is_drawn_restores_what_is_stored(tmp_path: Path) -> None:
    """Many steps, so that every layout is drawn: dtypes, scalars, empty tensors, tensors of several extents."""
    tier = PosixTier(tmp_path)
    drawn: set[str] = set()
    for step in STEPS:
        made = build(tmp_path / str(step), step=step).manifest
        tried = LayoutTrials(tier, str(step)).result(made)
        assert len(tried.layouts) == TRIED and tried.bytes > 0
        assert LayoutTrials(tier, str(step)).result(made) == tried
        drawn |= {text.partition(" rank ")[0] for text in tried.layouts}
    assert drawn == set(layout_trials.LAYOUTS)


def test_bytes_that_were_not_proven_are_not_compared(tmp_path: Path) -> None:
    """Both ways would bring the same wrong bytes: the extents' digests tell."""
    built = build(tmp_path / "c")
    for path in built.path.glob("*.safetensors"):
        header = built.manifest.file(path.name).header_bytes  # type: ignore[union-attr]
        path.write_bytes(path.read_bytes()[:header] + b"\xa5" * (path.stat().st_size - header))
    with pytest.raises(CorruptExtent):
        LayoutTrials(PosixTier(tmp_path), "c").result(built.manifest)


@pytest.mark.parametrize("config", [b"?", b"[]", b'{"model_type": 5}', b"{}"])
def test_a_config_that_says_nothing_is_passed_over(tmp_path: Path, config: bytes) -> None:
    """Rules are found by names and shapes then, as every reader does; one that is refused is no damage."""
    made = build(tmp_path / "c", config=config).manifest
    assert len(LayoutTrials(PosixTier(tmp_path), "c").result(made).layouts) in (0, TRIED)


def test_a_layout_that_loses_a_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the arithmetic of layouts wrong, no rank would miss what none holds: the check would."""
    made = build(tmp_path / "c").manifest
    whole = LayoutHoldings.of

    def forgetful(self: LayoutHoldings, rank: int) -> HeldTensors:
        held = whole(self, rank)
        return held._replace(tensors=tuple(t for t in held.tensors if not t.name.startswith("embed")))

    monkeypatch.setattr(LayoutHoldings, "of", forgetful)
    with pytest.raises(CorruptManifest) as caught:
        LayoutTrials(PosixTier(tmp_path), "c").result(made)
    assert caught.value.members["tensor"] == "embed.weight"


def test_a_layout_that_misplaces_bytes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes put together otherwise than they stand: layout, rank and tensor are named."""
    made = build(tmp_path / "c").manifest
    monkeypatch.setattr(layout_trials.transfer, "move", lambda *of: 0)
    with pytest.raises(CorruptManifest, match=r"layout .*, rank \d+: tensor .* wrong bytes"):
        LayoutTrials(PosixTier(tmp_path), "c").result(made)


def test_nothing_to_try(tmp_path: Path) -> None:
    """A checkpoint without tensors has no layout."""
    made = build(tmp_path / "c", {"extra": {}}).manifest
    assert LayoutTrials(PosixTier(tmp_path), "c").result(made) == ((), 0)


def test_identical_is_of_what_trains(tmp_path: Path) -> None:
    """One bit in one tensor is a difference; nothing to compare is none that is the same."""
    one, same, other = (
        build(tmp_path / name, varied_arrays(seed), aliases={}).manifest for name, seed in zip("abc", (0, 0, 1), strict=True)
    )
    none = build(tmp_path / "d", {"extra": {}}).manifest
    assert identical(one, same) and not identical(one, other) and not identical(none, none)


def test_what_passes_while_a_checkpoint_is_read_back_is_not_read_again(tmp_path: Path) -> None:
    """The same layouts and places as of a checkpoint that others have read back."""
    tier = PosixTier(tmp_path)
    for step in STEPS[:8]:
        made = build(tmp_path / str(step), varied_arrays(step), step=step).manifest
        trials = LayoutTrials(tier, str(step))
        examine(tier, str(step), passed=trials.passed)
        tried = trials.result(made)
        # examine() has decoded a manifest of its own: what passed is of that one
        assert tried.layouts == LayoutTrials(tier, str(step)).result(made).layouts and tried.bytes > 0
        trials = LayoutTrials(tier, str(step))
        found = examine(tier, str(step), passed=trials.passed)
        assert found.manifest is not None and trials.result(found.manifest) == (tried.layouts, 0)


def test_of_many_tensors_some_layers_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers, other ones in other steps, always with what is in no layer; and names that are of no layer at all."""
    monkeypatch.setattr(layout_trials, "TENSORS_MAX", 9)
    rng = np.random.default_rng(3)
    shapes = {"attention": (8, 8), "up": (16, 8), "down": (8, 16)}
    names = {f"layers.{layer}.{kind}.weight": shape for layer in range(6) for kind, shape in shapes.items()}
    plain = {name: rng.standard_normal(shape, np.float32) for name, shape in {**names, "embed.weight": (32, 8)}.items()}
    looked: set[str] = set()
    for step in STEPS[:8]:
        made = build(tmp_path / str(step), {"model": plain}, step=step, aliases={}).manifest
        trials = LayoutTrials(PosixTier(tmp_path), str(step))
        assert len(trials.result(made).layouts) == TRIED
        held = set(trials._entries)
        layers = {name.partition(".")[2].partition(".")[0] for name in held - {"embed.weight"}}
        assert "embed.weight" in held and len(held) == 7 and len(layers) == 2
        looked |= layers
    assert len(looked) == 6
    flat = {f"{number}": np.zeros(4, np.float32) for number in range(30)} | {".": np.ones(4, np.float32)}
    made = build(tmp_path / "flat", {"model": flat}, aliases={}).manifest
    assert len(LayoutTrials(PosixTier(tmp_path), "flat").result(made).layouts) == TRIED


def test_a_layer_of_more_tensors_is_tried_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules look at a layer's tensors together: none is left out."""
    monkeypatch.setattr(layout_trials, "TENSORS_MAX", 2)
    flat = {f"layers.0.mlp.experts.{number}.up_proj.weight": np.zeros((4, 4), np.float32) for number in range(8)}
    made = build(tmp_path / "c", {"model": flat}, aliases={}).manifest
    trials = LayoutTrials(PosixTier(tmp_path), "c")
    trials.result(made)
    assert len(trials._entries) == 8
