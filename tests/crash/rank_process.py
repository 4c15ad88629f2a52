"""A rank without torch, which starts in a blink, says where it is on stdout, can be killed anywhere and outlives its daemon.

    rank_process.py SOCKET RUN RANK WORLD LAUNCH STEPS BYTES [ROOT]

Each rank holds BYTES bytes of a tensor of WORLD x BYTES; element values follow from step and position. Of the steps, `3!`
waits for a line on stdin before it, and `3!leased` or `3!copied` once it has said that line. Lines: `restored N` (`wrong N`
if it is not what was saved; ROOT is where it reads that), `leased N`, `copied N`, `asking N` (the slot is sealed in shared
memory, the daemon about to be told), `sealed N`, `committed N`, `aborted CODE N`, `refused CODE N`. With `-` for a socket it
starts an embedded daemon, or uses the one that another rank started.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

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

PERIOD = 2**15  # of the bits that are kept: what follows is the same again, and need not be computed
WAIT_S = 180.0
_lock = threading.Lock()


def content(step: int, start: int, size: int) -> np.ndarray:
    """The bytes [start, start + size) of the tensor at a step."""
    once = ((np.arange(start, start + PERIOD, dtype=np.uint64) * 2654435761 + step * 97) >> 7).astype(np.uint8)
    return np.resize(once, size)


def say(what: str, step: int, pause: str = "-") -> None:
    """One line, whole, from whichever thread; wait for one where this is the pause."""
    with _lock:
        sys.stdout.write(f"{what} {step}\n")
        sys.stdout.flush()
    if what == pause:
        sys.stdin.readline()


def tell(outcome: wire.Outcome) -> None:
    say("committed" if outcome.problem is None else f"aborted {outcome.problem['code']}", outcome.step)


class TellingLink(SocketLink):
    """Says when a seal stands in shared memory, before the daemon is told."""

    def request(self, message: wire.Request, *arguments: Any) -> Any:
        if isinstance(message, wire.Seal):
            say("asking", message.step)
        return super().request(message, *arguments)


def copy_half(slot: Slot, data: np.ndarray) -> None:
    """The first half of what the slot is to hold."""
    np.frombuffer(slot.data, np.uint8)[: data.size // 2] = data[: data.size // 2]


def restore(link: SocketLink, root: Path | None, run: str, box: Box) -> int | None:
    """Ask for the step, and compare every byte of this rank's part of it. Returns the step."""
    question = wire.Choose(id=link.next_id(), turn=0, groups=("model",), wait_s=WAIT_S)
    step = link.request(question, wire.Chosen).step
    sound = True
    if step is not None and root is not None:
        with open_checkpoint(root, None, run, step) as reader:
            sound = np.array_equal(reader.read("model", "w", box), content(step, box.offset[0], box.shape[0]))
    say("restored" if sound else "wrong", step or 0)
    return step


def save(slots: Slots, table: SlotTable, box: Box, pause: str) -> None:
    data = content(table.step, box.offset[0], box.shape[0])
    try:
        slot = slots.lease(table.step, table.attempt, WAIT_S, intent=table.intent)
        say("leased", table.step, pause)
        copy_half(slot, data)
        np.frombuffer(slot.data, np.uint8)[data.size // 2 : data.size] = data[data.size // 2 :]
        say("copied", table.step, pause)
        slot.hand_over(slot.seal(slot_table.encode(table), box.shape[0]))
        say("sealed", table.step)
    except CheckpointError as error:
        say(f"refused {error.code}", table.step)


def main() -> None:
    socket, run, rank_text, world_text, launch, steps, bytes_text, *more = sys.argv[1:]
    rank, world, size = int(rank_text), int(world_text), int(bytes_text)
    root = Path(more[0]) if more else None

    def dial() -> Path:
        return Path(socket) if socket != "-" or root is None else embedded.start(root)

    link = TellingLink(dial(), tell, lambda error: say("lost", 0), dial)
    hello = wire.Hello(id=link.next_id(), run=run, rank=rank, world=world, launch=launch)
    attempt = link.request(hello, wire.Welcome).attempt
    box = Box((rank * size,), (size,))
    restored = restore(link, root, run, box)
    slots = Slots(link, 2, size, 65_536)
    held = (StagedFragment(TensorSpec("model", "w", "U8", (world * size,)), (box,), 0),)
    for text in filter(None, steps.split(",")):
        number, waits, pause = text.partition("!")
        if waits and not pause:
            sys.stdin.readline()
        turn = 0 if restored is None else 1
        table = SlotTable(run, int(number), attempt, rank, world, ("model",), held, {}, {}, restored=restored, turn=turn)
        save(slots, table, box, pause)
    sys.stdin.readline()
    link.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    from tests.crash import rank_process  # under the name by which a point in it is found

    rank_process.main()
