"""Quantised moments are decoded by their formulas, box by box as well as whole, and codes that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import Box
from holdfast_service.wings.convert.foreign.paddle import unified
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.paddle import written
from tests.wings.convert.foreign.paddle.written import read

MATRIX, VECTOR = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
SHAPE = (64, 5)


def _o1(values: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """As Paddle encodes, written from the facts about it."""
    held: dict[str, NDArray[Any]] = {}
    for name in (MATRIX, VECTOR):
        first, second = values[f"{name}/moment1_0"], values[f"{name}/moment2_0"]
        inverse = 1 / (np.sqrt(second) + np.float32(1e-8))
        axes = 0 if first.ndim == 2 else None
        scale, low, high = np.abs(first).max(axes), inverse.min(axes), inverse.max(axes)
        held[f"{name}/moment1_0"] = np.clip(np.rint(first / scale * 127), -128, 127).astype("i1")
        with np.errstate(invalid="ignore", divide="ignore"):
            held[f"{name}/moment2_0"] = np.nan_to_num(np.rint((inverse - low) / (high - low) * 255)).astype("u1")
        held |= {f"{name}/moment1_0@scales": np.asarray(scale), f"{name}/moment2_0@min_scales": np.asarray(low)}
        held[f"{name}/moment2_0@max_scales"] = np.asarray(high)
    return held


def _write(folder: Path, stage: str, held: dict[str, NDArray[Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    written.trainer_state(folder)
    written.config(folder)
    powers = {f"{name}/{kind}": written.power(kind) for name in (MATRIX, VECTOR) for kind in written.BETAS}
    written.write_set(folder, "optimizer", [{**held, **powers}], ckpt_quant_stage=stage)
    return folder


def _values() -> dict[str, NDArray[np.float32]]:
    made = {f"{n}/moment{k}_0": written.moment(n, k, s) for n, s in ((MATRIX, SHAPE), (VECTOR, (7,))) for k in (1, 2)}
    made[f"{MATRIX}/moment2_0"][:, 3] = np.float32(2e-7)  # lowest and highest are the same
    return made


def test_bytes(tmp_path: Path) -> None:
    """O1: in float64, rounded to F32; a column whose scales are equal is their value."""
    values = _values()
    held = _o1(values)
    folder = _write(tmp_path / "c", "O1", held)
    listing = read(unified.KIND, folder)
    for name in (MATRIX, VECTOR):
        code = held[f"{name}/moment1_0"].astype("f8")
        first = (code / 127 * held[f"{name}/moment1_0@scales"].astype("f8")).astype("f4")
        low, high = (held[f"{name}/moment2_0@{end}_scales"].astype("f8") for end in ("min", "max"))
        inverse = held[f"{name}/moment2_0"].astype("f8") / 255 * (high - low) + low
        second = np.square(1 / inverse - 1e-8).astype("f4")
        for wanted, state in ((first, "exp_avg"), (second, "exp_avg_sq")):
            found = written.values(folder, listing, "optim", f"{name}/{state}")
            np.testing.assert_array_equal(found.T if name == MATRIX else found, wanted)
    found = written.values(folder, listing, "optim", f"{MATRIX}/exp_avg_sq")[3]
    np.testing.assert_allclose(found, values[f"{MATRIX}/moment2_0"][:, 3], rtol=1e-5)
    tensor = listing.tensors[TensorKey("optim", f"{MATRIX}/exp_avg_sq")]
    whole = fetched(OnDisk(folder), tensor)
    for box in (Box((1, 3), (2, 60)), Box((4, 63), (1, 1)), Box((0, 0), (5, 31))):
        np.testing.assert_array_equal(fetched(OnDisk(folder), tensor, box), whole[box.slices])
    assert any("Paddle's quantised form (O1)" in note for note in listing.notes)


def test_half_bytes(tmp_path: Path) -> None:
    """O2: two signed and unsigned halves of a byte, scales for each 32 rows, and vectors that stay as they are."""
    codes = np.arange(SHAPE[0] * SHAPE[1], dtype="u4").astype("u1").reshape(SHAPE).view("i1")
    scales = {end: written.made(end, (2, 5), 1.0) for end in ("scales", "min_scales", "max_scales")}
    low = np.abs(scales["min_scales"]) + 100
    high = low + np.abs(scales["max_scales"])
    high[1, 2] = low[1, 2]
    values = _values()
    held: dict[str, NDArray[Any]] = {
        f"{MATRIX}/moment2_0": codes,
        f"{MATRIX}/moment1_0@scales": scales["scales"],
        f"{MATRIX}/moment2_0@min_scales": low,
        f"{MATRIX}/moment2_0@max_scales": high,
        **{f"{VECTOR}/moment{k}_0": values[f"{VECTOR}/moment{k}_0"] for k in (1, 2)},
    }
    folder = _write(tmp_path / "c", "O2", held)
    index = (folder / "optimizer.safetensors.index.json").read_text()
    extra = f'"{MATRIX}/moment1_0": "optimizer-00001-of-00001.safetensors", "{MATRIX}/moment2_0"'
    (folder / "optimizer.safetensors.index.json").write_text(index.replace(f'"{MATRIX}/moment2_0"', extra, 1))
    listing = read(unified.KIND, folder)
    upper = codes.view("u1") >> 4
    signed = np.where(upper > 7, upper.astype("i2") - 16, upper).astype("f4")
    rows = [np.repeat(part, 32, 0) for part in (scales["scales"], low, high)]
    first = signed * rows[0] / np.float32(7)  # in the order in which PaddleFormers computes
    inverse = (codes.view("u1") & 15).astype("f4") / np.float32(15) * (rows[2] - rows[1]) + rows[1]
    second = np.square(np.float32(1) / inverse - np.float32(1e-8))
    for wanted, state in ((first, "exp_avg"), (second, "exp_avg_sq")):
        np.testing.assert_array_equal(written.values(folder, listing, "optim", f"{MATRIX}/{state}").T, wanted)
        tensor = listing.tensors[TensorKey("optim", f"{MATRIX}/{state}")]
        for box in (Box((1, 30), (3, 5)), Box((0, 63), (5, 1)), Box((2, 0), (1, 32))):
            np.testing.assert_array_equal(fetched(OnDisk(folder), tensor, box), wanted.T[box.slices])
    assert -8 in signed
    found = written.values(folder, listing, "optim", f"{VECTOR}/exp_avg")
    np.testing.assert_array_equal(found, values[f"{VECTOR}/moment1_0"])


def test_what_paddle_quantised() -> None:
    """A directory that Paddle wrote: the first moments are as near to those before as a byte allows."""
    folder = written.GOLDEN / "uc_tp2_quant_O1" / "checkpoint-2"
    listing = read(unified.KIND, folder)
    assert len(listing.tensors) == 21 * 3
    for key in listing.tensors:
        name, _, state = key.name.partition("/")
        if state != "exp_avg":
            continue
        found = written.values(folder, listing, *key)
        found = found.T if written.is_linear(name) else found
        wanted = written.moment(name, 1, found.shape)
        scale = np.abs(wanted).max(0) if wanted.ndim == 2 else np.abs(wanted).max()
        assert (np.abs(found - wanted) <= scale / 127 * 0.5001).all()


def test_codes_that_do_not_fit(tmp_path: Path) -> None:
    """A scale that is missing or of another shape, codes of other shapes or dtypes: by key and file."""
    plain = _o1(_values())
    scales = f"{MATRIX}/moment1_0@scales"
    for change, message in (
        ({scales: None}, "moment1_0@scales is missing"),
        ({scales: np.zeros(4, "f4")}, r"moment1_0@scales' is F32 of shape \[4\]: its scales must be F32 of shape \[5\]"),
        ({f"{MATRIX}/moment1_0": np.zeros((5, 64), "i1")}, r"moment1_0' is I8 of shape \[5, 64\]"),
        ({f"{MATRIX}/moment2_0": np.zeros(SHAPE, "i1")}, r"moment2_0' is I8 .* codes must be U8"),
        ({f"{MATRIX}/moment1_0": None}, "codes must be I8|4-bit codes need a matrix"),
    ):
        held = {key: value for key, value in {**plain, **change}.items() if value is not None}
        with pytest.raises(StateMismatch, match=message) as caught:
            read(unified.KIND, _write(tmp_path / "c", "O1", held))
        assert caught.value.members["file"] == "optimizer-00001-of-00001.safetensors"
