"""The PostgreSQL of the demo: a temporary server, unless another one is given."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.demo.processes import POLL_S, DemoFailed

START_S_MAX = 60.0
STOP_S_MAX = 10.0
USER = "postgres"  # Debian's; the server refuses to run as root
_DEBIAN = Path("/usr/lib/postgresql")
_HINT = "install Debian's package postgresql, or name a database: --catalog postgresql://USER@HOST/DATABASE"


def programs() -> Path | None:
    """The directory with the server's programs, the newest one; None if there is no PostgreSQL here."""
    found = [path.parent for path in _DEBIAN.glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).resolve().parent


@contextmanager
def catalog_server(log: Path) -> Iterator[str]:
    """The URL of an empty database on a server that ends with the block; `DemoFailed` if none can be started."""
    where = programs()
    if where is None:
        raise DemoFailed(f"there is no PostgreSQL on this machine: {_HINT}")
    directory = Path(tempfile.mkdtemp(prefix="holdfast-demo-postgres-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, USER, USER)
        with open(log, "ab") as output:
            make = [*_as_server(), str(where / "initdb"), "-D", f"{directory}/data", "-A", "trust", "-U", USER, "--no-sync"]
            if subprocess.run(make, stdout=output, stderr=output, cwd="/", check=False).returncode != 0:
                raise DemoFailed("PostgreSQL's initdb failed", log)
            port = free_port()
            flags = ["-p", str(port), "-k", str(directory), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
            serve = [*_as_server(), str(where / "postgres"), "-D", f"{directory}/data", *flags]
            server = subprocess.Popen(serve, stdout=output, stderr=output, cwd="/", start_new_session=True)
        try:
            _wait(server, port, log)
            yield f"postgresql+psycopg://{USER}@127.0.0.1:{port}/{USER}"
        finally:
            _stop(server)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_server() -> list[str]:
    """A command prefix that switches to a user allowed to run a server, and ends it with this process."""
    user = ["--reuid", USER, "--regid", USER, "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *user, "--pdeathsig", "QUIT"]


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import psycopg

    limit = time.monotonic() + START_S_MAX
    while True:
        try:
            psycopg.connect(host="127.0.0.1", port=port, user=USER, dbname=USER).close()
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > limit:
                raise DemoFailed("PostgreSQL did not start", log) from error
            time.sleep(POLL_S)
        else:
            return


def _stop(server: subprocess.Popen[bytes]) -> None:
    for ask in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast, at once, without asking
        if server.poll() is not None:
            return
        server.send_signal(ask)
        try:
            server.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            continue
