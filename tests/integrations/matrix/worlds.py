"""The systems of the matrix: in which environment each runs, on how many ranks, and by which module.

Another system is one entry of `SYSTEMS`, a module with a class like `acts.System`, and its environment among the `others` of
`environments.toml`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.daemons import free_port
from tests.integrations.environments import BUILT, TOP

LIMIT_S = 600.0


class World(NamedTuple):
    """A system: its title, its environment, the ranks that save and that load, and its module in this folder.

    `once`: it ends its process group with its training, so that each act needs processes of its own.
    """

    title: str
    environment: str
    saving: int
    loading: int
    module: str
    once: bool = False


SYSTEMS = {
    "one": World("one process", "transformers", 1, 1, "plain"),
    "ddp": World("DDP", "transformers", 2, 2, "plain"),
    "fsdp2": World("FSDP2", "transformers", 3, 2, "plain"),
    "zero1": World("ZeRO-1", "deepspeed", 2, 2, "zero"),
    "zero3": World("ZeRO-3", "deepspeed", 2, 2, "zero"),
    "megatron": World("Megatron TP2×PP2", "megatron", 4, 4, "megatron"),
    "titan": World("torchtitan", "torchtitan", 2, 2, "titan"),
    "trainer": World("Trainer", "transformers", 1, 1, "trainer"),
    "lightning": World("Lightning", "lightning", 2, 3, "of_lightning", once=True),
}


def act(system: str, ranks: int, root: Path, work: Path, acts: list[str]) -> dict[str, Any]:
    """Let the ranks of a system do these acts; what became of each."""
    about = SYSTEMS[system]
    if about.once and len(acts) > 1:
        told = {}
        for number, one in enumerate(acts):
            told |= act(system, ranks, root, work / str(number), [one])
        return told
    python = BUILT / about.environment / "bin" / "python"
    work.mkdir(parents=True)
    env = dict(os.environ)
    env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(TOP), "DS_ACCELERATOR": "cpu"}
    env |= {"HOLDFAST_LAUNCH": uuid.uuid4().hex, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    command = [python, "-m", f"tests.integrations.matrix.{about.module}"]
    command += ["--root", str(root), "--work", str(work), "--system", system, *acts]
    started = []
    for rank in range(ranks):
        mine = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (work / f"output-{rank}.txt").open("ab") as output:
            started.append(
                subprocess.Popen(command, env=mine, cwd=TOP, stdout=output, stderr=output, start_new_session=True)
            )
    try:
        _wait(started)
    finally:
        for one in started:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    assert all(one.returncode == 0 for one in started), _output(work)
    told = [json.loads((work / f"told-{rank}.json").read_text()) for rank in range(ranks)]
    for one in told[1:]:
        assert one.keys() == told[0].keys()
    refused = {act: word for one in told for act, word in one.items() if isinstance(word, str)}
    return {**told[0], **refused}


def _wait(started: list[subprocess.Popen[bytes]]) -> None:
    """Return when all have ended, or one has failed, or it takes too long."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        codes = [one.poll() for one in started]
        if None not in codes or any(code not in (None, 0) for code in codes):
            return
        time.sleep(0.1)


def _output(work: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in sorted(work.glob("output-*.txt")))
