"""E4: what cannot be stored is refused by name before anything is staged; and what Megatron-LM's options mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integrations.resuming import completed

Answers = dict[str, Any]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What every case said: they are run in one process, because it takes seconds to import Megatron."""
    work = tmp_path_factory.mktemp("cases")
    completed("tests.integrations.megatron.cases", (), work)
    return dict(json.loads((work / "answers.json").read_text()))


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("release", "release=True"),
        ("non-persistent", "non_persistent_ckpt=True"),
        ("rank", "tensor_rank=0"),
        ("group", "tp_group"),
        ("loader", "--dataloader-save"),
        ("precision", "use_precision_aware_optimizer"),
        ("offload", "optimizer_cpu_offload"),
        ("optimizer", "Sharded"),
        ("left-out", "decoder.final_layernorm.weight"),
        ("transposed", "decoder.layers.0.mlp.linear_fc2.weight"),
        ("temporary", "decoder.final_layernorm.weight"),
        ("unknown-value", "more"),
        ("pickled", "decoder.layers.0.self_attention.linear_proj._extra_state"),
        ("moments", "row"),
        ("architecture", "GPT2LMHeadModel"),
        ("vocabulary", "vocab_size"),
        ("heads", "head_dim"),
        ("sizes", "num_hidden_layers"),
        ("no-table-entry", "decoder.another.weight"),
        ("rerun", "rerun state machine"),
        ("fsdp", "FullyShardedDataParallel"),
    ],
)
def test_it_is_refused_by_name(answers: Answers, case: str, named: str) -> None:
    text, exists = answers[case]
    assert text.startswith("InvalidRequest: "), text
    assert named in text
    assert not exists, "something was staged"


def test_a_launch_that_loaded_nothing_saves_into_no_run_that_has_checkpoints(answers: Answers) -> None:
    """Also not at the newest step, which would count as saved."""
    assert answers["anew"].startswith("AlreadyCommitted: ") and "restored nothing" in answers["anew"]


@pytest.mark.parametrize("case", ["fine", "bytes"])
def test_the_same_model_is_saved_otherwise(answers: Answers, case: str) -> None:
    assert answers[case] == ["saved", True]


@pytest.mark.parametrize(
    ("case", "returned", "restored"),
    [
        ("newest", [3, 300], {"weights", "masters", "moments", "scheduler", "streams", "samples"}),
        ("of another run", [3, 300], {"weights", "masters", "moments", "scheduler", "streams", "samples"}),
        ("of another root", [3, 300], {"weights", "masters", "moments", "scheduler", "streams", "samples"}),
        ("with a slash", [3, 300], {"weights", "masters", "moments", "scheduler", "streams", "samples"}),
        ("no_load_rng", [3, 300], {"weights", "masters", "moments", "scheduler", "samples"}),
        ("no_load_optim", [4, 400], {"weights", "streams", "samples"}),
        ("finetune", [0, 400], {"weights"}),
        ("pretrained", [0, 400], {"weights"}),
        ("pretrained alone", [0, 400], {"weights"}),
        ("missing", [0, 0], set()),
        ("foreign, no_load_optim", [5, 0], {"weights"}),
        ("foreign, finetune", [0, 0], {"weights"}),
        ("weights, finetune", [0, 0], {"weights"}),
        ("weights, pretrained", [0, 0], {"weights"}),
    ],
)
def test_options_say_what_is_restored(answers: Answers, case: str, returned: list[int], restored: set[str]) -> None:
    """A part is restored bit-exactly, or stays as it was; masters follow weights that are restored without them.

    The newest step, 4, has no optimizer: who wants one gets step 3.
    """
    said = answers[case]
    assert said["returned"] == returned
    assert set(said["restored"]) == restored
    follow = {"masters"} if returned[1] in (0, 400) else set()
    assert set(said["changed"]) - follow <= restored


def test_a_step_is_chosen(answers: Answers) -> None:
    assert answers["ckpt_step"]["returned"] == [1, 100]
    assert "weights" in answers["ckpt_step"]["changed"]
    assert "weights" not in answers["ckpt_step"]["restored"]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("two names", "InvalidRequest: --load belongs to the run whole, but configure(run=) is new"),
        ("exit", "NoSuchCheckpoint: --load"),
        ("no pretrained", "NoSuchCheckpoint: --pretrained_checkpoint"),
        ("another model", "StateMismatch: the checkpoint belongs to another model: num_layers: 2 was saved, now it is 3"),
        ("theirs", "InvalidRequest: --load is a directory that Megatron-LM wrote"),
        ("foreign", "StateMismatch: step 5 of foreign was not saved by Megatron"),
        ("foreign, without moments", "StateMismatch: "),
        ("weights", "StateMismatch: step 6 of weights was not saved by Megatron"),
        ("weights, step", "StateMismatch: step 6 of weights was not saved by Megatron"),
    ],
)
def test_a_load_is_refused_by_name(answers: Answers, case: str, error: str) -> None:
    assert answers[case]["returned"].startswith(error)
    assert not answers[case]["changed"]


def test_extra_state_comes_back_as_bytes(answers: Answers) -> None:
    assert answers["restored bytes"] == [[0, 1, 2, 3, 4]]
