"""Write the golden checkpoint of format 1, by the formats alone: `python tests/golden/make_golden.py DIRECTORY`.

It was run once for `tests/golden/v1` and refuses to overwrite: what is committed there must stay readable for ever. A new
format gets a directory of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast_formats import dtypes, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import index, manifests, packing, state_json
from holdfast_formats.disk.manifests import Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.disk.packing import FilePlan
from holdfast_formats.tensors import TensorSpec

RUN, STEP = "golden", 500
FILE_BYTES_MAX = 128  # so that the model takes several files
EXTENT_ELEMENTS_MAX = 24  # so that some tensors have several extents
ALIASES = {"model": {"lm_head.weight": "embed.weight"}}
METRICS = {"loss": 2.5}
RANKS: dict[int, state_json.Values] = {
    rank: {
        "extra": {
            "scheduler": json.dumps({"best": {"$float": "inf"}, "last_lr": [0.001], "name": "余弦"}, sort_keys=True),
            "loader": json.dumps({"position": 1000 + rank, "shuffled": True}, sort_keys=True),
        },
        "optim": {"param_groups": json.dumps([{"betas": [0.9, 0.999], "lr": 0.001}], sort_keys=True)},
    }
    for rank in range(2)
}
NAMES = {dtypes.to_numpy(name): name for name, bits in dtypes.BITS.items() if bits % 8 == 0}
CONFIG = b'{\n  "architectures": ["GoldenModel"],\n  "hidden_size": 4\n}\n'


def counted(dtype: str, shape: tuple[int, ...], first: float = 0.0, step: float = 1.0) -> Any:
    """An array of this dtype that counts from `first` in steps."""
    size = int(np.prod(shape, dtype=np.int64))
    return (first + step * np.arange(size, dtype=np.float64)).reshape(shape).astype(dtypes.to_numpy(dtype))


STATE: dict[str, dict[str, Any]] = {
    "model": {
        "embed.weight": counted("BF16", (8, 4), -4.0, 0.25),
        "layers.2.weight": counted("F32", (3, 5), 0.5, 0.125),
        "layers.10.weight": counted("F8_E4M3", (4, 4), -2.0, 0.25),
        "mask": counted("BOOL", (5,)),
        "counts": counted("I64", (2,), 2**40),
        "scale": counted("F32", (), 0.75),
        "nothing": counted("F32", (0, 3)),
    },
    "optim": {
        "embed.weight.exp_avg": counted("F32", (8, 4), 0.0, 0.5),
        "embed.weight.step": counted("F32", (), 500.0),
    },
    "master": {"embed.weight": counted("F32", (8, 4), -4.0, 0.25)},
    "ema": {"embed.weight": counted("F16", (8, 4), -3.0, 0.25)},
    "extra": {"rng.cpu": counted("U8", (16,), 1.0, 3.0)},
}


def extents(array: Any) -> tuple[Extent, ...]:
    step = EXTENT_ELEMENTS_MAX * array.itemsize
    data = array.tobytes()
    pieces = [(at, data[at : at + step]) for at in range(0, len(data), step)]
    return tuple(Extent(at, len(piece), digest(piece)) for at, piece in pieces)


def shard(plan: FilePlan) -> bytes:
    return plan.header + b"".join(STATE[plan.group][spec.name].tobytes() for spec, _ in plan.tensors)


def compose(plans: list[FilePlan], small: Mapping[str, bytes]) -> Manifest:
    tensors: dict[str, dict[str, TensorEntry]] = {group: {} for group in STATE}
    for plan in plans:
        for spec, start in plan.tensors:
            found = extents(STATE[spec.group][spec.name])
            tensors[spec.group][spec.name] = TensorEntry(spec.dtype, spec.shape, plan.name, start, found, "Shard(0)")
    shards = [FileEntry(plan.name, plan.bytes, len(plan.header), digest(plan.header)) for plan in plans]
    return Manifest(
        format=manifests.FORMAT,
        run=RUN,
        step=STEP,
        attempt=2,
        created="2026-01-02T03:04:05Z",
        world=2,
        mesh={"dp": 2},
        metrics=METRICS,
        files=(*shards, *(FileEntry(name, len(data), 0, digest(data)) for name, data in sorted(small.items()))),
        tensors=tensors,
        aliases=ALIASES,
    )


def files() -> dict[str, bytes]:
    """Every file below the root, by path."""
    specs = [
        TensorSpec(group, name, NAMES[array.dtype], array.shape)
        for group, tensors in STATE.items()
        for name, array in tensors.items()
    ]
    plans = packing.pack(specs, FILE_BYTES_MAX)
    small = {naming.index_file_name(group): index.encode(p for p in plans if p.group == group) for group in STATE}
    small[naming.STATE] = state_json.merge(STEP, METRICS, tuple(STATE), RANKS)
    small["config.json"] = CONFIG
    made = compose(plans, small)
    encoded = manifests.encode(made)
    held = {plan.name: shard(plan) for plan in plans} | small
    held |= {naming.MANIFEST: encoded, naming.COMMIT: manifests.encode_commit(made, encoded)}
    paths = {f"{naming.checkpoint_path(RUN, STEP)}/{name}": data for name, data in held.items()}
    return paths | {f"{RUN}/{naming.RUN_FILE}": b'{"format":1,"keep_last":3,"pins":[500],"labels":{"best":[500]}}\n'}


def write(root: Path) -> None:
    """Write the checkpoint below `root`, which must not exist: `FileExistsError` if it does."""
    root.mkdir(parents=True)
    for path, data in files().items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
