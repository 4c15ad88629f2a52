"""E2 to E4, and every option of the manager's Config, with torchtitan's Trainer on one rank of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import free_port
from tests.integrations.recording import digest
from tests.integrations.resuming import completed
from tests.integrations.torchtitan import tiny

# isort: split
import torch
from safetensors.torch import load_file
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.trainer import Trainer

from holdfast import Checkpointer
from holdfast.integrations.torchtitan import HoldfastCheckpointManager
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint, StateMismatch

SCRIPT = "tests.integrations.torchtitan.train"
Build = Callable[..., Trainer]
# torchtitan and torchdata warn of the CPU, and of themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::holdfast.save_warning.SaveWarning")]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """A function that makes a Trainer: of this many steps, with these checkpoint options. All end with the test."""
    made: list[Trainer] = []
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    def make(steps: int, manager: Any = HoldfastCheckpointManager, **options: Any) -> Trainer:
        if manager is HoldfastCheckpointManager:
            options = {"run": "run", "at": str(tmp_path / "root"), **options}
        checkpoint = manager.Config(**{"enable": True, "interval": 2, "last_save_model_only": False, **options})
        trainer = tiny.trainer_config(tmp_path, steps, checkpoint).build()
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trained(trainer: Trainer) -> Trainer:
    """The trainer, after its training; what it saved is committed."""
    trainer.train()
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.close()
    return trainer


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters and moments, whole."""
    found: dict[str, Any] = {}
    for name, parameter in trainer.model_parts[0].named_parameters():
        found[name] = parameter
        for optimizer in trainer.optimizers:
            found |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def digests(trainer: Trainer) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors(trainer).items()}


def linked(work: Path) -> list[str]:
    return sorted(path.name for path in (work / "out" / "checkpoint").iterdir())


def test_two_ranks_are_loaded_by_one(build: Build, tmp_path: Path) -> None:
    """E2: one rank gets the whole tensors of two; the position in the data is refused, by name, unless it is left out."""
    whole = completed(SCRIPT, ("--steps", "4", "--full"), tmp_path, world=2)
    with pytest.raises(StateMismatch, match=r"dataloader\.0-of-1") as refused:
        build(5).checkpointer.load()
    assert "exclude_from_loading" in refused.value.hint
    one = build(5, exclude_from_loading=["dataloader"])
    assert one.checkpointer.load() and one.step == 4
    saved = whole.ends[0]["end"]
    parameters = [name for name, _ in one.model_parts[0].named_parameters()]
    assert {name: digests(one)[name] for name in parameters} == {name: saved[name] for name in parameters}
    assert len(saved) == len(digests(one))  # moments are recorded by position: as many, and equal by order
    for index, name in enumerate(parameters):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert digests(one)[f"{name}/{key}"] == saved[f"optim.0.{index}.{key}"]


def test_torchtitan_and_a_plain_checkpointer_read_each_other(build: Build, tmp_path: Path) -> None:
    """E2: parameters and moments of either are restored by the other, bit by bit."""
    titan = trained(build(2))
    copies = {name: nn.Parameter(torch.empty_like(tensor)) for name, tensor in tensors(titan).items() if "/" not in name}
    optimizer = torch.optim.AdamW(copies.values())
    state = {"model": copies, "optim": optimizer}
    with Checkpointer("run", state, at=tmp_path / "root") as plain:
        assert plain.restore(exclude=("extra/*",)) == 2
        found = {name: digest(copy) for name, copy in copies.items()}
        found |= {f"{name}/{key}": digest(v) for name, copy in copies.items() for key, v in optimizer.state[copy].items()}
        assert found == digests(titan)
        with torch.no_grad():
            for copy in copies.values():
                copy.mul_(2)
        plain.save(3, wait="durable")
    other = build(4, exclude_from_loading=["dataloader", "lr_scheduler", "train_state"])
    assert other.checkpointer.load() and other.step == 0
    doubled = {name: digest(copy) for name, copy in copies.items()}
    assert {name: digests(other)[name] for name in doubled} == doubled


def test_the_last_step_loads_as_a_hugging_face_model(build: Build, tmp_path: Path) -> None:
    """E3: last_save_in_hf writes what Transformers and torchtitan's initial_load_in_hf load."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=tiny.WIDTH,
        intermediate_size=2 * tiny.WIDTH,
        num_hidden_layers=tiny.LAYERS,
        num_attention_heads=tiny.HEADS,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "assets")
    titan = trained(build(2, last_save_model_only=True, last_save_in_hf=True))
    directory = tmp_path / "out" / "checkpoint" / "step-2"
    names = [name for path in directory.glob("*.safetensors") for name in load_file(path)]
    assert "model.layers.0.self_attn.q_proj.weight" in names and not any("wqkv" in name for name in names)
    words = torch.arange(tiny.LENGTH)[None]
    logits = LlamaForCausalLM.from_pretrained(directory)(words).logits
    with torch.no_grad():
        ours = titan.model_parts[0](words)
    torch.testing.assert_close(logits, ours.full_tensor() if hasattr(ours, "full_tensor") else ours, atol=1e-5, rtol=1e-4)
    other = build(3, run="other", folder="elsewhere", initial_load_path=str(directory), initial_load_in_hf=True)
    assert other.checkpointer.load() and other.step == 0
    parameters = [name for name, _ in titan.model_parts[0].named_parameters()]
    assert {name: digests(other)[name] for name in parameters} == {name: digests(titan)[name] for name in parameters}


def test_the_last_step_has_the_dtype_of_an_export(build: Build, tmp_path: Path) -> None:
    """export_dtype converts the model of the last save, and nothing else is in it; a restart goes on before it."""
    trained(build(3, last_save_model_only=True, export_dtype="bfloat16"))
    files = list((tmp_path / "out" / "checkpoint" / "step-3").glob("*.safetensors"))
    assert [path.name for path in files] == ["model.safetensors"]
    assert {tensor.dtype for tensor in load_file(files[0]).values()} == {torch.bfloat16}
    again = build(5, last_save_model_only=True)
    assert again.checkpointer.load() and again.step == 2
    trained(again)
    assert {tensor.dtype for tensor in load_file(files[0]).values()} == {torch.bfloat16}
    assert linked(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]


def test_interval_first_step_and_the_newest_k(build: Build, tmp_path: Path) -> None:
    """Steps 1, 2, 4, 5 are saved; two stay, with their links, and the others are removed."""
    trainer = build(5, enable_first_step_checkpoint=True, keep_latest_k=2)
    saved = []
    save = trainer.checkpointer.save
    trainer.checkpointer.save = lambda step, last_step=False: saved.append(step) if save(step, last_step) else None
    trained(trainer)
    assert saved == [1, 2, 4, 5]
    assert linked(tmp_path) == ["step-4", "step-5"]


def test_load_only_saves_nothing(build: Build, tmp_path: Path) -> None:
    """Neither at an interval nor at the last step."""
    trainer = trained(build(3, load_only=True, enable_first_step_checkpoint=True))
    assert trainer.checkpointer.ticket is None
    assert not (tmp_path / "out" / "checkpoint").exists()


def test_going_back_to_an_older_step_replaces_the_newer_ones(build: Build, tmp_path: Path) -> None:
    """load_step restores that step; what is saved from then on replaces what was there, and a restart takes it."""
    trained(build(6, keep_latest_k=0))
    back = build(5, keep_latest_k=0)
    assert back.checkpointer.load(step=2) and back.step == 2
    before = digests(back)
    back.config.checkpoint.load_step = 2
    back.config.checkpoint.exclude_from_loading = []
    trained(back)
    again = build(7, keep_latest_k=0)
    assert again.checkpointer.load() and again.step == 5
    assert digests(again) == digests(back) != before


def test_a_step_that_does_not_exist_is_refused(build: Build) -> None:
    """By name, with the error that torchtitan's own manager raises; another step is never taken instead."""
    trained(build(2))
    with pytest.raises(NoSuchCheckpoint, match=r"--checkpoint\.load_step=3") as refusal:
        build(4).checkpointer.load(step=3)
    assert isinstance(refusal.value, FileNotFoundError)


def test_a_seed_checkpoint_gives_its_model_to_a_training(build: Build) -> None:
    """Step 0 has the model alone, and training begins from it."""
    seed = build(2, last_save_model_only=True)
    with torch.no_grad():
        seed.model_parts[0].norm.weight.mul_(3)
    assert seed.checkpointer.save(0, last_step=True)
    seed.close()
    trainer = build(2)
    assert trainer.checkpointer.load() and trainer.step == 0
    assert digests(trainer) == {name: value for name, value in digests(seed).items() if "/" not in name}
    assert trainer.checkpointer.load(step=0)


def test_a_run_of_torchtitans_own_checkpoints_is_moved_over(build: Build, tmp_path: Path) -> None:
    """The first start goes on from the newest of torchtitan's checkpoints, the next from Holdfast's."""
    titan = trained(build(4, manager=CheckpointManager))
    moved = build(6)
    assert moved.checkpointer.load() and moved.step == 4
    assert digests(moved) == digests(titan)
    assert moved.lr_schedulers.state_dict() == titan.lr_schedulers.state_dict()
    rows = [next(iter(loader))[0]["input"][:, 0].tolist() for loader in (moved.dataloader, titan.dataloader)]
    assert rows[0] == rows[1]
    whole = trained(build(6))
    assert linked(tmp_path) == ["step-2", "step-4", "step-6"]
    assert (tmp_path / "out" / "checkpoint" / "step-6").is_symlink()
    again = build(7)
    assert again.checkpointer.load() and again.step == 6 and digests(again) == digests(whole)
    older = build(7)
    assert older.checkpointer.load(step=2) and older.step == 2


def test_another_runs_checkpoint_is_a_beginning(build: Build, tmp_path: Path) -> None:
    """initial_load_path takes a checkpoint of another run: its model, or everything."""
    first = trained(build(2))
    path = str(tmp_path / "out" / "checkpoint" / "step-2")
    model = build(4, run="second", folder="second", initial_load_path=path)
    assert model.checkpointer.load() and model.step == 0
    names = [name for name in digests(first) if "/" not in name]
    assert digests(model) == {name: digests(first)[name] for name in names}
    everything = build(4, run="third", folder="third", initial_load_path=path, initial_load_model_only=False)
    assert everything.checkpointer.load() and everything.step == 2
    assert digests(everything) == digests(first)


def test_excluded_parts_keep_what_they_have(build: Build) -> None:
    """The optimizer and the scheduler begin anew, the rest goes on."""
    first = trained(build(2))
    other = build(4, exclude_from_loading=["optimizer", "lr_scheduler"])
    assert other.checkpointer.load() and other.step == 2
    assert other.lr_schedulers.state_dict() == {"last_epoch": 0}
    assert digests(other) == {name: value for name, value in digests(first).items() if "/" not in name}


def test_saves_can_be_waited_for(build: Build, tmp_path: Path) -> None:
    """save_future ends when the checkpoint is there; a step that this launch has saved already counts as saved."""
    trainer = build(2)
    manager = trainer.checkpointer
    assert manager.save(2) and manager.save_future is not None
    manager.maybe_wait_for_saving()
    assert manager.save_future is None
    assert (tmp_path / "out" / "checkpoint" / "step-2" / "COMMIT").is_file()
    assert manager.save(2, last_step=True)
    manager.maybe_wait_for_staging()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": ""}, "checkpoint.run is empty"),
        ({"run": "a/b"}, "a/b"),
        ({"exclude_from_loading": ["optimiser"]}, "optimiser"),
        ({"exclude_from_loading": ["optimizer"]}, "lr_scheduler"),
    ],
)
def test_options_that_contradict_are_refused(build: Build, options: dict[str, Any], words: str) -> None:
    """E4: by name, when the manager is made."""
    with pytest.raises(InvalidRequest, match=words):
        build(2, **options)


@pytest.mark.parametrize("place", ["checkpoint/step-2", "checkpoint"])
def test_training_goes_on_without_a_link(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    """What is in its place, or its folder's, stays, and the checkpoint is saved all the same."""
    trainer = build(2, keep_latest_k=2)
    (tmp_path / "out" / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "out" / place).write_text("mine")
    trainer.checkpointer.save(2)
    assert f"{tmp_path / 'out' / 'checkpoint' / 'step-2'} was not linked" in caplog.text
    trainer.checkpointer.ticket.result()
    assert (tmp_path / "out" / place).read_text() == "mine"


def test_state_that_would_be_lost_is_refused(build: Build) -> None:
    """E4: foreign hooks of modules, pickles of loaders, two parts with one name, reserved names."""
    from holdfast.integrations.torchtitan_state import DataPosition, ModelParts

    class Pickling(ParallelAwareDataloader):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict()

    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(more=torch.ones(1)))
    with pytest.raises(InvalidRequest, match="hook of state_dict"):
        ModelParts([hooked])
    with pytest.raises(InvalidRequest, match="two parts of the model have different tensors named 'weight'"):
        ModelParts([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(InvalidRequest, match="has a pickle under 'dp_rank_0'"):
        DataPosition(Pickling(tiny.Rows(0, 1), 0, 1, batch_size=2)).state_dict()


def test_buffers_that_are_not_persistent_are_left_out() -> None:
    """And all others are stored, under clean names."""
    from holdfast.integrations.torchtitan_state import ModelParts

    part = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    part.register_buffer("freqs_cis", torch.ones(3), persistent=False)
    assert ModelParts([part]).state_dict().keys() == part.state_dict().keys()
    assert isinstance(ModelParts([part]).entry(), ModelParts)  # it has buffers
    assert ModelParts([nn.Linear(2, 2)]).entry().keys() == {"weight", "bias"}


def test_a_disabled_manager_does_nothing(build: Build, tmp_path: Path) -> None:
    """Not even with a run that is not named."""
    trainer = trained(build(2, enable=False, run=""))
    assert not trainer.checkpointer.save(2) and not trainer.checkpointer.load()
    assert not (tmp_path / "root").exists()
