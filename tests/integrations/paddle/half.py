"""Half precision with masters, as in AMP O2, on a CPU, where Paddle computes and steps nothing in bfloat16."""

from __future__ import annotations

from typing import Any

import paddle


class MasterAdamW(paddle.optimizer.AdamW):
    """Where a weight has a master, that is stepped in float32, and the weight is rounded from it."""

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        parameter, gradient = param_and_grad
        master = self._master_weights.get(parameter.name)
        if master is None:
            return super()._append_optimize_op(block, param_and_grad)
        super()._append_optimize_op(block, (master, gradient.astype("float32")))
        parameter.set_value(master.astype(parameter.dtype))
        return None


def compute_in_float32(model: Any) -> None:
    """Each layer computes with its parameters in float32. Call it after wrappers, whose hooks may bring the parameters."""
    for layer in model.sublayers(include_self=True):
        if layer._parameters:
            layer.register_forward_pre_hook(_widen)
            layer.register_forward_post_hook(_drop)


def _widen(layer: Any, _: Any) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            wide = vars(layer)[name] = parameter.astype("float32")  # it is found before the parameter
            wide.is_distributed = parameter.is_distributed


def _drop(layer: Any, *_: Any) -> None:
    for name in layer._parameters:
        vars(layer).pop(name, None)
