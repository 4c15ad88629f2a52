"""E2 to E4 of verl's checkpoints, on one rank of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.workers.engine.fsdp import transformer_impl

from holdfast.integrations import verl as holdfast_verl
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from tests.daemons import free_port
from tests.integrations.recording import digest
from tests.integrations.verl.train import WORDS, Worker

pytestmark = pytest.mark.filterwarnings("ignore")  # verl, ray and torch warn of the CPU, and of each other
Make = Callable[..., Worker]


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that makes a worker of a role, with options for verl's configuration of checkpoints."""
    made: list[Worker] = []
    holdfast_verl.install("run", at=tmp_path / "root")

    def build(role: str = "actor", keep: int | None = None, **config: Any) -> Worker:
        worker = Worker(role, "fsdp2", keep)
        if config:
            worker.manager = manager_of(worker, CheckpointConfig(**config))
        made.append(worker)
        return worker

    yield build
    for worker in made:
        if hasattr(worker.manager, "close"):
            worker.manager.close()
    holdfast_verl.uninstall()


def manager_of(worker: Worker, config: Any, **given: Any) -> Any:
    return transformer_impl.FSDPCheckpointManager(
        worker.module, worker.optimizer, worker.scheduler, checkpoint_config=config, **given
    )


def trained(worker: Worker, steps: int) -> Worker:
    for _ in range(steps):
        worker.step(torch.randint(0, WORDS, (2, 6)))
    return worker


def digests(worker: Worker) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in worker.tensors().items()}


def test_the_directory_loads_as_a_hugging_face_model(make: Make, tmp_path: Path) -> None:
    """E3: the link that verl calls the checkpoint is a model's directory; nothing need be merged."""
    worker = trained(make(), 2)
    worker.save(tmp_path / "out" / "global_step_2", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "global_step_2" / "actor")
    ours = {name: value.full_tensor() for name, value in worker.module.named_parameters()}
    assert {name: digest(value) for name, value in model.named_parameters()} == {n: digest(v) for n, v in ours.items()}


def test_going_back_to_an_older_step_replaces_the_newer_ones(make: Make, tmp_path: Path) -> None:
    """resume_mode=resume_path: what is saved from then on takes the place of what was there."""
    worker = make()
    for step in (2, 4, 6):
        trained(worker, 2).save(tmp_path / f"global_step_{step}", step)
    back = make()
    back.load(tmp_path / "global_step_2")
    trained(back, 2).save(tmp_path / "global_step_4", 4)
    again = make()
    again.load(tmp_path / "global_step_4")
    assert digests(again) == digests(back) != digests(worker)


def test_contents_say_what_is_saved_and_loaded(make: Make, tmp_path: Path) -> None:
    """save_contents and load_contents are groups; hf_model is the model."""
    first = trained(make(save_contents=["hf_model"]), 2)
    first.save(tmp_path / "global_step_2", 2)
    files = {path.name for path in (tmp_path / "global_step_2" / "actor").iterdir()}
    assert "model.safetensors" in files and "optim.safetensors" not in files
    other = make(load_contents=["model"])
    other.load(tmp_path / "global_step_2")
    assert not other.optimizer.state
    assert all(digests(first)[name] == value for name, value in digests(other).items())


def test_a_checkpoint_of_verls_own_is_loaded_by_verl(make: Make, tmp_path: Path) -> None:
    """A run is moved over: the first start reads what verl wrote, later ones what Holdfast did."""
    holdfast_verl.uninstall()
    own = trained(Worker("actor", "fsdp2", None), 2)
    own.save(tmp_path / "global_step_2", 2)
    holdfast_verl.install("run", at=tmp_path / "root")
    moved = make()
    moved.load(tmp_path / "global_step_2")
    assert digests(moved) == digests(own)
    trained(moved, 2).save(tmp_path / "global_step_4", 4)
    again = make()
    again.load(tmp_path / "global_step_4")
    assert digests(again) == digests(moved)


def test_training_goes_on_without_a_link(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is in its place stays, the checkpoint is saved, and found by the number in its path once that is gone."""
    holdfast_verl.uninstall()
    folder = tmp_path / "global_step_2"
    trained(Worker("actor", "fsdp2", None), 1).save(folder, 2)
    holdfast_verl.install("run", at=tmp_path / "root")
    worker = trained(make(keep=1), 2)
    worker.save(folder, 2)
    assert f"{folder / 'actor'} exists, and is not a link. The checkpoint is saved" in caplog.text
    assert list((folder / "actor").glob("*_world_size_1_rank_0.pt"))
    other = make()
    with pytest.raises(InvalidRequest, match="was written by verl, and run-actor@2 was saved without a link"):
        other.load(folder)
    (folder / "actor").rename(tmp_path / "moved")
    (folder / "actor").write_text("mine")
    with pytest.raises(InvalidRequest, match="is not a checkpoint of run-actor"):
        other.load(folder)
    (folder / "actor").unlink()
    other.load(folder)
    assert digests(other) == digests(worker)


def test_a_step_folder_itself_stays_verls(make: Make, tmp_path: Path) -> None:
    """verl's SFT trainer saves to global_step_N itself, and then puts its data loader there: not into the checkpoint."""
    worker = trained(make(), 2)
    worker.manager.save_checkpoint(str(tmp_path / "global_step_2"), None, 2)
    (tmp_path / "global_step_2" / "data_0.pt").write_bytes(b"verl's")
    assert not (tmp_path / "root" / "run" / "checkpoints" / "step-00000002" / "data_0.pt").exists()
    other = make()
    other.manager.load_checkpoint(str(tmp_path / "global_step_2"))
    assert digests(other) == digests(worker)


def test_old_links_are_removed_and_nothing_else(make: Make, tmp_path: Path) -> None:
    """max_ckpt_to_keep counts the links of a role up to the step that is saved; verl's files stay."""
    worker = make(keep=2)
    for step in (2, 4, 6):
        trained(worker, 1).save(tmp_path / f"global_step_{step}", step)
        (tmp_path / f"global_step_{step}" / "data.pt").write_bytes(b"verl's")
    assert not os.path.lexists(tmp_path / "global_step_2" / "actor")
    assert all((tmp_path / f"global_step_{step}" / "actor" / "COMMIT").is_file() for step in (4, 6))
    assert (tmp_path / "global_step_2" / "data.pt").is_file()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"async_save": True}, "async_save"),
        ({"save_lora_only": True}, "save_lora_only"),
        ({"save_contents": ["model", "optimiser"]}, "optimiser"),
    ],
)
def test_options_without_a_meaning_here_are_refused(make: Make, config: dict[str, Any], words: str) -> None:
    """E4: by name, when the worker makes its manager."""
    with pytest.raises(InvalidRequest, match=words):
        make(**config)


def test_paths_that_are_no_checkpoint_are_refused(make: Make, tmp_path: Path) -> None:
    """E4: another role's, another run's, none at all, and HDFS."""
    worker = trained(make(), 1)
    worker.save(tmp_path / "global_step_2", 2)
    with pytest.raises(InvalidRequest, match="hdfs_path"):
        worker.manager.save_checkpoint(str(tmp_path / "global_step_4" / "actor"), "hdfs://x", 4)
    with pytest.raises(NoSuchCheckpoint, match="global_step_9"):
        make().load(tmp_path / "global_step_9")
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_3" / "critic").symlink_to(os.readlink(tmp_path / "global_step_2" / "actor"))
    with pytest.raises(InvalidRequest, match="not a checkpoint of run-critic"):
        make("critic").load(tmp_path / "global_step_3")
    with pytest.raises(InvalidRequest, match="run-critic"):
        worker.manager.save_checkpoint(str(tmp_path / "global_step_4" / "critic"), None, 4)
    assert not (tmp_path / "global_step_4").exists()


def test_a_model_that_is_not_all_saved_is_refused(make: Make, tmp_path: Path) -> None:
    """E4: an optimizer of no kind that torch knows, and a second run in one process."""
    worker = make()
    worker.optimizer = object()
    with pytest.raises(InvalidRequest, match="not a torch optimizer"):
        manager_of(worker, CheckpointConfig())
    with pytest.raises(InvalidRequest, match="already called"):
        holdfast_verl.install("another", at=tmp_path)
