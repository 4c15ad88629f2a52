"""Importing this installs Holdfast for every engine of the process, with a run for each directory that a test uses."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from deepspeed.ops import __compatible_ops__ as compatible_ops
from deepspeed.runtime.engine import DeepSpeedEngine

from holdfast.integrations import deepspeed as holdfast_deepspeed

compatible_ops["deepspeed_shm_comm"] = False  # a minute of compiling, to make gloo faster
if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):  # tests of 0.19.6 compare it, and 0.19.8 lacks it
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()


def run(engine: Any, directory: str) -> str:
    """The same name for all ranks and engines that save to and load from a directory."""
    return f"official-{hashlib.sha256(directory.encode()).hexdigest()[:16]}"


holdfast_deepspeed.install(run, at=os.environ["HOLDFAST_OFFICIAL"])
