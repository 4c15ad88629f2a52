"""torchtitan 0.3.0 on the CPU: import this before torchtitan, which asks for an accelerator and its memory at once."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

torch._utils._get_available_device_type = lambda: "cpu"
os.environ.setdefault("WANDB_MODE", "disabled")


def _add(name: str, value: Any) -> None:
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, value)


_add("get_device_name", lambda device=None: "cpu")
_add("get_device_properties", lambda device=None: SimpleNamespace(total_memory=2**30))
_add("reset_peak_memory_stats", lambda device=None: None)
_add("empty_cache", lambda: None)
_add("memory_stats", lambda device=None: {})
