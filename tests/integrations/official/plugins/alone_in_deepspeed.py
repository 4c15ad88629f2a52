"""Lets the processes of DeepSpeed's tests be forked from a server that has imported DeepSpeed, a pytest plugin."""

from __future__ import annotations

import multiprocessing
from typing import Any


def pytest_configure(config: Any) -> None:
    multiprocessing.set_forkserver_preload(["deepspeed"])
