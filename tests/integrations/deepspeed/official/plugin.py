"""Gives the processes of DeepSpeed's tests `install()`: they are forked from a server, which imports `installed` first."""

from __future__ import annotations

import multiprocessing
from typing import Any


def pytest_configure(config: Any) -> None:
    multiprocessing.set_forkserver_preload(["tests.integrations.deepspeed.official.installed"])
