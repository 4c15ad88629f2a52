"""Shortens pauses and silences of a daemon that meets thousands of faults. Python imports this before anything else.

Nothing of the product knows of it: with this directory on PYTHONPATH, constants are set when their modules are imported, or
at once in a fork that has them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

QUICK: dict[str, dict[str, float]] = {
    "holdfast_files.objects.sending": {"PAUSE_FIRST_S": 0.01, "PAUSE_MAX_S": 0.1},
    "holdfast_files.objects.client": {"SILENCE_S": 8.0, "ASSEMBLY_SILENCE_S": 8.0},
    "holdfast_service.storage.objects.conditional_puts": {"PAUSE_FIRST_S": 0.01, "PAUSE_MAX_S": 0.1},
    "holdfast_service.wiring.stopping": {"STILL_S": 3.0},
    "holdfast_service.daemon.copying.replicas": {"RETRY_S": 0.1, "RETRY_MAX_S": 1.0, "SKIP_S": 3.0},
}


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(QUICK[module.__name__])


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in QUICK:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None, name
        spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())
for _name in QUICK.keys() & sys.modules.keys():
    vars(sys.modules[_name]).update(QUICK[_name])
