"""Runs tests of PyTorch's own, unchanged, with Holdfast's writer and reader in the place of those for files.

    python -m tests.integrations.dcp.official test_file_system_checkpoint_cpu.py [unittest words]

The file is test/distributed/checkpoint/test_file_system_checkpoint_cpu.py of a checkout of PyTorch; it is not kept here.
Each path becomes a root of its own, with step 1 of one run.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from holdfast.integrations.dcp import HoldfastStorageReader, HoldfastStorageWriter

RUN, STEP = "official", 1


class Writer(HoldfastStorageWriter):
    """Takes what FileSystemWriter takes. What says how files are written has no meaning here."""

    def __init__(self, path: str | os.PathLike[str], **of_files: Any) -> None:
        super().__init__(RUN, step=STEP, at=path)


class Reader(HoldfastStorageReader):
    """Takes what FileSystemReader takes."""

    def __init__(self, path: str | os.PathLike[str], **of_files: Any) -> None:
        super().__init__(RUN, step=STEP, at=path)


if __name__ in ("__main__", "__mp_main__"):  # the second is a rank, which imports the tests after this
    dcp.FileSystemWriter, dcp.FileSystemReader = Writer, Reader
if __name__ == "__main__":
    warnings.simplefilter("ignore")
    tests = Path(sys.argv[1])
    sys.path.insert(0, str(tests.parent))
    unittest.main(module=importlib.import_module(tests.stem), argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
