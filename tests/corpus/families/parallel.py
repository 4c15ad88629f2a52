"""What ranks of training systems save together, as their tests in tests/integrations make it; and Orbax."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.corpus.cases import Case, Tensors, prefixed
from tests.corpus.families.training import dcp_read, dcp_tensors
from tests.torchruns import torchrun

NOT_TRAINED = ("frozen", "seen")  # of the model: DeepSpeed loads neither from a universal checkpoint
TITAN = "tests.integrations.torchtitan.going_on"
MEGATRON = "tests.integrations.megatron.torch_dist"


def deepspeed(stage: int, kind: str, ranks: int) -> Callable[[Path], object]:
    return lambda place: torchrun(ranks, "tests.integrations.deepspeed.saving", str(place), str(stage), kind)


def deepspeed_read(place: Path) -> Tensors:
    """The engine's own whole weights and moments, and the masters of DeepSpeed's consolidation."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, Any] = {}
    engine = torch.load(place.parent / "engine.pt")
    half = engine["embed.weight"].dtype == torch.bfloat16
    for name, one in engine.items():
        stem, _, part = name.rpartition("/")
        if part != "master":
            found[f"optim/{name}" if stem else f"model/{name}"] = one
        elif half:
            found[f"master/{stem}"] = one
    steps = {name.rpartition("/")[0] for name in engine if name.endswith("/exp_avg")}
    found |= {f"optim/{name}/step": torch.tensor(3.0) for name in steps}
    consolidated = get_fp32_state_dict_from_zero_checkpoint(str(place))
    return found | {f"master/{name}": one for name, one in consolidated.items() if f"master/{name}" in found}


def deepspeed_trained(place: Path) -> Tensors:
    """What DeepSpeed trains, of the engine that saved."""
    found: dict[str, torch.Tensor] = torch.load(place.parent / "engine.pt")
    return {name: one for name, one in found.items() if name not in NOT_TRAINED}


def deepspeed_universal(kind: str) -> Callable[[Path], Tensors]:
    """The same, of a new engine on one rank that has loaded a universal checkpoint."""

    def load(place: Path) -> Tensors:
        from tests.integrations.deepspeed import engines

        engine = engines.engine(engines.config(1, kind, checkpoint={"load_universal": True}), seed=5)
        path, _ = engine.load_checkpoint(str(place))
        assert path is not None
        return {name: one for name, one in engines.tensors(engine).items() if name not in NOT_TRAINED}

    return load


def titan(place: Path) -> None:
    """A step of torchtitan's own training."""
    work = place.parent / "work"
    torchrun(1, TITAN, "--work", str(work), "--told", str(place.parent / "told"))
    place.rmdir()
    shutil.move(work / "out" / "checkpoint" / "step-6", place)


def titan_loaded(place: Path) -> Tensors:
    """Weights and moments of torchtitan's Trainer, into which its own manager has loaded everything."""
    from tests.integrations.environments import stand_alone
    from tests.integrations.recording import optimizer_tensors
    from tests.integrations.torchtitan import tiny

    from torchtitan.components.checkpointer import CheckpointManager  # isort: skip

    stand_alone()
    how = CheckpointManager.Config(enable=True, initial_load_path=str(place), initial_load_model_only=False)
    trainer = tiny.trainer_config(place.parent / "loaded", 1, how).build()
    assert trainer.checkpointer.load()
    (part,) = trainer.model_parts
    found = {**dict(part.named_parameters()), **optimizer_tensors(next(iter(trainer.optimizers)))}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}
    trainer.close()
    torch.distributed.destroy_process_group()
    return {name: one.detach().clone() for name, one in whole.items()}


def megatron(place: Path, *how: str) -> None:
    """The same training in both of Megatron's formats: by rank, and beside it as torch_dist."""
    places = ("--ranks", str(place), "--work", str(place.parent / "dist"))
    torchrun(2, MEGATRON, *places, "--sharding", "fully_sharded_model_space", "--by-number", *how)


def megatron_weights(place: Path) -> Tensors:
    """As torch reads them from torch_dist."""
    held = dcp_tensors(place.parent / "dist")
    return {name: one for name, one in held.items() if isinstance(one, torch.Tensor) and not name.startswith("optimizer")}


def orbax(place: Path) -> None:
    import jax.numpy as jnp
    import numpy as np
    from orbax.checkpoint import StandardCheckpointer

    random = np.random.default_rng(0)
    layers = {
        f"layers_{number}": {"kernel": jnp.asarray(random.standard_normal((24, 40)), jnp.bfloat16), "scale": jnp.ones(24)}
        for number in range(2)
    }
    place.rmdir()
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(place, {"params": {"decoder": layers, "logits": jnp.asarray(random.standard_normal((24, 64)))}})


def orbax_restored(place: Path) -> Tensors:
    from orbax.checkpoint import StandardCheckpointer

    with StandardCheckpointer() as checkpointer:
        return dict(_named(checkpointer.restore(place)))


def by_numpy(place: Path) -> Tensors:
    """As Flax reads a file of safetensors."""
    from safetensors.flax import load_file

    return dict(_named(load_file(place / "model.safetensors")))


def _named(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The leaves of a tree of JAX's, as torch's."""
    import numpy as np

    if isinstance(tree, dict):
        for key, one in tree.items():
            yield from _named(one, f"{name}.{key}" if name else key)
    else:
        array = np.asarray(tree)
        half = array.dtype.name == "bfloat16"
        made = torch.from_numpy(array.view(np.int16).copy() if half else array.copy())
        yield name, made.view(torch.bfloat16) if half else made


CASES = (
    *(
        Case(f"deepspeed-zero{stage}-{kind}-{ranks}", "deepspeed", deepspeed(stage, kind, ranks), deepspeed_read,
             deepspeed_trained, exported=("--as", "deepspeed-universal"), load_exported=deepspeed_universal(kind),
             environment="deepspeed")
        for stage, kind, ranks in ((1, "bf16", 2), (2, "fp32", 1), (3, "bf16", 2))
    ),
    Case("torchtitan-dcp", "torchtitan", titan, dcp_read, titan_loaded, exported=("--as", "dcp", "--layout", "torchtitan"),
         environment="torchtitan"),
    *(
        Case(f"megatron-ranks-{how[0][2:]}", "megatron-core", lambda place, how=how: megatron(place, *how),
             lambda place: prefixed("model", megatron_weights(place)), megatron_weights,
             ("--weights-only",), ("--as", "dcp", "--layout", "plain"), dcp_tensors, environment="megatron")
        for how in (("--tp", "2"), ("--pp", "2"))
    ),
    Case("orbax", "orbax-checkpoint", orbax, lambda place: prefixed("model", orbax_restored(place)), orbax_restored,
         load_exported=by_numpy, environment="orbax"),
)  # fmt: skip
