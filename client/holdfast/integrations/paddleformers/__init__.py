"""Saves and resumes the Trainer of PaddleFormers or PaddleNLP: `attach(trainer, "run")`, and train as before."""

from holdfast.integrations.paddleformers.trainer import HoldfastPaddleTrainer, attach

__all__ = ["HoldfastPaddleTrainer", "attach"]
