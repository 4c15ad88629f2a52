"""Installs Holdfast in the processes of DeepSpeed's tests, a pytest plugin: the server that forks them imports it first."""

from __future__ import annotations

import multiprocessing
from typing import Any


def pytest_configure(config: Any) -> None:
    multiprocessing.set_forkserver_preload(["installed_in_deepspeed"])
