"""The daemon, as `python -m holdfast_service` runs it, but for its patience with ranks that are to restore together.

A machine that runs tests stands still for a moment now and then, and ranks that came apart would read for themselves.
"""

from __future__ import annotations

import runpy

from holdfast_service.daemon.shared_reads import loader

PATIENCE_S = 30.0

if __name__ == "__main__":
    loader.GATHER_S = PATIENCE_S
    runpy.run_module("holdfast_service", run_name="__main__")
