"""What of `dlrover-run` takes part in checkpoints: the saver, and what the agent has it do when a trainer has died.

    python -m benchmarks.fault_lab.dlrover_agent

Each line at standard input is the death of a trainer, and is answered by a line when the saver has done what it does then.
"""

from __future__ import annotations

import sys

from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

from .dlrover_words import AGENT_DONE, AGENT_READY


def main() -> None:
    AsyncCheckpointSaver.start_async_saving_ckpt()
    print(AGENT_READY, flush=True)
    for _ in sys.stdin:
        saver = AsyncCheckpointSaver.get_ckpt_saver()
        if saver is not None:
            saver.save_shm_to_storage()  # before the agent starts new trainers
        print(AGENT_DONE, flush=True)


if __name__ == "__main__":
    main()
