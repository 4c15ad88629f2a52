"""A rank without torch that shares no memory with its daemon, in a process of its own, to be killed: URL RUN STEP BYTES."""

from __future__ import annotations

import sys
import time

import numpy as np

from holdfast.remote.http_link import RemoteLink
from holdfast.stage.slots import Slots
from holdfast_formats.lineage import Intent
from holdfast_formats.region import Box
from holdfast_formats.staging import slot_table, wire
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec


def main() -> None:
    url, run, step, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    link = RemoteLink(url, lambda outcome: None, lambda error: None)
    hello = wire.Hello(id=link.next_id(), run=run, rank=0, world=1, launch=f"process-{step}")
    attempt = link.request(hello, wire.Welcome).attempt
    question = wire.Choose(id=link.next_id(), turn=0, groups=("model",), wait_s=10)
    restored = link.request(question, wire.Chosen).step
    intent = Intent(restored, turn=0 if restored is None else 1, groups=("model",))
    slot = Slots(link, 2, size, 65_536).lease(step, attempt, 10, intent=intent)
    np.frombuffer(slot.data, np.uint8)[:size] = np.random.default_rng(step).integers(0, 256, size, np.uint8)
    fragment = StagedFragment(TensorSpec("model", "w", "U8", (size,)), (Box((0,), (size,)),), 0)
    table = SlotTable(run, step, attempt, 0, 1, intent.groups, (fragment,), {}, {}, restored=restored, turn=intent.turn)
    slot.hand_over(slot.seal(slot_table.encode(table), size))
    print("sealed", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
