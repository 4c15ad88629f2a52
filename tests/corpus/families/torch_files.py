"""Files that torch writes: training scripts of one's own, and what libraries keep in them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.corpus.cases import Case, Tensors, flat, prefixed

MODEL_KEYS = ("state_dict", "model_state_dict", "model")


class Net(nn.Module):
    """A network with a buffer and two kinds of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.body(self.embed(rows).mean(1))
        return hidden


def trained(model: nn.Module, inputs: torch.Tensor, optimizer: Any = torch.optim.AdamW, **how: Any) -> torch.optim.Optimizer:
    """An optimizer of the model after two steps."""
    made = optimizer(model.parameters(), lr=1e-2, **how)
    for _ in range(2):
        made.zero_grad()
        out = model(inputs)
        (out if isinstance(out, torch.Tensor) else out[0]).square().mean().backward()
        made.step()
    return made  # type: ignore[no-any-return]


def net() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, trained(model, torch.arange(24).reshape(6, 4))


def opened(place: Path) -> Any:
    """What torch reads from the only file of a directory."""
    (path,) = (one for one in place.iterdir() if one.suffix in (".pt", ".pth", ".bin", ".ckpt"))
    return torch.load(path, weights_only=False)


def model_of(place: Path) -> dict[str, torch.Tensor]:
    """The model's tensors; what torch.compile puts before names is dropped, as programs drop it."""
    held = opened(place)
    held = next((held[key] for key in MODEL_KEYS if isinstance(held, dict) and isinstance(held.get(key), Mapping)), held)
    return {name.removeprefix("_orig_mod."): value for name, value in held.items() if isinstance(value, torch.Tensor)}


def weights(place: Path) -> Tensors:
    return prefixed("model", model_of(place))


def with_optimizer(key: str, group: str = "optim") -> Callable[[Path], Tensors]:
    """Reads weights, and an optimizer's state by parameter names: those of the weights, in order."""

    def read(place: Path) -> Tensors:
        found = opened(place)
        names = [name for name in model_of(place) if name in dict(_parameters(model_of(place)))]
        state = found[key]["state"]
        return {
            **weights(place),
            **prefixed(group, {f"{names[number]}/{k}": v for number, one in state.items() for k, v in one.items()}),
        }

    return read


def with_numbers(key: str) -> Callable[[Path], Tensors]:
    """Reads weights, and an optimizer's state by the numbers of its parameters: their names are not certain."""
    return lambda place: {**weights(place), **prefixed("optim", flat(opened(place)[key]["state"]))}


def all_of(key: str) -> Callable[[Path], Tensors]:
    """The same, and all other tensors of the file."""

    def read(place: Path) -> Tensors:
        beside = {name: one for name, one in opened(place).items() if name not in (*MODEL_KEYS, key)}
        average = prefixed("ema", beside.pop("state_dict_ema", {}))
        return {**with_numbers(key)(place), **average, **prefixed("extra", flat(beside))}

    return read


def _parameters(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name, one) for name, one in tensors.items() if "running_" not in name and "num_batches" not in name]


def into(make: Callable[[], nn.Module]) -> Callable[[Path], Tensors]:
    """Loads a file's state dict, or an export's, strictly into a new model; its tensors."""

    def load(place: Path) -> Tensors:
        from safetensors.torch import load_file

        model, path = make(), place / "model.safetensors"
        state = load_file(path) if path.is_file() else model_of(place)
        model.load_state_dict(state)
        return dict(model.state_dict())

    return load


def plain(place: Path) -> None:
    torch.save(net()[0].state_dict(), place / "model.pt")


def old_format(place: Path) -> None:
    torch.save(net()[0].state_dict(), place / "model.pth", _use_new_zipfile_serialization=False)


def tutorial(place: Path) -> None:
    """As PyTorch's tutorial saves a general checkpoint."""
    model, optimizer = net()
    held = {"epoch": 2, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "loss": 0.5}
    torch.save(held, place / "checkpoint.pt")


def small() -> nn.Module:
    """A network whose tensors are all parameters."""
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def nanogpt(place: Path) -> None:
    """As nanoGPT's train.py saves: compiled, with weight decay in one of two groups."""
    model = small()
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
    )
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    held = {
        "model": {f"_orig_mod.{name}": one for name, one in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {"n_layer": 2, "bias": False, "vocab_size": 50304},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True},
    }
    torch.save(held, place / "ckpt.pt")


def named(place: Path) -> None:
    """As torch.distributed.checkpoint.state_dict gives a state: the optimizer's by names."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = net()
    states = get_state_dict(model, optimizer)
    torch.save(
        {"model": states[0], "optimizer": states[1], "step": 2, "rng_state": torch.get_rng_state()}, place / "step.pt"
    )


def named_read(place: Path) -> Tensors:
    held = opened(place)
    return {
        **prefixed("model", held["model"]),
        **prefixed("optim", flat(held["optimizer"]["state"])),
        "extra/rng_state": held["rng_state"],
    }


def whole_model(place: Path) -> None:
    torch.save(net()[0], place / "model.pt")


def script(place: Path) -> None:
    torch.jit.save(torch.jit.script(small()), place / "model.pt")


def exported_program(place: Path) -> None:
    torch.export.save(torch.export.export(small(), (torch.ones(2, 4),)), place / "model.pt2")


def timm_model() -> Any:
    import timm

    return timm.create_model("resnet18", num_classes=4, block_args={}, channels=(8, 8, 16, 16), stem_width=8)


def timm_saver(place: Path) -> None:
    """As timm's train.py saves."""
    from timm.utils import CheckpointSaver, ModelEmaV3

    model = timm_model()
    optimizer = trained(model, torch.rand(2, 3, 32, 32), torch.optim.SGD, momentum=0.9)
    saver = CheckpointSaver(
        model,
        optimizer,
        args=argparse.Namespace(model="resnet18", lr=0.01),
        model_ema=ModelEmaV3(model),
        checkpoint_dir=str(place),
    )
    saver.save_checkpoint(3, metric=0.5)
    for name in ("last.pth.tar", "model_best.pth.tar"):
        (place / name).unlink(missing_ok=True)
    next(place.glob("checkpoint-*.pth.tar")).rename(place / "checkpoint-3.pth")


def timm_weights(place: Path) -> None:
    torch.save(timm_model().state_dict(), place / "model.pth")


def clip_model() -> Any:
    from open_clip.model import CLIP

    vision = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
    return CLIP(16, vision, {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1})


def open_clip(place: Path) -> None:
    """As open_clip's main.py saves, without its optimizer's groups."""
    torch.save({"epoch": 3, "name": "run", "state_dict": clip_model().state_dict()}, place / "epoch_3.pt")


def torchvision_model() -> Any:
    from torchvision.models import SqueezeNet

    return SqueezeNet("1_1", num_classes=4)


def torchvision_reference(place: Path) -> None:
    """As torchvision's references save."""
    model = small()
    optimizer = trained(model, torch.ones(2, 4), torch.optim.SGD, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    held = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 1,
    }
    torch.save(held | {"args": argparse.Namespace(lr=0.1)}, place / "checkpoint.pth")


def ema_made() -> Any:
    from ema_pytorch import EMA

    return EMA(small(), beta=0.9, update_every=1)


def ema(place: Path) -> None:
    torch.save(ema_made().state_dict(), place / "ema.pt")


def litgpt_model() -> Any:
    from litgpt import GPT, Config

    return GPT(Config(name="tiny", block_size=32, n_layer=2, n_embd=32, n_head=4, n_query_groups=2, padded_vocab_size=96))


def litgpt(place: Path) -> None:
    """As litgpt saves a model: `lit_model.pth` beside its configuration."""
    from litgpt.utils import save_config

    model = litgpt_model()
    torch.save(model.state_dict(), place / "lit_model.pth")
    save_config(model.config, place)


def ignite(place: Path) -> None:
    """By ignite's handler."""
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    model = small()
    optimizer = trained(model, torch.ones(2, 4))
    trainer = Engine(lambda engine, batch: None)
    trainer.run([1, 2], max_epochs=1)
    saver = Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, DiskSaver(str(place), atomic=False))
    saver(trainer)


def x_transformer() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=Decoder(dim=16, depth=1, heads=2, attn_dim_head=8))


def vit() -> Any:
    from vit_pytorch import ViT

    return ViT(image_size=16, patch_size=8, num_classes=4, dim=16, depth=1, heads=2, mlp_dim=24)


def state_of(make: Callable[[], nn.Module], name: str) -> Callable[[Path], object]:
    return lambda place: torch.save(make().state_dict(), place / name)


CASES = (
    Case("torch-state-dict", "torch", plain, weights, into(Net)),
    Case("torch-state-dict-of-torch-1.5", "torch", old_format, weights, into(Net)),
    Case("torch-tutorial", "torch", tutorial, with_numbers("optimizer_state_dict"), into(Net)),
    Case("torch-nanogpt", "torch", nanogpt, all_of("optimizer"), into(small)),
    Case("torch-nanogpt-weights", "torch", nanogpt, weights, into(small), ("--weights-only",)),
    Case("torch-named-optimizer", "torch", named, named_read, into(Net)),
    Case("torch-whole-model", "torch", whole_model),
    Case("torch-script", "torch", script),
    Case("torch-exported-program", "torch", exported_program),
    Case("timm-weights", "timm", timm_weights, weights, into(timm_model)),
    Case("timm-checkpoint-saver", "timm", timm_saver, all_of("optimizer"), into(timm_model)),
    Case("timm-checkpoint-saver-weights", "timm", timm_saver, weights, into(timm_model), ("--weights-only",)),
    Case("open-clip", "open_clip_torch", open_clip, weights, into(clip_model)),
    Case("torchvision-weights", "torchvision", state_of(torchvision_model, "net.pth"), weights, into(torchvision_model)),
    Case("torchvision-reference", "torchvision", torchvision_reference, with_optimizer("optimizer"), into(small)),
    Case("ema-pytorch", "ema-pytorch", ema, weights, into(ema_made)),
    Case("litgpt", "litgpt", litgpt, weights, into(litgpt_model)),
    Case("ignite", "pytorch-ignite", ignite, with_optimizer("optimizer"), into(small)),
    Case("x-transformers", "x-transformers", state_of(x_transformer, "model.pt"), weights, into(x_transformer)),
    Case("vit-pytorch", "vit-pytorch", state_of(vit, "vit.pt"), weights, into(vit)),
)  # fmt: skip
