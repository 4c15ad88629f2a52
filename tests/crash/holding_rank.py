"""A rank whose connection outlives it: `holding_rank.py SOCKET waiting|forked` says `holding` and waits to be killed.

`waiting`: the daemon is waiting for a slot for it. `forked`: a child, forked without Python's knowledge, has the connection.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

from holdfast.link.unix_socket import SocketLink
from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging import wire


def main() -> None:
    link = SocketLink(Path(sys.argv[1]), lambda outcome: None, lambda error: None)
    hello = wire.Hello(id=link.next_id(), run="run", rank=0, world=1, launch="first", process="first", session="first")
    link.request(hello, wire.Welcome)
    if sys.argv[2] == "forked":
        libc = ctypes.CDLL(None)
        if libc.fork() == 0:
            libc.close(1)
            libc.read(0, ctypes.create_string_buffer(1), 1)  # until the test has ended
            libc._exit(0)
    else:
        link.request(wire.Reserve(id=link.next_id(), slots=1, data_bytes=8, table_bytes=4096), wire.Segment)
        link.request(wire.Lease(id=link.next_id(), step=1), wire.Granted)
        threading.Thread(target=wait_for_slot, args=(link,), daemon=True).start()
        time.sleep(0.5)
    print("holding", flush=True)
    time.sleep(3600)


def wait_for_slot(link: SocketLink) -> None:
    try:
        link.request(wire.Lease(id=link.next_id(), step=2, wait_s=600.0, policy="wait"), wire.Granted)
    except CheckpointError as error:
        print("not holding:", error, flush=True)


if __name__ == "__main__":
    main()
