"""Saves and resumes a transformers Trainer with Holdfast: `attach(trainer, "run")`, and train as before."""

from holdfast.integrations.transformers.trainer import HoldfastTrainerMixin, attach

__all__ = ["HoldfastTrainerMixin", "attach"]
