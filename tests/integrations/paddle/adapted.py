"""A Llama of PaddleFormers and its adapter: `adapted.py ROOT STEPS OUT.npz`.

The run `base` has the model; three steps of the run `adapter` train a LoRAModel of it, with a bias and a layer of its own.
Each start restores and goes on; OUT has the logits and the losses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
from paddleformers.peft import LoRAConfig, LoRAModel

from holdfast.integrations import paddle as holdfast_paddle
from tests.integrations.paddle.causal import logits, made, rows, stepped


def main(root: Path, steps: int, out: Path) -> None:
    base = made("llama")
    with holdfast_paddle.attach(base, None, "base", at=root) as attached:
        if not attached.restore():
            attached.save(1)
    config = LoRAConfig(
        target_modules=[".*[qv]_proj", ".*down_proj"],
        trainable_modules=["lm_head.weight", "model.norm.weight"],
        r=2,
        lora_alpha=6,
        rslora=True,
        dtype="float32",
    )
    model = LoRAModel(base, config)
    kept = {name: one.numpy().copy() for name, one in model.model.state_dict().items() if one.stop_gradient}
    trained = [one for one in model.parameters() if not one.stop_gradient]
    optimizer = paddle.optimizer.AdamW(5e-2, parameters=trained)
    losses = []
    with holdfast_paddle.attach(model, optimizer, "adapter", at=root) as attached:
        first = attached.restore()
        for step in range(first + 1, steps + 1):
            losses.append(stepped(model, optimizer, next(rows(step, 1))))
            attached.save(step)
    assert all(np.array_equal(kept[name], one.numpy()) for name, one in model.model.state_dict().items() if name in kept)
    model.eval()
    with paddle.no_grad():
        found = logits(model, paddle.to_tensor(next(rows(100, 1))))
    np.savez(out, first=first, losses=losses, logits=found.numpy())


if __name__ == "__main__":
    paddle.set_device("cpu")
    paddle.seed(0)
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
