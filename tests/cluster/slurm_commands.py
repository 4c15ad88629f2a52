"""Stands in for Slurm's commands on this machine: `slurm_commands.py srun …` and `slurm_commands.py scontrol …`.

Each "node" has a runtime directory, an address and a name of its own, as machines have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType


def srun(arguments: list[str]) -> int:
    """Run the command once a node; signals are handed on to the tasks, as srun does."""
    command = arguments[next(at for at, word in enumerate(arguments) if not word.startswith("-")) :]
    tasks = []
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
        own = {
            "XDG_RUNTIME_DIR": f"{os.environ['STAND_IN_NODES']}/{node}",
            "HOLDFAST_NODE": f"n{node}",
            "HOLDFAST_LISTEN": os.environ["STAND_IN_ADDRESSES"].split(",")[node],
            "HOLDFAST_URL": f"http://{os.environ['STAND_IN_ADDRESSES'].split(',')[node]}",
        }
        tasks.append(subprocess.Popen(command, env=os.environ | own))

    def hand_on(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    return max(abs(task.wait()) for task in tasks)


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print("127.0.0.1")
    else:
        with open(os.environ["STAND_IN_CALLS"], "a") as calls:
            calls.write(" ".join(arguments) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
