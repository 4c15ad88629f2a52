"""What a program switches in training is named, and what every loop switches is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from holdfast.state.train_state import TrainState
from tests.client.checkpoint_in_memory import Checkpoint


class Model(nn.Module):
    """With layers that a program freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.backbone, x, use_reentrant=False))  # type: ignore[no-any-return]


class Training:
    def __init__(self) -> None:
        self.model = Model().eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = TrainState({"model": self.model, "optim": self.optimizer}, 0, 1)

    def step(self) -> None:
        self.model(torch.randn(4, 2)).sum().backward()
        self.optimizer.step()
        self.state.unsaved.stepped(self.optimizer)
        self.optimizer.zero_grad()

    def notes(self) -> list[str]:
        return list(self.state.snapshot().notes)


def test_requires_grad_that_changed_is_named_twice() -> None:
    """By the save with all parameters, and by a restore into a model in which it is another."""
    training, other = Training(), Training()
    training.model.train()
    training.model.backbone.requires_grad_(False)
    training.step()
    taken = training.state.snapshot()
    (note,) = taken.notes
    assert "requires_grad" in note and ": model.backbone.0.weight, model.backbone.0.bias, model.backbone.1.weight" in note
    (note,) = other.state.prepare(Checkpoint(taken).stored()).notes
    assert note.startswith("not restored: requires_grad") and "model.backbone.0.weight (was False, is True)" in note
    other.model.backbone.requires_grad_(False)
    assert not other.state.prepare(Checkpoint(taken).stored()).notes


def test_switching_at_every_step_is_one_notice() -> None:
    """As the two sides of a GAN: the same words at each save."""
    training = Training()
    training.model.train()
    seen = set()
    for step in range(6):
        training.model.backbone.requires_grad_(step % 2 == 0)
        training.step()
        seen |= set(training.notes())
    assert len(seen) == 1


def test_the_mode_of_a_submodule_is_named_once_it_is_another_than_in_the_first_step() -> None:
    """Not what the loop sets before it, not a validation, nor a save in one. Only the module that was switched is named."""
    training = Training()
    training.model.train()
    training.model.backbone[1].eval()
    for _ in range(2):
        training.step()
        training.model.eval()
        assert not training.notes()
        training.model.train()
        training.model.backbone[1].eval()
        assert not training.notes()
    training.model.backbone.eval()
    taken = training.state.snapshot()
    (note,) = taken.notes
    assert "the mode (train() or eval())" in note and ": model.backbone; set" in note
    (note,) = Training().state.prepare(Checkpoint(taken).stored()).notes
    assert note.endswith("as it was when saved: model.backbone (eval)")


def test_a_setting_of_a_layer_is_named() -> None:
    """As a schedule of dropout has it."""
    training, other = Training(), Training()
    training.model.backbone[2].p = 0.1  # type: ignore[assignment]
    taken = training.state.snapshot()
    assert [": model.backbone.2.p;" in note for note in taken.notes] == [True]
    (note,) = other.state.prepare(Checkpoint(taken).stored()).notes
    assert "model.backbone.2.p (was 0.1, is 0.5)" in note


def compiled() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = torch.compile(Model().backbone, backend="eager")
    return model, lambda: model(torch.randn(4, 2))


def test_a_module_that_fsdp2_has_sharded_is_the_user_s(single_process_group: None) -> None:
    """torch makes a class of its own of the user's."""
    training = Training()
    fully_shard(training.model)
    state = TrainState({"model": training.model}, 0, 1)
    training.model.phase = "main"  # type: ignore[assignment]
    assert [": model.phase;" in note for note in state.snapshot().notes] == [True]


def llama() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has another name from transformers 5 on
        model.gradient_checkpointing_enable()
    tokens = torch.randint(16, (2, 12))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def encoder() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2, enable_nested_tensor=False)
    return model, lambda: model(torch.randn(2, 3, 4))


def mixed() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(
        nn.LSTM(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))
    )
    return model, lambda: model[2](model[1](model[0](torch.randn(2, 3, 4))[0]))


def quantized() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    from torch.ao import quantization

    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 4), nn.ReLU(), quantization.DeQuantStub()).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao is to replace it
        quantization.prepare_qat(model, inplace=True)
    return model, lambda: model(torch.randn(2, 4))


def replicated() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = DistributedDataParallel(Model())
    return model, lambda: model(torch.randn(4, 2))


def sharded() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = Model()
    fully_shard(model.backbone)
    return fully_shard(model, reshard_after_forward=False), lambda: model(torch.randn(4, 2))


FORWARD_ON_CPU = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch runs no forward pass on a CPU"
)


@pytest.mark.parametrize(
    "make", [compiled, llama, encoder, mixed, quantized, replicated, pytest.param(sharded, marks=FORWARD_ON_CPU)]
)
def test_an_ordinary_training_gives_no_notice(
    make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]], single_process_group: None
) -> None:
    """With validations, over several saves."""
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainState({"model": model, "optim": optimizer}, 0, 1)
    for _ in range(3):
        model.train()
        loss().sum().backward()
        optimizer.step()
        state.unsaved.stepped(optimizer)
        optimizer.zero_grad()
        assert not state.snapshot().notes
        model.eval()
        with torch.no_grad():
            loss()
        assert not state.snapshot().notes
