"""A language model of PaddleFormers in training: `causal.py KIND ROOT RUN OUT.npz [--save STEP] [--steps N]`.

It restores the run's newest checkpoint, takes N steps, saves step STEP, and writes the losses, the logits and everything
that it holds. KIND is llama, qwen2 or ernie, with `-tied` for shared embeddings. `reference.py` is the same in torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional

from holdfast.integrations import paddle as holdfast_paddle

RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.98), 1e-8, 0.05
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def rows(first: int, count: int) -> Iterator[np.ndarray]:
    """The batches of some steps. Token 0 pads, which Paddle's embedding leaves out and torch's does not: it is in none."""
    for step in range(first, first + count):
        yield np.random.RandomState(step).randint(1, SIZES["vocab_size"], (4, 16))


def _without_fleet() -> None:
    """Qwen2's module imports PaddleFleet, which is for GPUs only, for another class than the one here."""
    provider: Any = types.ModuleType("paddleformers.transformers.gpt_provider")
    provider.GPTModelProvider = dataclasses.dataclass(type("GPTModelProvider", (), {}))
    sys.modules[provider.__name__] = provider


def made(kind: str) -> Any:
    """A new model."""
    name, _, tied = kind.partition("-")
    if name == "qwen2":
        _without_fleet()
        from paddleformers.transformers.qwen2.modeling import Qwen2ForCausalLMDeprecated as Model
    elif name == "llama":
        from paddleformers.transformers import LlamaForCausalLM as Model
    else:
        from paddleformers.transformers import Ernie4_5ForCausalLM as Model
    config = Model.config_class(**SIZES, tie_word_embeddings=bool(tied))
    config.fuse_rms_norm = False
    return Model(config)


def logits(model: Any, tokens: Any) -> Any:
    out = model(input_ids=tokens)
    return out[0] if isinstance(out, tuple) else out.logits


def stepped(model: Any, optimizer: Any, tokens: np.ndarray) -> float:
    given = paddle.to_tensor(tokens)
    flat = logits(model, given)[:, :-1].reshape([-1, SIZES["vocab_size"]])
    loss = functional.cross_entropy(flat, given[:, 1:].reshape([-1]))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def held(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """All weights, and all state of the optimizer, under structured names."""
    found = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    owners = {tensor.name: name for name, tensor in model.named_parameters()}
    for kind, by_owner in optimizer._accumulators.items():
        found.update({f"{owners[owner]}/{kind}": tensor.numpy() for owner, tensor in by_owner.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kind", "root", "run", "out"):
        parser.add_argument(name)
    parser.add_argument("--save", type=int)
    parser.add_argument("--steps", type=int, default=0)
    given = parser.parse_args()
    paddle.set_device("cpu")
    paddle.seed(7)
    model = made(given.kind)
    decayed = {tensor.name for _, tensor in model.named_parameters() if tensor.ndim > 1}
    optimizer = paddle.optimizer.AdamW(
        RATE, *BETAS, EPSILON, model.parameters(), DECAY, apply_decay_param_fun=decayed.__contains__
    )
    with holdfast_paddle.attach(model, optimizer, given.run, at=given.root) as attached:
        begun = attached.restore()
        start = held(model, optimizer)
        losses = [stepped(model, optimizer, tokens) for tokens in rows(begun, given.steps)]
        if given.save is not None:
            attached.save(given.save, wait="durable")
    seen = logits(model, paddle.to_tensor(next(rows(1000, 1)))).numpy()
    np.savez(given.out, losses=np.array(losses), logits=seen, **start if given.save is None else held(model, optimizer))


if __name__ == "__main__":
    main()
