"""A rank without torch, which starts in a blink: it says where it is on stdout, and can be killed anywhere.

    rank_process.py SOCKET RUN RANK WORLD LAUNCH STEPS BYTES [PAUSE]

Each rank holds BYTES bytes of a tensor of WORLD x BYTES; element values follow from step and position. PAUSE is a point at
which it waits to be killed: leased, copied, or sealed. Lines: `restored N`, `leased N`, `copied N`, `sealed N`,
`refused CODE N`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from holdfast.link.unix_socket import SocketLink
from holdfast.stage.slots import Slots
from holdfast_formats.errors import CheckpointError
from holdfast_formats.lineage import Intent
from holdfast_formats.region import Box
from holdfast_formats.staging import slot_table, wire
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec

PERIOD = 2**15  # of the bits that are kept: what follows is the same again, and need not be computed


def content(step: int, start: int, size: int) -> np.ndarray:
    """The bytes [start, start + size) of the tensor at a step."""
    once = ((np.arange(start, start + PERIOD, dtype=np.uint64) * 2654435761 + step * 97) >> 7).astype(np.uint8)
    return np.resize(once, size)


def say(what: str, step: int, pause: str) -> None:
    print(what, step, flush=True)
    if what == pause:
        time.sleep(3600)


def main() -> None:
    socket, run, rank_text, world_text, launch, steps, bytes_text, *rest = sys.argv[1:]
    rank, world, size, pause = int(rank_text), int(world_text), int(bytes_text), rest[0] if rest else ""
    link = SocketLink(Path(socket), lambda outcome: None, lambda error: None)
    hello = wire.Hello(id=link.next_id(), run=run, rank=rank, world=world, launch=launch)
    attempt = link.request(hello, wire.Welcome).attempt
    question = wire.Choose(id=link.next_id(), turn=0, groups=("model",), wait_s=60)
    restored = link.request(question, wire.Chosen).step
    say("restored", restored or 0, pause)
    intent = Intent(restored, turn=0 if restored is None else 1, groups=("model",))
    slots = Slots(link, 2, size, 65_536)
    spec = TensorSpec("model", "w", "U8", (world * size,))
    for step in map(int, steps.split(",")):
        fragment = StagedFragment(spec, (Box((rank * size,), (size,)),), 0)
        table = SlotTable(
            run, step, attempt, rank, world, intent.groups, (fragment,), {}, {}, restored=restored, turn=intent.turn
        )
        try:
            slot = slots.lease(step, attempt, 60, intent=intent)
            say("leased", step, pause)
            np.frombuffer(slot.data, np.uint8)[:size] = content(step, rank * size, size)
            say("copied", step, pause)
            slot.hand_over(slot.seal(slot_table.encode(table), size))
        except CheckpointError as error:
            say(f"refused {error.code}", step, pause)
            continue
        say("sealed", step, pause)
    time.sleep(3600)


if __name__ == "__main__":
    main()
