"""What the two methods of an engine do: their arguments, the directory, runs that began without Holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import InvalidRequest, StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(number: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (4, 7), generator=torch.Generator().manual_seed(number))


def train(engine: Any, steps: int) -> list[float]:
    from tests.integrations.deepspeed import engines

    return [engines.step(engine, rows(engine.global_steps)) for _ in range(steps)]


def tensors(engine: Any) -> dict[str, torch.Tensor]:
    from tests.integrations.deepspeed import engines

    return {name: value.clone() for name, value in engines.tensors(engine).items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and not [name for name in a if not torch.equal(a[name], b[name])]


def wait(engine: Any) -> None:
    from holdfast.integrations.deepspeed import checkpointer_of

    checkpointer_of(engine).fence()
    for ticket in list(checkpointer_of(engine)._tickets.open()):
        ticket.result()


def test_training_goes_on_without_a_link(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is in the place of a link, of the directory or of `latest` stays; `latest` names no tag that is not linked."""
    saves, engine = tmp_path / "saves", make(1, run="run")
    train(engine, 1)
    engine.save_checkpoint(saves)
    (saves / "global_step2").mkdir()
    train(engine, 1)
    engine.save_checkpoint(saves)
    assert f"{saves / 'global_step2'} exists, and is not a link. The checkpoint is saved" in caplog.text
    train(engine, 1)
    (tmp_path / "file").write_text("mine")
    engine.save_checkpoint(tmp_path / "file")
    assert f"{tmp_path / 'file' / 'global_step3'} was not linked" in caplog.text
    wait(engine)
    assert (saves / "latest").read_text() == "global_step1" and not (saves / "global_step2").is_symlink()
    at_third = tensors(engine)
    train(engine, 1)
    (saves / "latest").unlink()
    (saves / "latest").mkdir()
    engine.save_checkpoint(saves)
    wait(engine)
    (saves / "mine").write_text("mine")
    with pytest.raises(InvalidRequest, match="exists and is not a link"):
        engine.load_checkpoint(saves, "mine")
    assert engine.load_checkpoint(saves, "global_step3")[0] is not None
    assert_equal(tensors(engine), at_third)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_tags_latest_and_older_steps(make: Any, tmp_path: Path, stage: int) -> None:
    """Tags are links; the newest is loaded unless a tag or the directory says otherwise; a new line may follow."""
    saves = tmp_path / "saves"
    engine = make(stage, run="run")
    assert engine.load_checkpoint(saves) == (None, None)
    train(engine, 2)
    assert engine.save_checkpoint(saves, "first", {"epoch": 1, "note": [1, "a"]}) is True
    at_first = tensors(engine)
    losses = train(engine, 2)
    engine.save_checkpoint(saves, client_state={"epoch": 2})
    at_second = tensors(engine)
    wait(engine)
    assert (saves / "latest").read_text() == "global_step4"
    assert (saves / "first" / "model.safetensors").is_file() and (saves / "first").is_symlink()

    path, client_state = engine.load_checkpoint(saves, "first")
    assert Path(path) == saves / "first" and client_state == {"epoch": 1, "note": [1, "a"]}
    assert engine.global_steps == 2 and engine.global_samples == 8
    assert_equal(tensors(engine), at_first)
    assert train(engine, 2) == losses
    assert_equal(tensors(engine), at_second)
    engine.save_checkpoint(saves, client_state={"epoch": 3})  # the same step again, of the new line
    wait(engine)
    assert engine.load_checkpoint(saves)[1] == {"epoch": 3}
    assert_equal(tensors(engine), at_second)


def test_a_part_is_loaded(make: Any, tmp_path: Path) -> None:
    """Without the optimizer's states masters follow the weights; the module alone leaves counters and scheduler."""
    saves = tmp_path / "saves"
    engine = make(1, "bf16")
    train(engine, 3)
    engine.save_checkpoint(saves, client_state={"epoch": 1})
    wait(engine)
    saved = tensors(engine)
    train(engine, 2)
    moved, lr = tensors(engine), engine.get_lr()
    assert engine.load_checkpoint(saves, load_module_only=True)[1] == {"epoch": 1}
    now = tensors(engine)
    assert engine.global_steps == 5 and engine.get_lr() == lr and engine.lr_scheduler.last_batch_iteration == 4
    for name in ("embed.weight", "out.bias"):
        assert torch.equal(now[name], saved[name]) and torch.equal(now[f"{name}/exp_avg"], moved[f"{name}/exp_avg"])
        assert torch.equal(now[f"{name}/master"], saved[name].float())
    train(engine, 1)
    engine.load_checkpoint(saves, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert engine.global_steps == 3 and engine.lr_scheduler.last_batch_iteration == 5
    now = tensors(engine)
    assert torch.equal(now["embed.weight/master"], saved["embed.weight"].float())
    assert not torch.equal(now["embed.weight/exp_avg"], saved["embed.weight/exp_avg"])
    engine.load_checkpoint(saves)
    assert_equal(tensors(engine), saved)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_began_with_deepspeed_goes_on(make: Any, tmp_path: Path, stage: int) -> None:
    """A directory that DeepSpeed wrote is loaded by DeepSpeed; from the next save on it is Holdfast's."""
    saves = tmp_path / "saves"
    engine = make(stage, run="")
    train(engine, 2)
    engine.save_checkpoint(str(saves), client_state={"epoch": 1})
    before = tensors(engine)
    other = make(stage, seed=9)
    path, client_state = other.load_checkpoint(str(saves))
    assert path is not None and client_state["epoch"] == 1 and other.global_steps == 2
    assert_equal(tensors(other), before)
    train(other, 1)
    other.save_checkpoint(saves)
    wait(other)
    assert (saves / "latest").read_text() == "global_step3" and (saves / "global_step3").is_symlink()
    saved = tensors(other)
    train(other, 1)
    other.load_checkpoint(saves)
    assert_equal(tensors(other), saved)


def test_install_attaches_engines_that_others_make(make: Any, tmp_path: Path) -> None:
    """Every engine is attached at its first save or load, to a run by its directory."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from holdfast.integrations import deepspeed as holdfast_deepspeed

    own = DeepSpeedEngine.save_checkpoint
    holdfast_deepspeed.install(lambda engine, directory: Path(directory).name, at=tmp_path / "checkpoints")
    try:
        actor, critic = make(2, run=""), make(1, run="", seed=3)
        for engine, name in ((actor, "actor"), (critic, "critic")):
            train(engine, 1)
            engine.save_checkpoint(tmp_path / "saves" / name)
            wait(engine)
            assert (tmp_path / "saves" / name / "global_step1" / "model.safetensors").is_file()
            holdfast_deepspeed.checkpointer_of(engine).close()
    finally:
        holdfast_deepspeed.uninstall()
    assert DeepSpeedEngine.save_checkpoint is own


def test_frozen_parameters_may_stay_out(make: Any, tmp_path: Path) -> None:
    """With frozen=False they are neither saved nor restored, in stage 3 as well."""
    from safetensors.torch import load_file

    for stage in (1, 3):
        saves = tmp_path / f"saves-{stage}"
        engine = make(stage, run=f"run-{stage}", frozen=False)
        train(engine, 1)
        engine.save_checkpoint(saves, "a", exclude_frozen_parameters=True)
        wait(engine)
        assert set(load_file(saves / "a" / "model.safetensors")) >= {"embed.weight", "seen"}
        assert "frozen" not in load_file(saves / "a" / "model.safetensors")
        saved = tensors(engine)
        train(engine, 1)
        engine.load_checkpoint(saves, "a")
        assert_equal(tensors(engine), saved)


def test_a_save_calls_no_collective(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered: torch.distributed is not called between the first byte and the commit."""
    engine = make(3)
    train(engine, 2)
    called: list[str] = []
    backend = torch.distributed.distributed_c10d._get_default_group()
    for name in ("allreduce", "allgather", "_allgather_base", "broadcast", "barrier", "reduce_scatter", "gather"):
        monkeypatch.setattr(type(backend), name, lambda *_, name=name: called.append(name), raising=False)
    engine.save_checkpoint(tmp_path / "saves")
    wait(engine)
    assert called == [] and (tmp_path / "saves" / "global_step2" / "model.safetensors").is_file()


def test_steps_that_differ_inside_of_a_flat_tensor_are_refused(make: Any, tmp_path: Path) -> None:
    """DeepSpeed has one step for all parameters of a partition; a checkpoint in which they differ does not fit."""
    from holdfast import Checkpointer
    from tests.integrations.deepspeed import engines

    model = engines.Net()
    optimizer = torch.optim.AdamW(engines.groups(model))
    for number in range(2):
        model(rows(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.mix.weight.requires_grad_(False)
    optimizer.state[model.mix.weight]["step"] -= 1
    with Checkpointer("run", {"model": model, "optim": optimizer}, at=tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(2)
    engine = make(1)
    with pytest.raises(StateMismatch, match=r"one 'step' for all parameters.*mix.weight"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)


def test_another_programs_scheduler_stays_away(make: Any, tmp_path: Path) -> None:
    """What no engine saved may have a scheduler of another kind under the engine's name: weights and moments count."""
    from holdfast import Checkpointer
    from tests.integrations.deepspeed import engines

    model = engines.Net()
    optimizer = torch.optim.AdamW(engines.groups(model), lr=1e-2)
    model(rows()).backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = {"model": model, "optim": optimizer, "scheduler": scheduler}
    with Checkpointer("run", state, at=tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(7, wait="durable")
    engine = make(1, seed=5)
    before = engine.lr_scheduler.state_dict()
    assert engine.load_checkpoint(tmp_path / "saves", load_module_strict=False)[0] is not None
    assert engine.global_steps == 7 and engine.lr_scheduler.state_dict() == before
    assert all(torch.equal(value, tensors(engine)[name]) for name, value in model.state_dict().items())
    moments = engines.moments(model, optimizer)
    assert all(torch.equal(value, tensors(engine)[name]) for name, value in moments.items())


def test_transformers_loads_the_directory(make: Any, tmp_path: Path) -> None:
    """E3: the directory of a tag, from ZeRO-3, is a model of Hugging Face, with its config."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=61)
    engine = make(3, model=lambda: LlamaForCausalLM(config))
    loss = engine(rows(), labels=rows()).loss
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        engine.eval()
        logits = engine(rows()).logits
    engine.save_checkpoint(tmp_path / "saves", "best")
    wait(engine)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saves" / "best").eval()
    with torch.no_grad():
        assert torch.equal(loaded(rows()).logits, logits)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_partitions_of_one_rank_are_the_whole(make: Any, stage: int) -> None:
    """Every element of every trained parameter is in one flat tensor, where the weight has the same value."""
    from holdfast.integrations.deepspeed.partitions import units, whole_shape

    engine = make(stage, run="")
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    found = units(engine.optimizer, {id(parameter): name for name, parameter in trained.items()})
    parts = [(unit, part) for unit in found for part in unit.parts]
    assert sorted(part.name for _, part in parts) == sorted(trained)
    for unit, part in parts:
        assert part.shape == whole_shape(trained[part.name])
        assert part.start == 0 and part.size == torch.Size(part.shape).numel()
        assert torch.equal(unit.flat.detach()[part.at : part.at + part.size], part.weight)
