"""What trainers and adapters save: transformers' Trainer, Accelerate, PEFT, Lightning, torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.corpus.cases import Case, Tensors, flat, prefixed
from tests.corpus.families.hugging_face import files, model, pretrained
from tests.corpus.families.torch_files import into, net, opened, small, weights

KINDS_OF_PEFT: dict[str, Callable[[Any], Any]] = {
    "lora": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "dora": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "lora-with-head": lambda peft: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], use_rslora=True
    ),
    "lora-of-experts": lambda peft: peft.LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"layers.1": 4}),
    "ia3": lambda peft: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt-tuning": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "vera": lambda peft: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "loha": lambda peft: peft.LoHaConfig(r=4, target_modules=["q_proj"]),
}


def _base(place: Path) -> Path:
    """The adapters' base, beside the source and the export."""
    base = place.parent / "base"
    if not base.is_dir():
        torch.manual_seed(1)
        model("llama").save_pretrained(base)
    return base


def adapter(kind: str) -> Callable[[Path], object]:
    def save(place: Path) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(_base(place)), KINDS_OF_PEFT[kind](peft))
        for parameter in made.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.1)
        made.save_pretrained(place)

    return save


def adapter_files(place: Path) -> Tensors:
    return {name.replace("model/", "adapter/", 1): one for name, one in files(place).items()}


def with_adapter(place: Path) -> Tensors:
    import peft
    from transformers import AutoModelForCausalLM

    return dict(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(_base(place)), place).state_dict())


def trainer(place: Path, **changed: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8) + number, "labels": torch.arange(8) + number} for number in range(8)]
    args = TrainingArguments(
        str(place), max_steps=3, save_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, **changed,
    )  # fmt: skip
    return Trainer(model("llama"), args, train_dataset=rows)


def streams(python: Any, numpy: Any, torchs: torch.Tensor) -> Tensors:
    """The random states of a rank, as they are kept."""
    kept = {"python": torch.tensor(python[1], dtype=torch.int64), "numpy": torch.from_numpy(numpy[1]), "torch": torchs}
    return prefixed("extra", {f"ranks/00000/rng/{name}": one for name, one in kept.items()})


def trainer_read(place: Path) -> Tensors:
    state = torch.load(place / "optimizer.pt", weights_only=True)["state"]
    random = torch.load(place / "rng_state.pth", weights_only=False)
    return {**files(place), **prefixed("optim", flat(state)), **streams(random["python"], random["numpy"], random["cpu"])}


def resumed(place: Path) -> Tensors:
    """What the Trainer itself loads: weights, moments and the scheduler's step."""
    made = trainer(place.parent / "resumed", weight_decay=0.0)
    made.create_optimizer_and_scheduler(3)
    made._load_from_checkpoint(str(place))
    made._load_optimizer_and_scheduler(str(place))
    found = {**made.model.state_dict(), **flat(made.optimizer.state_dict()["state"], "optim")}
    return {**found, "scheduler": torch.tensor(made.lr_scheduler.last_epoch)}


def accelerate(place: Path) -> None:
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    network = small()
    network, optimizer = made.prepare(network, torch.optim.AdamW(network.parameters()))
    made.backward(network(torch.ones(2, 4)).mean())
    optimizer.step()
    made.save_state(str(place), safe_serialization=True)


def accelerate_read(place: Path) -> Tensors:
    state = torch.load(place / "optimizer.bin", weights_only=True)["state"]
    random = torch.load(place / "random_states_0.pkl", weights_only=False)
    kept = streams(random["random_state"], random["numpy_random_seed"], random["torch_manual_seed"])
    return {**files(place), **prefixed("optim", flat(state)), **kept}


def lightning(place: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 8})
            self.net = small()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 4)), batch_size=2)
    made = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=place.parent,
    )  # fmt: skip
    made.fit(Module(), rows)
    made.save_checkpoint(place / "last.ckpt")


def lightning_read(place: Path) -> Tensors:
    held = opened(place)
    names = list(held["state_dict"])
    state = held["optimizer_states"][0]["state"]
    return {
        **weights(place),
        **prefixed("optim", {f"{names[n]}/{key}": one for n, kept in state.items() for key, one in kept.items()}),
    }


def lightning_net() -> nn.Module:
    return nn.ModuleDict({"net": small()})


def dcp_model(place: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(net()[0].state_dict(), checkpoint_id=place)


def dcp_state(place: Path) -> None:
    """Model and optimizer as `get_state_dict` gives them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states = get_state_dict(*net())
    dcp.save({"model": states[0], "optim": states[1], "step": 2}, checkpoint_id=place)


def dcp_flat(place: Path) -> None:
    """As torchtitan saves: the model's tensors at the top, flat optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    network, optimizer = net()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(network, optimizer, options=options)
    dcp.save({**network.state_dict(), "optimizer": states}, checkpoint_id=place)


def dcp_tensors(place: Path) -> dict[str, Any]:
    """Everything in a directory, by torch's own loader, under its keys there."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    held: dict[str, Any] = {}
    _load_state_dict(held, FileSystemReader(place), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return held


def dcp_read(place: Path) -> Tensors:
    held = dcp_tensors(place)
    if "optim" in held:
        return {**prefixed("model", held["model"]), **prefixed("optim", flat(held["optim"]["state"]))}
    optimizer = held.pop("optimizer", {})
    found = prefixed("model", held)
    for name, one in optimizer.items():
        if name.startswith("state."):
            parameter, _, key = name.removeprefix("state.").rpartition(".")
            found[f"optim/{parameter}/{key}"] = one
    return found


CASES = (
    *(
        Case(f"peft-{kind}", "peft", adapter(kind), adapter_files, with_adapter, exported=("--as", "peft"))
        for kind in KINDS_OF_PEFT
    ),
    Case(
        "trainer-checkpoint",
        "transformers",
        lambda place: trainer(place).train(),
        trainer_read,
        pretrained,
        source="checkpoint-3",
    ),
    Case(
        "trainer-checkpoint-again",
        "transformers",
        lambda place: trainer(place).train(),
        trainer_read,
        resumed,
        exported=("--as", "trainer"),
        source="checkpoint-3",
    ),
    Case("accelerate-save-state", "accelerate", accelerate, accelerate_read, into(small)),
    Case("lightning-checkpoint", "lightning", lightning, lightning_read, into(lightning_net)),
    Case("dcp-model", "torch", dcp_model, dcp_read, dcp_read, exported=("--as", "dcp", "--layout", "plain")),
    Case("dcp-state", "torch", dcp_state, dcp_read, dcp_read, exported=("--as", "dcp", "--layout", "fsdp")),
    Case("dcp-flat", "torch", dcp_flat, dcp_read, dcp_read, exported=("--as", "dcp", "--layout", "torchtitan")),
)
