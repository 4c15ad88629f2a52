"""What is exported for Paddle is what PaddleFormers' trainer holds after it has resumed from it, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast_service.wings.convert.exports import kinds
from holdfast_service.wings.convert.exports.plan import ExportOptions
from tests.daemons import free_port
from tests.wings.convert.exports.sources import BETAS, llama, made, trained, values_of, write

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 12,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
TURNED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOMENTS = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}


def _in_paddle(name: str, array: np.ndarray) -> np.ndarray:
    return array.T if any(f"{linear}.weight" in name for linear in TURNED) else array


def _loaded(directory: Path, kind: str) -> dict[str, np.ndarray]:
    out = directory.parent / "held.npz"
    words = [sys.executable, "-m", "tests.integrations.paddle.loading", str(directory), kind, str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as held:
        return dict(held)


@pytest.mark.parametrize("kind", ["uc", "flex"])
@pytest.mark.parametrize("how", ["bfloat16", "float32", "tied"])
def test_paddleformers_resumes(tmp_path: Path, kind: str, how: str) -> None:
    """Model, masters, moments, powers of beta, step and learning rate; of a bfloat16, an FP32 and a tied model."""
    weights = llama(hidden=16)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if how == "tied" else {}
    if how == "tied":
        del weights["lm_head.weight"]
    groups = trained(weights, step=3)
    if how == "float32":
        groups |= {"model": {name: array.astype(np.float32) for name, array in weights.items()}, "master": {}}
    config = {**CONFIG, "torch_dtype": "float32" if how == "float32" else "bfloat16", "tie_word_embeddings": bool(tied)}
    source = made(
        tmp_path / "step",
        groups,
        assets={"config.json": json.dumps(config).encode()},
        ranks=values_of(list(weights)),
        step=3,
        aliases={"model": tied},
    ).source
    plan = kinds.kind_named(f"paddle-{kind}").plan(source, ExportOptions())
    held = _loaded(write(source, plan, tmp_path / "checkpoint-3"), kind)
    assert (int(held.pop("step")), int(held.pop("last_epoch")), float(held.pop("last_lr"))) == (3, 3, 1e-3)
    expected = {}
    for group, named in groups.items():
        for name, array in named.items():
            owner, _, word = name.rpartition("/")
            if group in ("model", "master"):
                expected[f"{group}:{name}"] = _in_paddle(name, array.astype(np.float32))
            elif word in MOMENTS:
                expected[f"optim:{owner}/{MOMENTS[word]}"] = _in_paddle(owner, array)
    for alias, name in tied.items():
        expected[f"model:{alias}"] = expected[f"model:{name}"]
    powers = {key: held.pop(key) for key in list(held) if key.endswith("_pow_acc_0")}
    if tied:  # Paddle has one parameter with two names, of which it remembers one
        held = {key.replace(alias, name) if not key.startswith("model:") else key: a for key, a in held.items()}
        powers = {key.replace(alias, name): value for key, value in powers.items()}
    assert held.keys() == expected.keys()
    for key, array in expected.items():
        assert held[key].shape == array.shape and np.array_equal(held[key], array), key
    for number, beta in enumerate(BETAS, 1):
        value = np.float32(beta)
        for _ in range(3):
            value = value * np.float32(beta)
        found = [power for key, power in powers.items() if key.endswith(f"beta{number}_pow_acc_0")]
        assert len(found) == len(weights) and all(np.array_equal(power, [value]) for power in found)


@pytest.mark.parametrize("how", ["bfloat16", "float32"])
def test_paddleformers_resumes_an_adapter(tmp_path: Path, how: str) -> None:
    """`LoRAModel.from_pretrained`, and a trainer that resumes: adapter, masters, moments and powers."""
    sides = {"self_attn.q_proj": (16, 16), "mlp.down_proj": (48, 16)}
    rng, adapter = np.random.default_rng(3), {}
    for layer, (stem, (wide, narrow)) in product(range(2), sides.items()):
        for side, shape in (("A", (2, wide)), ("B", (narrow, 2))):
            array = rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if how == "bfloat16" else np.float32)
            adapter[f"base_model.model.model.layers.{layer}.{stem}.lora_{side}.weight"] = array
    held = trained(adapter, step=3)
    groups = {"adapter": adapter, "optim": held["optim"], "master": held["master"] if how == "bfloat16" else {}}
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    assets = {"config.json": {**CONFIG, "torch_dtype": how, "tie_word_embeddings": False}, "adapter_config.json": peft}
    named = {name: json.dumps(one).encode() for name, one in assets.items()}
    source = made(tmp_path / "step", groups, assets=named, ranks=values_of(list(adapter)), step=3).source
    plan = kinds.kind_named("paddle-lora").plan(source, ExportOptions())
    found = _loaded(write(source, plan, tmp_path / "checkpoint-3"), "lora")
    assert (int(found.pop("step")), int(found.pop("last_epoch")), float(found.pop("last_lr"))) == (3, 3, 1e-3)
    expected = {}
    for name, array in adapter.items():
        theirs = name.removeprefix("base_model.model.").removesuffix(".weight")
        expected[f"model:{theirs}"] = array.astype(np.float32).T
        if how == "bfloat16":
            expected[f"master:{theirs}"] = groups["master"][name].T
        for kind, word in MOMENTS.items():
            expected[f"optim:{theirs}/{word}"] = groups["optim"][f"{name}/{kind}"].T
    powers = {key for key in found if key.endswith("_pow_acc_0")}
    assert len(powers) == 2 * len(adapter) and found.keys() - powers == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key


def test_paddleformers_reshards(tmp_path: Path) -> None:
    """Two ranks of sharding stage 1 resume from sharding_io: masters, moments and powers, in Paddle's own flat parts."""
    weights = llama(hidden=16)
    groups = trained(weights, step=3)
    config = {**CONFIG, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    assets = {"config.json": json.dumps(config).encode()}
    source = made(tmp_path / "step", groups, assets=assets, ranks=values_of(list(weights)), step=3).source
    plan = kinds.kind_named("paddle-sharding-io").plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "checkpoint-3")
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    common = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(places), "PADDLE_DISTRI_BACKEND": "gloo"}
    words = [sys.executable, "-m", "tests.integrations.paddle.sharded_loading", str(out), str(tmp_path / "held")]
    ranks = []
    for rank, place in enumerate(places):
        own = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_RANK_IN_NODE": str(rank), "PADDLE_CURRENT_ENDPOINT": place}
        environment = {**os.environ, **common, **own}
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(one[-4000:] for one in said)
    held = [dict(np.load(f"{tmp_path / 'held'}.{rank}.npz")) for rank in range(2)]

    def whole(key: str, array: np.ndarray) -> np.ndarray:
        parts = [one[key] for one in held if key in one]
        return np.concatenate([part.reshape(-1) for part in parts])[: array.size].reshape(array.shape)

    for name in weights:
        for group, key, theirs in (
            ("master", name, f"master:{name}"),
            ("optim", f"{name}/exp_avg", f"optim:{name}/moment1_0"),
            ("optim", f"{name}/exp_avg_sq", f"optim:{name}/moment2_0"),
        ):
            expected = _in_paddle(name, groups[group][key])
            assert np.array_equal(whole(theirs, expected), expected), theirs
        for number, beta in enumerate(BETAS, 1):
            power = np.multiply.accumulate(np.full(4, np.float32(beta)))[-1:]
            found = [
                one[f"optim:{name}/beta{number}_pow_acc_0"] for one in held if f"optim:{name}/beta{number}_pow_acc_0" in one
            ]
            assert found and all(np.array_equal(one, power) for one in found)
