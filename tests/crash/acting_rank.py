"""A rank without torch for the kill matrix: it restores, proves what it got, then saves; it outlives its daemon.

    acting_rank.py ROOT SOCKET RUN RANK WORLD LAUNCH STEPS BYTES

With `-` for a socket it starts an embedded daemon, or uses the one that another rank started. Lines: `restored N`,
`wrong N`, `leased N`, `committed N`, `aborted N`, `refused N`. Given a step as `N!`, it waits for a line on stdin before it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

from holdfast.link import embedded
from holdfast.link.unix_socket import SocketLink
from holdfast.read.root_directory import open_checkpoint
from holdfast.stage.slots import Slot, Slots
from holdfast_formats.errors import CheckpointError
from holdfast_formats.region import Box
from holdfast_formats.staging import slot_table, wire
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from tests.crash.rank_process import content

RESTORE_WAIT_S = 60.0
_lock = threading.Lock()


def say(what: str, step: int) -> None:
    """One line, whole, from whichever thread."""
    with _lock:
        sys.stdout.write(f"{what} {step}\n")
        sys.stdout.flush()


def tell(outcome: wire.Outcome) -> None:
    say("committed" if outcome.problem is None else "aborted", outcome.step)


def copy_half(slot: Slot, data: np.ndarray) -> None:
    """The first half of what the slot is to hold."""
    np.frombuffer(slot.data, np.uint8)[: data.size // 2] = data[: data.size // 2]


def copy_rest(slot: Slot, data: np.ndarray) -> None:
    np.frombuffer(slot.data, np.uint8)[data.size // 2 : data.size] = data[data.size // 2 :]


def restore(link: SocketLink, root: Path, run: str, box: Box) -> int | None:
    """Ask for the step, read this rank's part of it, and compare every byte. Returns the step."""
    question = wire.Choose(id=link.next_id(), turn=0, groups=("model",), wait_s=RESTORE_WAIT_S)
    step = link.request(question, wire.Chosen).step
    if step is None:
        say("restored", 0)
        return None
    with open_checkpoint(root, None, run, step) as reader:
        found = reader.read("model", "w", box)
    sound = np.array_equal(found, content(step, box.offset[0], box.shape[0]))
    say("restored" if sound else "wrong", step)
    return step


def save(slots: Slots, table_of: SlotTable, box: Box) -> None:
    data = content(table_of.step, box.offset[0], box.shape[0])
    try:
        slot = slots.lease(table_of.step, table_of.attempt, 60, intent=table_of.intent)
        say("leased", table_of.step)
        copy_half(slot, data)
        copy_rest(slot, data)
        slot.hand_over(slot.seal(slot_table.encode(table_of), box.shape[0]))
    except CheckpointError:
        say("refused", table_of.step)


def main() -> None:
    root, socket, run, rank_text, world_text, launch, steps, bytes_text = sys.argv[1:]
    rank, world, size = int(rank_text), int(world_text), int(bytes_text)
    path = Path(root)

    def dial() -> Path:
        return Path(socket) if socket != "-" else embedded.start(path)

    link = SocketLink(dial(), tell, lambda error: say("lost", 0), dial)
    hello = wire.Hello(id=link.next_id(), run=run, rank=rank, world=world, launch=launch)
    attempt = link.request(hello, wire.Welcome).attempt
    box = Box((rank * size,), (size,))
    restored = restore(link, path, run, box)
    slots = Slots(link, 3, size, 65_536)
    spec = TensorSpec("model", "w", "U8", (world * size,))
    for step, waits in ((int(text.rstrip("!")), text.endswith("!")) for text in steps.split(",")):
        if waits:
            sys.stdin.readline()
        held, turn = (StagedFragment(spec, (box,), 0),), 0 if restored is None else 1
        table = SlotTable(run, step, attempt, rank, world, ("model",), held, {}, {}, restored=restored, turn=turn)
        save(slots, table, box)
    sys.stdin.readline()
    link.close()


if __name__ == "__main__":
    from tests.crash import acting_rank  # under the name by which a point in it is found

    acting_rank.main()
