"""Builds small committed checkpoints from the formats alone: what a correct writer would have left on disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from holdfast_formats import dtypes, naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import index, packing, state_json
from holdfast_formats.disk import manifests as manifest
from holdfast_formats.disk.manifests import Extent, FileEntry, Manifest, TensorEntry
from holdfast_formats.tensors import TensorSpec

Arrays = Mapping[str, Mapping[str, np.ndarray]]
_LIBC = ctypes.CDLL(None, use_errno=True)
EXTENT_BYTES = 1000  # small, so that small tensors have several


def dtype_name(dtype: np.dtype) -> str:
    """The format's name of a numpy dtype."""
    return next(name for name, bits in dtypes.BITS.items() if bits % 8 == 0 and dtypes.to_numpy(name) == dtype)


class Built(NamedTuple):
    """A checkpoint on disk, and what was put into it."""

    path: Path
    manifest: Manifest
    arrays: Arrays


def varied_arrays(seed: int = 0) -> Arrays:
    """Two groups and an empty one: many dtypes, a 0-d tensor, one without elements, one of several extents."""
    rng = np.random.default_rng(seed)
    return {
        "model": {
            "embed.weight": rng.standard_normal((64, 24)).astype(ml_dtypes.bfloat16),
            "layers.0.q.weight": rng.standard_normal((24, 40)).astype(np.float32),
            "layers.0.scale": np.array(rng.standard_normal(), np.float32),
            "layers.0.fp8": rng.integers(0, 100, (7, 9)).astype(ml_dtypes.float8_e4m3fn),
            "layers.0.none": np.zeros((0, 5), np.float16),
        },
        "optim": {
            "layers.0.q.weight/exp_avg": rng.standard_normal((24, 40)).astype(np.float64),
            "layers.0.q.weight/step": np.array(17, np.int64),
            "mask": rng.integers(0, 2, 33).astype(np.bool_),
        },
        "extra": {},
    }


def build(
    directory: Path,
    arrays: Arrays | None = None,
    *,
    run: str = "tiny",
    step: int = 5,
    aliases: Mapping[str, Mapping[str, str]] | None = None,
    file_bytes_max: int = 5000,
    config: bytes = b'{"model_type": "tiny"}\n',
    extent_bytes: int = EXTENT_BYTES,
    assets: Mapping[str, bytes] | None = None,
    ranks: Mapping[int, state_json.Values] | None = None,
) -> Built:
    """Write a committed checkpoint into `directory`, which is made."""
    directory.mkdir(parents=True)
    held = varied_arrays() if arrays is None else arrays
    specs = [
        TensorSpec(group, name, dtype_name(a.dtype), a.shape) for group, named in held.items() for name, a in named.items()
    ]
    files: list[FileEntry] = []
    tensors: dict[str, dict[str, TensorEntry]] = {group: {} for group in held}
    plans = packing.pack(specs, file_bytes_max)
    for plan in plans:
        data = bytearray(plan.header)
        for spec, start in plan.tensors:
            raw = held[spec.group][spec.name].tobytes()
            assert start == len(data)
            data += raw
            placed = TensorEntry(
                spec.dtype, spec.shape, plan.name, start, tuple(_extents(raw, extent_bytes)), "[Replicate()]"
            )
            tensors[spec.group][spec.name] = placed
        (directory / plan.name).write_bytes(data)
        files.append(FileEntry(plan.name, len(data), len(plan.header), digest(plan.header)))
    small: dict[str, bytes] = {
        naming.index_file_name(group): index.encode([plan for plan in plans if plan.group == group]) for group in held
    }
    values = {0: {"extra": {"lr": "0.1"}}} if ranks is None else ranks
    small[naming.STATE] = state_json.merge(step, {"loss": 2.5}, list(held), values)
    small |= {"config.json": config, "empty.txt": b""} if assets is None else assets
    for name, data in small.items():
        (directory / name).write_bytes(data)
        files.append(FileEntry(name, len(data), 0, digest(data)))
    made = Manifest(
        format=manifest.FORMAT,
        run=run,
        step=step,
        attempt=1,
        created="2026-01-02T03:04:05Z",
        world=2,
        mesh={"dp": 2},
        metrics={"loss": 2.5},
        files=tuple(files),
        tensors=tensors,
        aliases={"model": {"lm_head.weight": "embed.weight"}} if aliases is None and arrays is None else _plain(aliases),
    )
    encoded = manifest.encode(made)
    (directory / naming.MANIFEST).write_bytes(encoded)
    (directory / naming.COMMIT).write_bytes(manifest.encode_commit(made, encoded))
    return Built(directory, made, held)


def trained_arrays(seed: int = 0) -> Arrays:
    """BF16 weights, their masters and AdamW's state, and what a rule for states has to leave alone."""
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (64, 300), "layers.0.norm.weight": (512,), "layers.0.conv.weight": (16, 8, 3, 3)}
    masters = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    bits = masters["embed.weight"].view(np.uint32)
    bits[0] = bits[0] & 0xFFFF0000 | 0x8000  # half-way between two weights
    masters["layers.0.conv.weight"][0, 0] = -0.0
    models = {name: master.astype(ml_dtypes.bfloat16) for name, master in masters.items()}
    models["layers.0.loose.weight"] = rng.standard_normal((40, 40)).astype(ml_dtypes.bfloat16)
    masters["layers.0.loose.weight"] = rng.standard_normal((40, 40)).astype(np.float32)  # not what its weight is made of
    optim: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        optim[f"{name}/exp_avg"] = (rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 1, shape)).astype(np.float32)
        optim[f"{name}/exp_avg_sq"] = np.square(optim[f"{name}/exp_avg"]) / 7
        optim[f"{name}/step"] = np.array(17, np.float32)
    broken = rng.standard_normal((40, 40)).astype(np.float32)
    broken[3, 3] = np.nan
    return {
        "model": models,
        "master": masters,
        "optim": optim
        | {
            "layers.0.loose.weight/exp_avg": broken,
            "layers.0.loose.weight/exp_avg_sq": -np.abs(rng.standard_normal((40, 40))).astype(np.float32),
            "layers.0.loose.weight/exp_avg.codes": rng.integers(0, 255, (40, 40)).astype(np.uint8),
            "layers.0.other.weight/preconditioner": rng.standard_normal((40, 40)).astype(np.float32),
            "embed.weight/count": np.arange(400, dtype=np.int64),
        },
        "extra": {"seen": np.arange(9, dtype=np.int64)},
    }


def build_root(
    root: Path, steps: Mapping[str, tuple[int, ...]], arrays: Arrays | None = None
) -> dict[tuple[str, int], Built]:
    """A root directory with committed checkpoints of several runs."""
    return {
        (run, step): build(root / naming.checkpoint_path(run, step), arrays, run=run, step=step)
        for run, numbers in steps.items()
        for step in numbers
    }


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Turn one bit of a file round, in its place: who reads the file meanwhile never finds it shorter. As on a disk, no time
    says that it happened.
    """
    before = path.stat()
    with open(path, "r+b", buffering=0) as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def forget(directory: Path) -> None:
    """Make the page cache forget the files of a checkpoint, so that reading them waits for the disk."""
    limit = time.monotonic() + 180
    for path in directory.iterdir():
        with open(path, "rb") as file:
            while cached_pages(file.fileno()):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                assert time.monotonic() < limit, f"{path} stays in the page cache"


def cached_pages(descriptor: int) -> int:
    """How many pages of a file are in memory. Asked of `mincore`: a read that may not wait has the kernel read ahead."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
        octets = np.frombuffer(mapped, np.uint8)
        found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        failed = _LIBC.mincore(
            ctypes.c_void_p(octets.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
        )
        del octets  # or the mapping cannot be closed
    assert not failed, os.strerror(ctypes.get_errno())
    return int((found & 1).sum())


def _extents(raw: bytes, size: int) -> Iterator[Extent]:
    for offset in range(0, len(raw), size):
        part = raw[offset : offset + size]
        yield Extent(offset, len(part), digest(part))


def _plain(aliases: Mapping[str, Mapping[str, str]] | None) -> dict[str, Any]:
    return {group: dict(named) for group, named in (aliases or {}).items()}
