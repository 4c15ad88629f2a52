"""Python processes for tests that begin where all is imported already, which is most of what starting one costs.

They are forks of two processes: one has imported torch and the client, the other one the service, of which it has also
prepared what every daemon has, such as routes. All testers of a run share the two (`share`). In every other respect they
are as if they had been started: their own pid, memory, descriptors, environment and end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

TOP = Path(__file__).parents[1]
PYTHON = sys.executable  # a test may have another one
Kind = Literal["rank", "daemon", "paddle", "paddleformers"]
IMPORTED: dict[Kind, tuple[str, ...]] = {
    "rank": (
        *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint"),
        *("torch.distributed.device_mesh", "torch.nn.parallel", "holdfast", "holdfast.checkpointer", "holdfast.cli"),
        *("pytest", "tests.daemons"),  # what most scripts of tests import
        "torch._dynamo",  # the first optimizer of a process imports it, which takes longer than most of what ranks then do
    ),
    "daemon": (
        *("holdfast_service.config", "holdfast_service.observe.logs", "holdfast_service.daemon.server"),
        *("holdfast_service.api.app", "holdfast_service.api.access.policy", "holdfast_service.wiring.assembly"),
        *("holdfast_service.wiring.gc_tuning", "holdfast_service.wiring.watching"),
        *("holdfast_service.offline.catalog", "holdfast_service.offline.jobs", "holdfast_service.offline.tokens"),
        *("holdfast_service.wings.convert.jobs", "holdfast_service.wings.convert.offline"),
        "holdfast_service.wings.merge.merge_jobs",
        *(
            "alembic.command",
            "alembic.config",
            "sqlalchemy.dialects.sqlite",
            "uvicorn.lifespan.off",
            "uvicorn.loops.asyncio",
        ),
        *("uvicorn.loops.auto", "encodings.idna", *(["psycopg"] if find_spec("psycopg") else [])),
    ),
    "paddle": ("tests.integrations.paddle.train", "tests.integrations.paddle.fleet_worlds"),
    "paddleformers": ("tests.integrations.paddle.trainer.train", "paddleformers.transformers.llama.modeling"),
}
SHARED_KINDS: tuple[Kind, ...] = ("rank", "daemon")  # those that every tester needs
OWN_THREADS = ("jemalloc_bg_thd",)  # of an allocator that readies itself for a fork
MESSAGE_BYTES_MAX = 2**20
SHARED = "HOLDFAST_TESTS_FORKED"  # the directory of the sockets of servers that all testers use
_connecting = threading.Lock()


class Forked:
    """A running `python ARGUMENTS`, as `subprocess.Popen` has it; its standard output is a pipe, and its input on demand.

    With `output` standard output and error go to that descriptor instead. `kind` says what it finds imported; `session`,
    whether it leads a session, and so a process group, of its own.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        environment: dict[str, str] | None = None,
        *,
        talks: bool = False,
        output: int | None = None,
        kind: Kind = "rank",
        session: bool = False,
    ) -> None:
        self._kind = kind
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        theirs = [os.open(os.devnull, os.O_RDONLY), os.dup(2 if output is None else output)]
        if talks:
            os.close(theirs[0])
            theirs[0], ours = os.pipe()
            self.stdin = open(ours, "w", buffering=1)  # noqa: SIM115 - closed by whoever ends the process
        if output is None:
            ours, written = os.pipe()
            theirs.insert(1, written)
            self.stdout = open(ours)  # noqa: SIM115
        else:
            theirs.insert(1, os.dup(output))
        asked = {
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ) if environment is None else environment,
            "directory": os.getcwd(),
            "session": session,
        }
        self.pid = ask_to_begin(kind, asked, theirs)
        # Where a test fails before it ends this, a warning of these would fail one that comes later.
        weakref.finalize(self, _close, [pipe for pipe in (self.stdin, self.stdout) if pipe is not None])
        for descriptor in theirs:
            os.close(descriptor)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ended(self._kind, self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        found = self.poll()
        if found is None:
            wait_for_end(self.pid, timeout)
            found = self.poll()
        if found is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return found

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self) -> None:
        """Close its input, read its output to the end, and wait."""
        if self.stdin is not None:
            self.stdin.close()
        if self.stdout is not None:
            self.stdout.read()
            self.stdout.close()
        self.wait()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()


def _close(pipes: list[IO[str]]) -> None:
    for pipe in pipes:
        with suppress(OSError):  # nothing reads it any more
            pipe.close()


class _Server:
    """The process that is forked, as a connection to it. Threads ask it one after the other."""

    def __init__(self, control: socket.socket) -> None:
        self._lock = threading.Lock()
        self._control = control

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
            answer: dict[str, Any] = json.loads(self._control.recv(MESSAGE_BYTES_MAX))
            return answer


def _start(kind: Kind, address: Path | None = None) -> socket.socket:
    """Start a server that ends with this process; at an `address`, other processes may ask it too."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        passed = [theirs.fileno()]
        if address is not None:
            listener.bind(str(address))
            listener.listen(128)
            passed.append(listener.fileno())
        command = [PYTHON, "-X", "faulthandler", "-m", "tests.forked", kind, *map(str, passed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=TOP, env=environment, pass_fds=passed)
    atexit.register(process.wait)
    atexit.register(control.close)  # before the wait: it is what ends the server
    return control


def share() -> None:
    """Start a server of each kind for every process that this one starts."""
    directory = tempfile.TemporaryDirectory(prefix="hf-")
    atexit.register(directory.cleanup)
    for kind in SHARED_KINDS:
        _start(kind, Path(directory.name, kind))
    os.environ[SHARED] = directory.name


def _server(kind: Kind) -> _Server:
    with _connecting:  # else two threads that ask first would have two servers, each with the children of one
        return _connected(kind)


@functools.lru_cache
def _connected(kind: Kind) -> _Server:
    directory = os.environ.get(SHARED)
    if directory is None or kind not in SHARED_KINDS:
        return _Server(_start(kind))
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(str(Path(directory, kind)))
    return _Server(control)


def ask_to_begin(kind: Kind, asked: dict[str, Any], descriptors: Sequence[int]) -> int:
    """The process that has begun as `asked`: arguments, environment, directory; the descriptors are its first three."""
    return int(_server(kind).ask(asked, descriptors)["pid"])


def ended(kind: Kind, pid: int) -> int | None:
    """How such a process ended; None while it goes on."""
    status: int | None = _server(kind).ask({"ended": pid})["status"]
    return status


def wait_for_end(pid: int, timeout_s: float | None = None) -> None:
    """Until a process has ended, child of this one or not, or this long."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # another thread has asked how it ended
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
    finally:
        os.close(descriptor)


def _serve(control: socket.socket, listener: socket.socket | None) -> tuple[dict[str, Any], list[int]] | None:
    """Fork as often as is asked; what a fork is to become, there, and None where the process that started it has ended."""
    statuses: dict[int, int] = {}  # of those that ended: two threads may ask for one
    others: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([control, *([] if listener is None else [listener]), *others], [], [])
        for asking in ready:
            if listener is not None and asking is listener:
                others.append(listener.accept()[0])
                continue
            try:
                message, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_BYTES_MAX, 3)
            except ConnectionResetError:  # it ended before it had read an answer
                message = b""
            if not message and asking is control:
                return None
            if not message:
                others.remove(asking)
                asking.close()
                continue
            asked = json.loads(message)
            if "ended" in asked:
                answer = {"status": _status(asked["ended"], statuses)}
            else:
                pid = os.fork()
                statuses.pop(pid, None)
                if pid == 0:
                    for connection in (control, *([] if listener is None else [listener]), *others):
                        connection.close()
                    return asked, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                answer = {"pid": pid}
            with suppress(OSError):  # a tester that has ended meanwhile
                asking.send(json.dumps(answer).encode())


def _status(pid: int, statuses: dict[int, int]) -> int | None:
    if pid not in statuses:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            statuses[ended] = os.waitstatus_to_exitcode(status)
    return statuses.get(pid)


def _become(asked: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """What the interpreter does with its arguments, and at its end but for freeing what is imported, which takes longer than
    most of what ranks then do.
    """
    status = 0
    try:
        _run(asked, descriptors)
    except SystemExit as exit:
        if isinstance(exit.code, int) or exit.code is None:
            status = exit.code or 0
        else:
            print(exit.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _run(asked: dict[str, Any], descriptors: Sequence[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["directory"])
    if asked.get("session"):
        os.setsid()
    sys.path[1:1] = paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for script in (Path(path, "sitecustomize.py") for path in paths):
        if script.exists():
            runpy.run_path(str(script))
    first, *rest = asked["arguments"]
    if first == "-u":  # as torchrun starts ranks: a line is written with each print
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        first, *rest = rest
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def _prepare_daemons() -> None:
    """Do what a daemon does once and keeps for its process: mappers of SQLAlchemy, scripts of Alembic, routes of FastAPI,
    tables of layout rules. It is more than half of what most daemons of tests do.
    """
    from fastapi.routing import iter_route_contexts
    from sqlalchemy.orm import configure_mappers

    from holdfast_formats.layout.rules.choice import choose, packaged
    from holdfast_service.api.app import ROUTERS
    from holdfast_service.control.database.database import Database

    configure_mappers()
    for router in ROUTERS:
        list(iter_route_contexts(router.routes))
    for table in packaged():
        choose(None, (), table=table)
    with tempfile.TemporaryDirectory() as directory:
        Database.open(f"sqlite:///{directory}/catalog.sqlite").close()


def main() -> None:
    control, *listeners = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[2:]]
    kind = next(kind for kind in IMPORTED if kind == sys.argv[1])
    for module in IMPORTED[kind]:
        importlib.import_module(module)
    if kind == "daemon":
        _prepare_daemons()
    threads = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    if any(Path(task, "comm").read_text().strip() not in OWN_THREADS for task in threads):
        raise SystemExit("an import has begun a thread: what is forked now may find a lock that nobody frees")
    gc.freeze()  # what is imported stays shared
    work = _serve(control, listeners[0] if listeners else None)
    if work is not None:
        _become(*work)


if __name__ == "__main__":
    main()
