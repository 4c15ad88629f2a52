"""The demo's settings, and the environment its processes get. Nothing else here reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

RANKS = 2  # on a processor; with CUDA a rank a device, as NCCL lets no two share one
STEPS = 90
DAEMON_IDLE_S = 900  # a daemon left behind ends itself after this long without visitors
LAUNCH_S_MAX = 600
COMMIT_S_MAX = 60
DAEMON_START_S_MAX = 60


def child_environment() -> dict[str, str]:
    """Ours, and: one thread a rank, no network, output as it comes, and the same string hashes everywhere."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS refuses to be deterministic
    }


def bucket_environment(endpoint: str, key: str, secret: str) -> dict[str, str]:
    """The variables by which an endpoint is reached with these keys, and no others of this user or machine are found."""
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def surrounded(environment: Mapping[str, str]) -> Iterator[None]:
    """These variables are set for this process and those that it starts, for the length of a block."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def local_rank() -> int:
    """The local rank, from the launcher."""
    return int(os.environ["LOCAL_RANK"])


def trainer_command(ranks: int, *arguments: str) -> list[str]:
    """The command that starts the trainer on all ranks: torchrun, without relying on PATH."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "holdfast.demo.train", *arguments]
