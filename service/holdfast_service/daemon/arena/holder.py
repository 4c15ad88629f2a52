"""The holder: a small process that keeps descriptors of shared memory while no daemon runs, and starts one if none comes.

    holder.py --socket PATH --listener N                       beside a daemon, which has started it
    holder.py --socket PATH --listener N --supervise COMMAND…  above a daemon, as the first process of a container

At its socket, one packet is one request and one packet its answer: `keep NAME` brings a descriptor, `drop NAME` closes one,
`list` is answered by one packet `held NAME` with its descriptor for each, then `end`; `serve JSON` states how to start a
daemon for the held memory, and `about` is answered by JSON. It imports only the standard library, so that it starts quickly
and needs little memory.

After a while without a daemon, it drops segments in which nothing is sealed (living ranks have descriptors of their own),
and starts a daemon that commits sealed saves. If the root is gone, or no daemon has come for a day, it drops these too, and
records what is lost, beside its socket. It ends after a while without descriptors and connections. A holder that was
replaced at its socket, because it did not answer, drops everything.

Above a daemon, it starts that daemon, forwards signals to it, and restarts it after a kill. It is its service manager
(sd_notify): a daemon that has been ready, and is silent for a while, hangs or is stopped, and is killed. It ends with the
daemon's exit status when the daemon ends by itself and nothing is sealed.

When it is told to stop while saves are sealed, a daemon must write them first: one that starts is told to stop once it is
ready, and one that does not answer is replaced. What is sealed when the holder ends is recorded as lost.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LINGER_S = 3.0
ALONE_S = 120.0  # longer than ranks look for the next daemon
RETRY_S, RETRY_S_MAX = 300.0, 3600.0  # until a daemon is started again that has ended without taking over
GONE_S = 600.0  # of a root that is not there: it may only be mounted late
GIVE_UP_S = 86_400.0  # without any daemon
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to the daemon below
BACK_OFF_S, BACK_OFF_S_MAX = 1.0, 30.0  # above a daemon that is killed again and again
CHECK_S = 0.5
SILENT_S = 120.0  # of a daemon below that was ready; it sends a sign of life four times in that time
LAST_WORDS_S = 5.0  # from the signal that makes it log its stacks to the one that nothing withstands
STOP_SILENT_S, STOP_LAST_WORDS_S = 4.0, 1.0  # the same once it was told to stop: engines kill a container 10 s later
STOP_STARTS_MAX = 3  # daemons that are started while this process stops
NOTICE_BYTES_MAX = 4096
PACKET_BYTES_MAX = 131_072
RECORD_BYTES_MAX = 1_000_000
SEGMENTS_MAX, SLOTS_MAX = 4096, 64
PAGE_BYTES = 4096
MAGIC, SEALED = b"HOLDFAST", 2
CREDENTIALS = struct.Struct("iII")  # SO_PEERCRED: process, user, group
ROOT_FILE = ".holdfast.root"


class Start(NamedTuple):
    """How to start a daemon: command, working directory, environment (None: this process's), and the root it serves."""

    command: list[str]
    directory: str
    environment: dict[str, str] | None
    root: str
    root_id: str


class SealedSave(NamedTuple):
    run: str
    step: int
    rank: int
    world: int


class Child:
    """The daemon started by this process, if any."""

    def __init__(self, output: Path | None) -> None:
        """Its output goes to a file, or to this process's output."""
        self._output = output
        self.pid: int | None = None
        self.status = 0  # of the one that ended last, as a shell has it
        self.killed = False  # whether a signal ended it

    def start(self, how: Start, *more: str) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # none comes between the fork and its number
        try:
            pid = os.fork()
            if pid:
                self.pid = pid
            else:
                for number in PASSED_ON:
                    signal.signal(number, signal.SIG_DFL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid:
            return
        try:
            if self._output is not None:
                os.setsid()
                log = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
            if os.path.isdir(how.directory):
                os.chdir(how.directory)
            command = [*how.command, *more]
            if how.environment is None:
                os.execvp(command[0], command)
            else:
                os.execvpe(command[0], command, how.environment)
        finally:
            os._exit(127)

    def ended(self) -> bool:
        """Whether it has ended since the last call. Reaps other children, too, as a container's first process."""
        has_ended = False
        while self.pid is not None or self._output is None:
            try:
                pid, status = os.waitpid(-1 if self._output is None else self.pid or 0, os.WNOHANG)
            except ChildProcessError:
                return has_ended
            if pid == 0:
                return has_ended
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.pid, self.killed, self.status, has_ended = None, code < 0, code if code >= 0 else 128 - code, True
        return has_ended

    def signal(self, number: int) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)


class Watchdog:
    """For how long the daemon below has been silent, since it was ready; by sd_notify, passed on to this process's own
    service manager.

    Only time in which this process ran counts: with a paused container, the daemon was paused as well.
    """

    def __init__(self, path: Path, silent_s: float, above: str = "") -> None:
        """Listens at `path`, and passes on to `above`, as $NOTIFY_SOCKET names it."""
        self._above = "\0" + above[1:] if above.startswith("@") else above
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        self.socket.bind(str(path))
        self._path, self._silent_max_s, self.last_words_s = path, silent_s, LAST_WORDS_S
        self.rest()

    @property
    def is_ready(self) -> bool:
        """Whether the daemon is ready, and has not begun to stop."""
        return self._watches

    def expect_stop(self) -> None:
        """The daemon was told to stop, and has little time to say that it does."""
        self._silent_s, self._silent_max_s, self.last_words_s = 0.0, STOP_SILENT_S, STOP_LAST_WORDS_S

    def rest(self) -> None:
        """No daemon is ready: it starts, stops or has ended."""
        self._watches, self._silent_s, self._looked = False, 0.0, time.monotonic()

    def heed(self) -> None:
        """Read one message."""
        try:
            packet = self.socket.recv(NOTICE_BYTES_MAX)
        except OSError:
            return
        lines = packet.decode(errors="replace").split("\n")
        if "STOPPING=1" in lines:
            self.rest()
        elif "READY=1" in lines or "WATCHDOG=1" in lines:
            self._watches, self._silent_s = True, 0.0
        if self._above:
            with suppress(OSError):  # that manager ends what it does not hear of
                self.socket.sendto(packet, self._above)

    def silent_s(self) -> float | None:
        """Seconds of silence, once they are too many; call it at least every `CHECK_S` seconds."""
        now = time.monotonic()
        if self._watches:
            self._silent_s += min(now - self._looked, 2 * CHECK_S)
        self._looked = now
        return self._silent_s if self._silent_s >= self._silent_max_s else None

    def close(self) -> None:
        self.socket.close()
        self._path.unlink(missing_ok=True)


class Holder:
    """Descriptors by name, connections to clients, and the daemon that was started for them."""

    def __init__(
        self,
        listener: socket.socket,
        path: Path,
        supervised: Start | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._held: dict[str, int] = {}
        self._daemons: set[socket.socket] = set()  # connections of daemons, unlike those that only ask
        self._others: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener, self._path, self._inode = listener, path, path.stat().st_ino
        self._supervised, self._start = supervised, supervised
        self._watchdog, self._kill_at = watchdog, float("inf")
        if watchdog is not None:
            self._selector.register(watchdog.socket, selectors.EVENT_READ)
        self._child = Child(None if supervised else path.with_suffix(".log"))
        self._began = self._attended = time.monotonic()
        self._root_seen = self._began
        self._try_at, self._retry_s = 0.0, RETRY_S if supervised is None else BACK_OFF_S
        self._stopping, self._stop_starts = 0, 0  # the signal that said so, and daemons started since
        self._told: int | None = None  # the daemon that knows it

    def serve(self) -> int:
        """Answer until nothing was held and no client connected for a while; above a daemon, until that has ended."""
        needed = time.monotonic()
        if self._supervised is not None:
            self._child.start(self._supervised)
        while time.monotonic() - needed < LINGER_S:
            for key, _ in self._selector.select(CHECK_S):
                assert isinstance(key.fileobj, socket.socket)
                self._heed(key.fileobj)
            if self._supervised is not None:
                if not self._look_after(self._supervised):
                    return self._child.status
                needed = time.monotonic()
                continue
            self._child.ended()
            if not self._daemons and self.is_replaced:  # the other one was given everything
                self._let_go()
            if self._daemons:
                self._attended, self._try_at, self._retry_s = time.monotonic(), 0.0, RETRY_S
            self._alone(time.monotonic() - self._attended)
            if self._held or self._daemons or self._child.pid is not None:
                needed = time.monotonic()
        return 0

    @property
    def is_replaced(self) -> bool:
        """Whether another holder listens at its socket."""
        try:
            return self._path.stat().st_ino != self._inode
        except OSError:
            return False

    def stop(self, number: int, _: object) -> None:
        """Signal handler: forward to the daemon below, and let it run if it was stopped (SIGSTOP)."""
        self._stopping = number
        self._pass_on()
        self._child.signal(signal.SIGCONT)

    def _pass_on(self) -> None:
        """Tell the daemon below to stop. One that is not ready ends at once, so it has to write first what is sealed."""
        pid, watchdog = self._child.pid, self._watchdog
        if pid is None or pid == self._told or not (watchdog is None or watchdog.is_ready or not self._sealed()):
            return
        self._told = pid
        if watchdog is not None:
            watchdog.expect_stop()
        self._child.signal(self._stopping)

    def _look_after(self, how: Start) -> bool:
        """Restart the daemon below if it was killed, or ended while something is sealed; False if the holder ends
        with it.
        """
        if self._child.ended():
            return self._has_next()
        if self._stopping:
            self._pass_on()
        self._end_silent()
        if self._child.pid is None and self._stopping and not self._sealed():
            return False  # the signal came before it was started again
        if self._child.pid is None and (self._stopping or time.monotonic() >= self._try_at):
            self._stop_starts += bool(self._stopping)
            self._child.start(how)
        return True

    def _has_next(self) -> bool:
        """Decide after the end of the daemon below; False if the holder ends, too."""
        if self._watchdog is not None:
            self._watchdog.rest()
        self._kill_at = float("inf")
        sealed = self._sealed()
        if self._stopping and (not self._child.killed or self._stop_starts == STOP_STARTS_MAX):
            if sealed:
                self._give_up("its container was stopped before a daemon had written it")
            return False
        if not sealed and (self._stopping or not self._child.killed):
            return False
        wait_s = BACK_OFF_S if time.monotonic() - self._attended > BACK_OFF_S_MAX else self._retry_s
        self._attended, self._retry_s = time.monotonic(), min(2 * wait_s, BACK_OFF_S_MAX)
        self._try_at = self._attended + wait_s
        when = "and another one writes what is staged" if self._stopping else f"and restarts in {wait_s:.0f} s"
        self._say(
            f"the daemon ended with status {self._child.status} {when}; "
            f"{self._bytes()} bytes of shared memory are kept, with {_named(sealed)}"
        )
        return True

    def _end_silent(self) -> None:
        """Kill a daemon below that has been silent for too long: first so that it logs its stacks, then for certain."""
        silent_s = None if self._watchdog is None else self._watchdog.silent_s()
        if silent_s is not None and self._watchdog is not None:
            self._say(f"the daemon has been silent for {silent_s:.0f} s and is killed; staged saves are kept")
            self._watchdog.rest()
            self._child.signal(signal.SIGABRT)
            self._kill_at = time.monotonic() + self._watchdog.last_words_s
        elif time.monotonic() >= self._kill_at:
            self._kill_at = float("inf")
            self._child.signal(signal.SIGKILL)

    def _alone(self, alone_s: float) -> None:
        """Decide about memory that no daemon has asked for."""
        if alone_s <= ALONE_S or self._child.pid is not None:
            return
        for name in [name for name, fd in self._held.items() if not sealed_saves(fd)]:
            os.close(self._held.pop(name))
        if not self._held:
            return
        start, now = self._start, time.monotonic()
        if start is None or os.path.isdir(start.root):
            self._root_seen = now
        if now - self._root_seen > GONE_S:
            self._give_up(f"its root {start.root if start else ''} is gone")
        elif alone_s > GIVE_UP_S:
            self._give_up(f"no daemon has taken it over for {alone_s / 3600:.0f} hours")
        elif start is not None and _root_id(start) == start.root_id and now >= self._try_at:
            again = ("--listen", "none") if self._try_at else ()  # its address may be in use
            self._try_at, self._retry_s = now + self._retry_s, min(2 * self._retry_s, RETRY_S_MAX)
            self._child.start(start, *again)

    def _give_up(self, why: str) -> None:
        """Drop everything, and record it for the next daemon of the root, and `holdfast doctor`."""
        record = {
            "at": time.time(),
            "why": why,
            "root": self._start.root if self._start else "",
            "bytes": self._bytes(),
            "saves": [one._asdict() for one in self._sealed()],
        }
        self._say(f"lost with {self._bytes()} bytes of shared memory: {_named(self._sealed())}: {why}")
        place = self._path.with_suffix(".lost")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(place, flags, 0o600), "a") as file:
                if file.tell() < RECORD_BYTES_MAX:
                    file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._say(f"cannot write {place}: {error}")
        self._let_go()

    @staticmethod
    def _say(text: str) -> None:
        print(f"holdfast: {text}", file=sys.stderr, flush=True)

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    def _sealed(self) -> list[SealedSave]:
        return [save for fd in self._held.values() for save in sealed_saves(fd)]

    def _bytes(self) -> int:
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._held.values())

    def _heed(self, ready: socket.socket) -> None:
        if self._watchdog is not None and ready is self._watchdog.socket:
            self._watchdog.heed()
            return
        if ready is self._listener:
            connection, _ = self._listener.accept()
            if not is_ours(connection):
                connection.close()
                return
            self._selector.register(connection, selectors.EVENT_READ)
            self._others.add(connection)
        elif not self._hear(ready):
            self._selector.unregister(ready)
            ready.close()
            self._daemons.discard(ready)
            self._others.discard(ready)

    def _hear(self, connection: socket.socket) -> bool:
        """Handle one request; False when the client is gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, 1)
            for fd in fds:
                os.set_inheritable(fd, False)
            if packet:
                connection.send(self._answer(connection, packet.decode(errors="replace"), fds))
            for fd in fds:
                os.close(fd)
            return bool(packet)
        except OSError:
            return False

    def _answer(self, connection: socket.socket, request: str, fds: list[int]) -> bytes:
        word, _, rest = request.partition(" ")
        if word == "about":
            return json.dumps(self._about()).encode()
        self._daemons.add(connection)
        match [word, *rest.split(" ")]:
            case ["keep", name] if fds and name and name not in self._held and len(self._held) < SEGMENTS_MAX:
                self._held[name] = fds.pop()
                return b"done"
            case ["drop", name] if name in self._held:
                os.close(self._held.pop(name))
                return b"done"
            case ["list", ""]:
                for name, fd in self._held.items():
                    socket.send_fds(connection, [f"held {name}".encode()], [fd])
                return b"end"
            case ["serve", *_] if (start := _told(rest)) is not None:
                self._start = start
                return b"done"
            case _:
                return b"refused"

    def _about(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "pid": os.getpid(),
            "root": self._start.root if self._start else None,
            "age_s": now - self._began,
            "alone_s": None if self._daemons or self._child.pid is not None else now - self._attended,
            "supervises": self._supervised is not None,
            "segments": len(self._held),
            "bytes": self._bytes(),
            "saves": sorted({f"{one.run}@{one.step}" for one in self._sealed()}),
        }


def is_ours(connection: socket.socket) -> bool:
    """Whether the peer is this user or root, whatever the socket's mode is."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def sealed_saves(fd: int) -> list[SealedSave]:
    """The sealed saves of a segment, by docs/format.md § 11, repeated here to avoid imports."""
    head = os.pread(fd, 176, 0)
    if len(head) < 176 or not head.startswith(MAGIC):
        return []
    slots, data_bytes, table_bytes, rank, world = struct.unpack_from("<IQQII", head, 12)
    run = head[48:176].rstrip(b"\0").decode(errors="replace")
    slot_bytes = PAGE_BYTES + data_bytes + table_bytes
    if slots > SLOTS_MAX or PAGE_BYTES + slots * slot_bytes > os.fstat(fd).st_size:
        return []
    headers = [os.pread(fd, 24, start) for start in range(PAGE_BYTES, PAGE_BYTES + slots * slot_bytes, slot_bytes)]
    stated = [struct.unpack_from("<IQ", header, 12) for header in headers if header.startswith(MAGIC)]
    return [SealedSave(run, step, rank, world) for state, step in stated if state == SEALED]


def _named(saves: list[SealedSave]) -> str:
    """How many saves are staged, and which; a save has a slot for each of its ranks."""
    named = sorted({(one.run, one.step) for one in saves})
    return f"{len(named)} staged saves" + "".join(f" {run}@{step}" for run, step in named)


def _told(text: str) -> Start | None:
    """Parse how to start a daemon; None for invalid text."""
    try:
        document = json.loads(text)
        start = Start(**document)
    except (TypeError, ValueError):
        return None
    return start if start.command and all(isinstance(word, str) for word in start.command) else None


def _root_id(start: Start) -> str | None:
    """The id in the root's file; None without a root. A directory may be an unmounted mount point."""
    try:
        return str(json.loads((Path(start.root) / ROOT_FILE).read_bytes())["id"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def main() -> int:
    """Take over the listening socket, and serve."""
    parser = argparse.ArgumentParser(prog="holder.py")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--notify", type=Path, help="socket for reports that the daemon is alive")
    parser.add_argument("--silent", type=float, default=SILENT_S, help="seconds without a report until the daemon is killed")
    parser.add_argument("--above", default="", help="this process's own service manager")
    parser.add_argument("--supervise", nargs=argparse.REMAINDER, metavar="COMMAND")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is meant for the daemon and the trainer
    os.set_inheritable(arguments.listener, False)
    supervised = Start(arguments.supervise, os.getcwd(), None, "", "") if arguments.supervise else None
    with socket.socket(fileno=arguments.listener) as listener:
        watchdog = Watchdog(arguments.notify, arguments.silent, arguments.above) if arguments.notify else None
        holder = Holder(listener, arguments.socket, supervised, watchdog)
        if supervised is not None:
            for number in PASSED_ON:
                signal.signal(number, holder.stop)
        status = holder.serve()
        if watchdog is not None:
            watchdog.close()
        if arguments.socket.exists() and not holder.is_replaced:
            arguments.socket.unlink()
    return status


if __name__ == "__main__":
    sys.exit(main())
