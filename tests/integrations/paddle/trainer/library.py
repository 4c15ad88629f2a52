"""PaddleNLP where it is installed, else PaddleFormers, which descends from it: an environment has one of both."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

IS_PADDLENLP = find_spec("paddlenlp") is not None

if TYPE_CHECKING:
    from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
    from paddleformers.transformers import LlamaConfig, LlamaForCausalLM
else:
    _package: Any = "paddlenlp" if IS_PADDLENLP else "paddleformers"
    _trainer, _models = (importlib.import_module(f"{_package}.{name}") for name in ("trainer", "transformers"))
    Trainer, TrainerCallback, TrainingArguments = _trainer.Trainer, _trainer.TrainerCallback, _trainer.TrainingArguments
    LlamaConfig, LlamaForCausalLM = _models.LlamaConfig, _models.LlamaForCausalLM

__all__ = ["IS_PADDLENLP", "LlamaConfig", "LlamaForCausalLM", "Trainer", "TrainerCallback", "TrainingArguments"]
