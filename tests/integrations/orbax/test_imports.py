"""Checkpoints that Orbax saves are imported with the bytes that Orbax restores, in each of its layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import deserialize

from holdfast_formats import naming
from holdfast_formats.disk import state_json
from holdfast_formats.rest.offline import RootJob
from holdfast_service.offline.__main__ import main
from tests.job_requests import an_import

DEVICES = 4
jax.config.update("jax_num_cpu_devices", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
LAYOUTS: dict[str, dict[str, bool]] = {
    "ocdbt": {},
    "zarr": {"use_ocdbt": False},
    "zarr3": {"use_zarr3": True},
    "zarr3-files": {"use_zarr3": True, "use_ocdbt": False},
}


class Stored(NamedTuple):
    group: str
    dtype: str
    shape: list[int]
    data: bytes


def imported(source: Path, root: Path, **options: Any) -> dict[str, Stored]:
    job = an_import("m", 1, **{"from": str(source)}, **options)
    assert main(RootJob(root=str(root), job=job).model_dump_json(by_alias=True)) == 0
    found = {}
    for file in checkpoint(root).glob("*.safetensors"):
        for name, one in deserialize(file.read_bytes()):
            found[name] = Stored(file.name.partition(".")[0], one["dtype"], list(one["shape"]), bytes(one["data"]))
    return found


def checkpoint(root: Path) -> Path:
    return root / naming.checkpoint_path("m", 1)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves under the names that Orbax gives them."""
    if isinstance(tree, (dict, list, tuple)):
        inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, one in inner:
            yield from leaves(one, f"{prefix}.{key}" if prefix else str(key))
    elif tree is not None:
        yield prefix, tree


def sharded(array: Any, *axes: str | None) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()).reshape(2, DEVICES // 2), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def a_training() -> dict[str, Any]:
    """The form of MaxText's: parameters below two keys, Adam's moments, a step; odd shapes, zeros, all widths."""
    random = np.random.default_rng(0)

    def values(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jnp.asarray(random.standard_normal(shape), dtype)

    layers = {
        "mlp": {"wi": {"kernel": sharded(values(64, 3, 32, dtype=jnp.bfloat16), "x", None, "y")}},
        "norm": {"scale": values(3, 65, dtype=jnp.bfloat16)},
        "zeros": jnp.zeros((8, 8), jnp.float32),
    }
    params = {"params": {"decoder": {"layers": layers, "logits": sharded(values(32, 128), None, ("x", "y"))}}}
    moments = {"mu": jax.tree.map(lambda one: one.astype(jnp.float32) * 2, params), "nu": jax.tree.map(jnp.abs, params)}
    widths = [jnp.bool_, jnp.int8, jnp.uint16, jnp.int32, jnp.uint32, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]
    return {
        "params": params,
        "opt_state": [{"count": jnp.int32(7)}, moments, None, {}],
        "rng": jax.random.PRNGKey(1),
        "step": 7,
        "widths": [jnp.arange(9).astype(dtype) for dtype in widths],
        "complex": jnp.asarray([1 + 2j, 3 - 4j], jnp.complex64),
        "half": 1.5,
        "large": values(300, 1000, dtype=jnp.bfloat16),
        "named": "a text",
    }


def check(found: dict[str, Stored], restored: Any) -> None:
    wanted = {name: np.asarray(one) for name, one in leaves(restored) if not isinstance(one, str)}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].data == np.ascontiguousarray(array).tobytes(), name
        assert found[name].shape == list(array.shape), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk_bytes", [None, 4096])
def test_as_orbax_restores_it(tmp_path: Path, layout: str, chunk_bytes: int | None) -> None:
    """Sharded arrays in chunks of their shards, and in smaller ones; texts become values; the step is found."""
    tree = a_training()
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk_bytes), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**LAYOUTS[layout])) as checkpointer:
        checkpointer.save(tmp_path / "source", args=ocp.args.PyTreeSave(tree, save_args=args))
        restored = checkpointer.restore(tmp_path / "source")
    found = imported(tmp_path / "source", tmp_path / "root")
    check(found, restored)
    assert found["params.params.decoder.layers.mlp.wi.kernel"].group == "model"
    assert found["params.params.decoder.layers.mlp.wi.kernel"].dtype == "BF16"
    assert found["opt_state.1.mu.params.decoder.logits"].group == "optim" and found["step"].group == "extra"
    state = (checkpoint(tmp_path / "root") / naming.STATE).read_bytes()
    assert (state_json.source_of(state) or {})["step"] == 7
    assert "a text" in state.decode()


def test_a_step_of_the_manager(tmp_path: Path) -> None:
    """The directory of a step with an item of arrays and one of JSON; the directory above it is refused by name."""
    tree = a_training()
    with ocp.CheckpointManager(tmp_path / "all") as manager:
        saved = ocp.args.Composite(
            items=ocp.args.StandardSave({"params": tree["params"]}), about=ocp.args.JsonSave({"a": 1})
        )
        manager.save(100, args=saved)
        manager.wait_until_finished()
        restored = manager.restore(100, args=ocp.args.Composite(items=ocp.args.StandardRestore()))["items"]
    check(imported(tmp_path / "all" / "100", tmp_path / "root"), restored)
    documents = json.loads((checkpoint(tmp_path / "root") / naming.STATE).read_bytes())
    assert '"about"' in json.dumps(documents)


def test_weights_alone(tmp_path: Path) -> None:
    """A tree without the key `params` is a model; zeros that are not stored are zeros."""
    tree = {"decoder": {"w": jnp.arange(6.0).reshape(2, 3)}, "step_size": jnp.float32(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "source")
    found = imported(tmp_path / "source", tmp_path / "root")
    check(found, restored)
    assert {one.group for one in found.values()} == {"model"}


@pytest.mark.parametrize("compressor", [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 19}])
def test_zarr_of_tensorstore(tmp_path: Path, compressor: dict[str, Any] | None) -> None:
    """Compressions, nodes of several levels, chunks beyond the edge, and chunks that are all zeros and not stored."""
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"file://{tmp_path}/source/",
            "config": {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 16},
        },
        "path": "params.w/",
        "metadata": {"shape": [50, 70], "chunks": [8, 9], "dtype": "<f4", "compressor": compressor, "fill_value": None},
    }
    values = np.random.default_rng(1).standard_normal((50, 70)).astype(np.float32)
    values[:16, :18] = 0
    array = tensorstore.open(spec, create=True).result()
    array.write(values).result()
    found = imported(tmp_path / "source", tmp_path / "root")
    assert found["params.w"].data == values.tobytes()
