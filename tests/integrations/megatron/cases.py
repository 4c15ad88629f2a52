"""What is refused, and what options of Megatron-LM mean, in one process: writes what happened in each case."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from typing import Any

import torch

import holdfast
from holdfast.integrations.megatron import close, configure, load_checkpoint, save_checkpoint
from holdfast_formats.errors import CheckpointError
from tests.integrations.megatron import training
from tests.integrations.recording import digest

Change = Callable[[training.Training], None]


class Cases:
    """Builds a model for each case, saves or loads it, and notes the answer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.answers: dict[str, Any] = {}

    def refused(self, name: str, change: Change | None = None, settings: dict[str, Any] | None = None, **how: Any) -> None:
        """Save to a run of the case's name; the answer is the error, and what exists of the run afterwards."""
        args = copy.copy(self.args)
        args.save = args.work / "root" / name
        try:
            configure(args=args, **(settings or {}))
            made = training.build(args)
            training.step(made, 1)
            if change is not None:
                change(made)
            save_checkpoint(1, made.model, made.optimizer, made.scheduler, 0, **how)
            answer = "saved"
        except CheckpointError as error:
            answer = f"{type(error).__name__}: {error.detail}"
        finally:
            close()
        self.answers[name] = [answer, (args.work / "root" / name / "checkpoints").exists()]

    def loaded(
        self, name: str, settings: dict[str, Any] | None = None, strict: bool = True, **options: Any
    ) -> training.Training:
        """Load the run `whole` into another model; the answer is what is returned, and what has changed by it."""
        args = copy.copy(self.args)
        args.load = args.save = args.work / "root" / "whole"
        vars(args).update(options)
        configure(args=args, **(settings or {}))
        made = training.build(args)
        training.step(made, 1)
        before = parts(made)
        try:
            answer: Any = list(load_checkpoint(made.model, made.optimizer, made.scheduler, strict=strict))
        except CheckpointError as error:
            answer = f"{type(error).__name__}: {error.detail}"
        after = parts(made)
        changed = [part for part, value in after.items() if before[part] != value]
        whole = [part for part, value in after.items() if self.answers.get("parts", {}).get(part) == value]
        self.answers[name] = {"returned": answer, "changed": changed, "restored": whole}
        close()
        return made


def parts(made: training.Training) -> dict[str, Any]:
    """What a load may change."""
    inner = made.optimizer.chained_optimizers[0].optimizer
    weights = [parameter for chunk in made.model for parameter in chunk.parameters()]
    moments = [inner.state[p][key] for g in inner.param_groups for p in g["params"] for key in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": [digest(one) for one in weights],
        "masters": [digest(p) for g in inner.param_groups for p in g["params"]],
        "moments": [digest(one) for one in moments],
        "scheduler": made.scheduler.num_steps,
        "streams": digest(torch.get_rng_state()),
        "samples": made.args.consumed_train_samples,
    }


def main() -> None:
    args = training.parser().parse_args()
    args.bf16 = True
    with training.parallel(args):
        cases = Cases(args)
        refusals(cases)
        restored_bytes(cases)
        options(cases)
        (args.work / "answers.json").write_text(json.dumps(cases.answers))


def options(cases: Cases) -> None:
    args = copy.copy(cases.args)
    args.save = args.work / "root" / "whole"
    configure(args=args)
    made = training.build(args)
    for number in (1, 2, 3):
        training.step(made, number)
        save_checkpoint(number, made.model, made.optimizer, made.scheduler, 100 * number)
    twice = save_checkpoint(3, made.model, made.optimizer, made.scheduler, 300)
    twice.result()
    cases.answers["parts"] = parts(made)
    args.no_save_optim = True
    save_checkpoint(4, made.model, made.optimizer, made.scheduler, 400)  # the weights of 3, without the optimizer
    close()
    try:
        save_checkpoint(4, made.model, made.optimizer, made.scheduler, 400)
    except CheckpointError as error:
        cases.answers["anew"] = f"{type(error).__name__}: {error.detail}"
    close()
    cases.loaded("newest")
    elsewhere = args.work / "elsewhere" / "new"
    cases.loaded("of another run", {"run": "new"}, save=elsewhere)
    cases.loaded("of another root", {"at": elsewhere.parent}, save=elsewhere)
    cases.loaded("with a slash", {"run": "whole"}, load=f"{args.save}/", save=str(args.save))
    cases.loaded("two names", {"run": "new"}, save=None)
    cases.loaded("no_load_optim", no_load_optim=True)
    cases.loaded("no_load_rng", no_load_rng=True)
    cases.loaded("finetune", finetune=True)
    cases.loaded("ckpt_step", ckpt_step=1)
    cases.loaded("missing", load=args.work / "root" / "nothing")
    cases.loaded("exit", load=args.work / "root" / "nothing", exit_on_missing_checkpoint=True)
    cases.loaded("another model", layers=3)
    cases.loaded("pretrained", load=args.work / "root" / "nothing", pretrained_checkpoint=args.save)
    cases.loaded("pretrained alone", load=None, pretrained_checkpoint=args.save)
    cases.loaded("no pretrained", load=None, pretrained_checkpoint=args.work / "root" / "nothing")
    (args.work / "theirs").mkdir()
    (args.work / "theirs" / "latest_checkpointed_iteration.txt").write_text("10")
    cases.loaded("theirs", load=args.work / "theirs")
    foreign(cases)


def foreign(cases: Cases) -> None:
    """Load a run that no Megatron saved: the weights of `whole`, in a mapping."""
    root = cases.args.work / "root"
    with holdfast.open("whole@3", root=root) as whole:
        weights = {name: whole.read(name, framework="torch") for name in whole.tensors["model"]}
    with holdfast.Checkpointer("foreign", {"model": weights}, at=root) as checkpointer:
        checkpointer.save(5, wait="durable")
    with holdfast.Checkpointer("weights", {"model": weights}, at=root) as checkpointer:
        checkpointer.save(6, groups=("model",), wait="durable")
    new = {"load": root / "foreign", "save": root / "goes-on"}
    cases.loaded("foreign", **new)
    cases.loaded("foreign, without moments", strict=False, **new)
    cases.loaded("foreign, no_load_optim", strict=False, no_load_optim=True, **new)
    cases.loaded("foreign, finetune", finetune=True, **new)
    cases.loaded("weights", load=root / "weights", save=root / "goes-on")
    cases.loaded("weights, step", ckpt_step=6, load=root / "weights", save=root / "goes-on")
    cases.loaded("weights, finetune", finetune=True, load=root / "weights", save=root / "goes-on")
    cases.loaded("weights, pretrained", load=None, pretrained_checkpoint=root / "weights")


def refusals(cases: Cases) -> None:
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    hf = training.huggingface(argparse.Namespace(family="llama", tied=False))
    assert hf is not None
    cases.refused("release", release=True)
    cases.refused("non-persistent", non_persistent_ckpt=True)
    cases.refused("rank", tensor_rank=0)
    cases.refused("group", tp_group=torch.distributed.new_group([0], backend="gloo"))
    cases.refused("loader", lambda made: vars(made.args).update(dataloader_save="somewhere"))
    cases.refused("precision", lambda made: vars(inner(made).config).update(use_precision_aware_optimizer=True))
    cases.refused("offload", lambda made: vars(inner(made).config).update(optimizer_cpu_offload=True))
    cases.refused("optimizer", another_optimizer)
    cases.refused("left-out", lambda made: sharded(made, lambda found: found.pop("decoder.final_layernorm.weight")))
    cases.refused("transposed", lambda made: sharded(made, transposed))
    cases.refused("temporary", lambda made: sharded(made, temporary))
    cases.refused("unknown-value", lambda made: sharded(made, lambda found: found.update(more=torch.zeros(1))))
    cases.refused("pickled", lambda made: extra_state(made, {"scale": 3}))
    cases.refused("moments", strange_moments)
    cases.refused("architecture", settings={"huggingface": {**hf, "architectures": ["GPT2LMHeadModel"]}})
    cases.refused("vocabulary", settings={"huggingface": {**hf, "vocab_size": training.VOCABULARY - 3}})
    cases.refused("heads", settings={"huggingface": {**hf, "head_dim": 16}})
    cases.refused("sizes", settings={"huggingface": {**hf, "num_hidden_layers": 3}})
    cases.refused("no-table-entry", lambda made: sharded(made, unknown_name), settings={"huggingface": hf})
    machine = get_rerun_state_machine()
    before, machine.state = machine.state, RerunState.RERUNNING_IN_PLACE
    cases.refused("rerun")
    machine.state = before
    cases.refused("fine", pp_group=parallel_state.get_pipeline_model_parallel_group(), dp_group=None)
    cases.refused("fsdp", lambda made: setattr(made.model[0], "__class__", fsdp(made)))
    cases.refused("bytes", lambda made: extra_state(made, torch.arange(5, dtype=torch.uint8)))


def inner(made: training.Training) -> Any:
    return made.optimizer.chained_optimizers[0]


def gpt(made: training.Training) -> Any:
    return made.model[0].module.module


def another_optimizer(made: training.Training) -> None:
    class Sharded(type(inner(made))):  # type: ignore[misc]
        pass

    inner(made).__class__ = Sharded


def fsdp(made: training.Training) -> type:
    """What Megatron's own wrapper for FSDP is called; torch's has a name that ends so too."""
    return type("FullyShardedDataParallel", (type(made.model[0]),), {})


def restored_bytes(cases: Cases) -> None:
    """Load the run `bytes` into a model whose module takes its extra state back."""
    args = copy.copy(cases.args)
    args.load = args.work / "root" / "bytes"
    configure(args=args)
    made = training.build(args)
    taken: list[torch.Tensor] = []
    extra_state(made, torch.zeros(5, dtype=torch.uint8))
    gpt(made).decoder.layers[0].self_attention.linear_proj.set_extra_state = taken.append
    load_checkpoint(made.model, made.optimizer, made.scheduler)
    close()
    cases.answers["restored bytes"] = [one.tolist() for one in taken]


def strange_moments(made: training.Training) -> None:
    state = inner(made).optimizer.state
    parameter = next(iter(state))
    state[parameter]["row"] = torch.zeros(parameter.shape[0], 1, 1)


def extra_state(made: training.Training, value: Any) -> None:
    gpt(made).decoder.layers[0].self_attention.linear_proj.get_extra_state = lambda: value


def sharded(made: training.Training, change: Callable[[dict[str, Any]], Any]) -> None:
    plain = gpt(made).sharded_state_dict

    def changed(*args: Any, **named: Any) -> dict[str, Any]:
        found = plain(*args, **named)
        change(found)
        return dict(found)

    gpt(made).sharded_state_dict = changed


def transposed(found: dict[str, Any]) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    name = "decoder.layers.0.mlp.linear_fc2.weight"
    found[name] = ShardedTensorFactory(
        name, found[name].data, lambda key, data, replica, _: ShardedTensor.from_rank_offsets(key, data.t()), lambda x: x
    )


def temporary(found: dict[str, Any]) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    name = "decoder.final_layernorm.weight"
    found[name] = ShardedTensor.from_rank_offsets(name, found[name].data.detach().clone())


def unknown_name(found: dict[str, Any]) -> None:
    found["decoder.final_layernorm.weight"].key = "decoder.another.weight"


if __name__ == "__main__":
    main()
