"""A rank without torch whose daemon may die: it goes on with the next one, and tells what became of each step.

    lasting_rank.py SOCKET RUN RANK WORLD LAUNCH STEPS BYTES

Lines: `leased N`, `asking N` (the slot is sealed in shared memory, the daemon about to be told), `sealed N`, `committed N`,
`aborted CODE N`, `refused CODE N`. Given a step as `N!`, it waits for a line on stdin between lease and seal.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.link.unix_socket import SocketLink
from holdfast.stage.slots import Slots
from holdfast_formats.errors import CheckpointError
from holdfast_formats.lineage import Intent
from holdfast_formats.region import Box
from holdfast_formats.staging import slot_table, wire
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from tests.crash.rank_process import content

_lock = threading.Lock()


def say(what: str, step: int) -> None:
    """One line, whole, from whichever thread."""
    with _lock:
        sys.stdout.write(f"{what} {step}\n")
        sys.stdout.flush()


def tell(outcome: wire.Outcome) -> None:
    say("committed" if outcome.problem is None else f"aborted {outcome.problem['code']}", outcome.step)


class TellingLink(SocketLink):
    """Says when a seal stands in shared memory, before the daemon is told."""

    def request(self, message: wire.Request, *arguments: Any) -> Any:
        if isinstance(message, wire.Seal):
            say("asking", message.step)
        return super().request(message, *arguments)


def main() -> None:
    socket, run, rank_text, world_text, launch, steps, bytes_text = sys.argv[1:]
    rank, world, size = int(rank_text), int(world_text), int(bytes_text)
    link = TellingLink(Path(socket), tell, lambda error: say("lost", 0), lambda: Path(socket))
    hello = wire.Hello(id=link.next_id(), run=run, rank=rank, world=world, launch=launch)
    attempt = link.request(hello, wire.Welcome).attempt
    question = wire.Choose(id=link.next_id(), turn=0, groups=("model",), wait_s=60)
    restored = link.request(question, wire.Chosen).step
    intent = Intent(restored, turn=0 if restored is None else 1, groups=("model",))
    slots = Slots(link, 2, size, 65_536)
    spec = TensorSpec("model", "w", "U8", (world * size,))
    for step, waits in ((int(text.rstrip("!")), text.endswith("!")) for text in steps.split(",")):
        fragment = StagedFragment(spec, (Box((rank * size,), (size,)),), 0)
        table = SlotTable(
            run, step, attempt, rank, world, intent.groups, (fragment,), {}, {}, restored=restored, turn=intent.turn
        )
        try:
            slot = slots.lease(step, attempt, 60, intent=intent)
            say("leased", step)
            if waits:
                sys.stdin.readline()
            np.frombuffer(slot.data, np.uint8)[:size] = content(step, rank * size, size)
            slot.hand_over(slot.seal(slot_table.encode(table), size))
            say("sealed", step)
        except CheckpointError as error:
            say(f"refused {error.code}", step)
    sys.stdin.readline()
    link.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    main()
