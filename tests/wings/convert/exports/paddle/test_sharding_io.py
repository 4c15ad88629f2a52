"""A checkpoint of sharding_io: two ranks of whole parameters, and the import of it gives what was exported.

tests/integrations/paddle loads it with PaddleFormers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.exports.paddle import sharding_io as paddle_sharding_io
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import of_listing
from holdfast_service.wings.convert.foreign.paddle import sharding_io
from tests.wings.convert.exports.sources import LLAMA, llama, made, trained, values_of, write
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles
from tests.wings.convert.foreign.paddle.written import GOLDEN, read, values

WEIGHTS = llama()
GROUPS = trained(WEIGHTS)
ASSETS = {"config.json": json.dumps(LLAMA).encode()}
TIES = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("how", ["bfloat16", "float32", "tied"])
def test_an_import_gives_it_back(tmp_path: Path, how: str) -> None:
    """Weights, masters, moments and steps, bit for bit; of tied weights under both names."""
    groups: dict[str, Any] = {group: dict(held) for group, held in GROUPS.items()}
    if how == "float32":
        groups |= {"model": {name: array.astype(np.float32) for name, array in WEIGHTS.items()}, "master": {}}
    if how == "tied":
        groups = trained({name: array for name, array in WEIGHTS.items() if name not in TIES})
    aliases = {"model": TIES} if how == "tied" else {}
    names = list(groups["model"])
    source = made(tmp_path / "step", groups, assets=ASSETS, aliases=aliases, step=2, ranks=values_of(names)).source
    plan = paddle_sharding_io.plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "out")
    listing = read(sharding_io.KIND, out)
    for group in ("model", "master", "optim"):
        for name, array in groups[group].items():
            found = values(out, listing, group, name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape), name
            assert np.ascontiguousarray(found).tobytes() == array.tobytes(), name
    tied = {name for key, name in listing.tensors if key == "model"} - set(names)
    assert tied == (set(TIES) if how == "tied" else set())
    assert listing.step == 2
    assert any("load_sharded_model_remap_parameter_name" in note for note in plan.notes)


def test_the_metadata(tmp_path: Path) -> None:
    """Parameters are shared out evenly, and each has a static name, its shape in Paddle's layout and its dtype."""
    source = made(tmp_path / "step", GROUPS, assets=ASSETS, step=2, ranks=values_of(list(WEIGHTS))).source
    out = write(source, paddle_sharding_io.plan(source, ExportOptions()), tmp_path / "out")
    meta = json.loads((out / "model_meta.json").read_text())
    assert meta["parallel_config"]["sharding_degree"] == 2
    place = meta["sharding_metas"]["tp00_pp00"]
    assert place["param_meta"]["model.layers.0.mlp.up_proj.weight"] == [[8, 24], 16, False, False]
    statics = place["structure_name_mapping"]
    assert statics.keys() == WEIGHTS.keys() and len(set(statics.values())) == len(statics)
    sizes = {statics[name]: array.size for name, array in WEIGHTS.items()}
    shares = [sum(sizes[static] for static, owner in place["param2rank"].items() if owner == rank) for rank in range(2)]
    assert sum(shares) == sum(sizes.values()) and abs(shares[0] - shares[1]) <= max(sizes.values())
    assert (out / "saved_signal_0").read_bytes() == (out / "saved_signal_1").read_bytes() == b"1"


def test_only_a_model(tmp_path: Path) -> None:
    """Without an optimizer there are weights to begin with."""
    source = made(tmp_path / "step", {"model": WEIGHTS}, assets=ASSETS).source
    plan = paddle_sharding_io.plan(source, ExportOptions(dtype="F32"))
    listing = read(sharding_io.KIND, write(source, plan, tmp_path / "out"))
    assert {key.group for key in listing.tensors} == {"model"}
    assert not any(file.name.endswith(".pdopt") for file in plan.files)


def test_what_paddle_wrote_comes_back(tmp_path: Path) -> None:
    """Of flat parts in two ranks: import, export and import again give the same tensors."""
    folder = GOLDEN / "sharding_io_sd2v2" / "checkpoint-2"
    listing = sharding_io.read(DirectoryFiles(folder), ReadOptions())
    source = of_listing(DirectoryFiles(folder), listing)
    out = write(source, paddle_sharding_io.plan(source, ExportOptions()), tmp_path / "out")
    again = read(sharding_io.KIND, out)
    assert again.tensors.keys() == listing.tensors.keys()
    for group, name in listing.tensors:
        ours, theirs = values(out, again, group, name), values(folder, listing, group, name)
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), name
    assert values(out, again, "model", "model.norm.weight").dtype == ml_dtypes.bfloat16
