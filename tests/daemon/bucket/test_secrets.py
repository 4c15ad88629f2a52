"""Secrets of a bucket that daemon, trainer and commands were given are in nothing that they write, answer or show.

Looked at: logs at the level debug, of libraries too; the words of all processes; every answer of the API and every page that
a link leads to; the metrics; what `doctor` and other commands print; the catalog and the rest of the machine's directory;
the bucket's own objects; and the errors of answers that are refused, lost or cut. `make objects` also looks through
`SECRETS_LOG_BYTES` of log.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from holdfast import Checkpointer
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from tests.attack import matrix
from tests.daemon.bucket.test_bucket_root import RUN, state_of
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.commands import call
from tests.kit.lenders import LENT_SECRET
from tests.kit.objects import TestBucket, moto, moto_bucket
from tests.kit.objects_proxy import (
    ACCESS_DENIED,
    CONFLICT,
    EXPIRED_TOKEN,
    INTERNAL_ERROR,
    SLOW_DOWN,
    CutAnswer,
    CutRequest,
    Fault,
    LoseAnswer,
    faulty,
)

__all__ = ["moto", "moto_bucket"]

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.SaveWarning")  # saves that fail by faults are meant to

SECRETS = {
    "the secret key": "hf-secret-key/of+tests-8c1f4d2e9b",
    "the session token": "hf-session-token/of+tests-77aa01c3",
}
PAGES_MAX = 80
LOG_BYTES = int(os.environ.get("SECRETS_LOG_BYTES", 2**26))
FAULTS: tuple[Fault, ...] = (
    ACCESS_DENIED, CONFLICT, EXPIRED_TOKEN, INTERNAL_ERROR, SLOW_DOWN, LoseAnswer(), CutAnswer(3), CutRequest(3),
)  # fmt: skip
COMMANDS = """
ls
show RUN@1
verify RUN@1
doctor
nodes
events
audit
jobs ls
stats RUN
whoami
token ls
catalog check
ls --root BUCKET
doctor --root BUCKET
verify RUN@1 --root BUCKET
show nobody@7 --root BUCKET
bench --root BUCKET --size-mib 5
token create x --root BUCKET
catalog check --root BUCKET
ls --root s3://no-such-bucket-at-all
"""


class Watch:
    """Looks for secrets in what it is shown, and all the while in the words of every process."""

    def __init__(self, secrets: dict[str, str]) -> None:
        self.found: list[str] = []
        self._texts = {
            name: {form.encode() for form in (secret, quote(secret, safe=""), quote(secret))}
            for name, secret in secrets.items()
        }
        self.looked = self.processes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self, where: str, data: bytes | mmap.mmap) -> None:
        self.looked += len(data)
        self.found += [
            f"{name} in {where}" for name, forms in self._texts.items() if any(data.find(form) >= 0 for form in forms)
        ]

    def look_below(self, directory: Path) -> None:
        """In every file."""
        for path in directory.rglob("*"):
            with suppress(OSError, ValueError):  # a socket, an empty file, or one that went
                if path.is_file():
                    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        self.look(str(path), data)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    self.look(str(path), path.read_bytes())
                    self.processes += 1


@contextmanager
def watched(secrets: dict[str, str]) -> Iterator[Watch]:
    watch = Watch(secrets)
    try:
        yield watch
    finally:
        watch.close()


@pytest.fixture(autouse=True)
def settings(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys in the environment, as a cluster gives them."""
    for key, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS["the secret key"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRETS["the session token"])
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


def _command(watch: Watch, words: str, bucket: str) -> None:
    """Run it; whatever it prints is looked at."""
    ended = call(*words.replace("RUN", RUN).replace("BUCKET", bucket).split())
    assert ended.output, words
    watch.look(f"holdfast {words}", ended.output.encode())


def _answers(watch: Watch, daemon: RunningDaemon, token: str, follow: bool = True) -> int:
    """Every GET of the API and every page, from link to link if they are to be followed; how many."""
    headers = {"Authorization": f"Bearer {token}"}
    known = {route.path for route in matrix.ROUTES if route.method == "GET" and "stream" not in route.path}
    given = {"run": RUN, "step": "1", "name": "model.safetensors", "tag": "x", "job": "1", "id": "1"}
    todo = ["/", "/metrics", "/nodes", *(re.sub(r"\{(\w+)\}", lambda one: given.get(one[1], "x"), path) for path in known)]
    seen = set(todo)
    with httpx.Client(base_url=daemon.url, headers=headers, trust_env=False, timeout=180) as client:
        for path in todo:
            with suppress(httpx.HTTPError), client.stream("GET", path) as answer:
                body = b""
                for piece in answer.iter_bytes():
                    body += piece
                    if "event-stream" in answer.headers.get("content-type", "") or len(body) > 2**24:
                        break
                watch.look(path, body + repr(answer.headers.raw).encode())
                if "html" in answer.headers.get("content-type", "") and follow and len(seen) < PAGES_MAX:
                    links = {link.partition("#")[0] for link in re.findall(r'(?:href|src)="(/[^"]*)"', body.decode())}
                    fresh = sorted(links - seen)
                    seen.update(fresh)
                    todo += fresh
    return len(seen)


def test_no_secret_is_shown(moto_bucket: TestBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While all goes well and while it does not: each place above."""
    bucket = moto_bucket
    caplog.set_level(logging.DEBUG)
    for library in ("botocore", "urllib3"):  # as a program may set them that looks for a mistake
        logging.getLogger(library).setLevel(logging.DEBUG)
    state, chance = tmp_path / "state", random.Random(1)
    with (
        faulty(bucket.server.endpoint) as proxy,
        watched(SECRETS) as watch,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        flags = ("--root", bucket.url, "--state", str(state), "--log-level", "debug", "--metrics-open")
        with running(state, *flags, listen="127.0.0.1:0", closed=True) as daemon:
            program = [str(Path(sys.executable).with_name("holdfast")), "token", "create", "all", "--scope", "admin"]
            made = subprocess.run([*program, "--root", bucket.url], capture_output=True, text=True, check=True)
            token = made.stdout.strip()
            patch.setenv("HOLDFAST_TOKEN", token)
            patch.setenv("HOLDFAST_URL", daemon.url)
            watch.look("holdfast token", made.stderr.encode())
            with Checkpointer(RUN, state_of(1), at=str(daemon.socket)) as checkpointer:
                checkpointer.save(1).result(180)
            with Api(daemon.url) as api:
                wait_until(lambda: api.checkpoint(RUN, 1).verified)
            proxy.choose = lambda request: chance.choice(FAULTS) if chance.random() < 0.5 else None
            with suppress(CheckpointError), Checkpointer(RUN, state_of(1), at=str(daemon.socket)) as checkpointer:
                checkpointer.save(2).result(180)
            _answers(watch, daemon, token, follow=False)
            proxy.choose = lambda request: None
            assert _answers(watch, daemon, token) > 60
            for words in COMMANDS.strip().splitlines():
                _command(watch, words, bucket.url)
            watch.look_below(state)
            watch.look_below(tmp_path / "state-home")
        for key in bucket.sizes():
            if not key.endswith(".safetensors"):
                watch.look(key, bucket.read(key))
        watch.look("the trainer's log", caplog.text.encode())
        with open(daemon.log, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
            watch.look("the daemon's log", log)
            assert log.find(token.encode()) < 0 and log.find(b"X-Amz-Signature") < 0 and log.find(b"Signature=") < 0
            print(f"{len(log)} bytes of log, {watch.looked} bytes in all, {watch.processes} looks at processes")
        assert f"{RUN}/{naming.COMMITS}/{naming.step_directory(1)}" in bucket.sizes()
    assert watch.found == [] and watch.processes > 0


@pytest.mark.objects
def test_no_secret_is_in_much_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a client whose requests fail in every way, with every traceback, and with libraries at the level debug."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    path, secrets = tmp_path / "log", {"keys": LENT_SECRET, "tokens": "token-LENT", "signatures": "Signature="}
    with watched(secrets) as watch, open(path, "wb") as log:
        words = [sys.executable, "-m", "tests.kit.secret_log", str(LOG_BYTES)]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, check=True)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            watch.look("the log", data)
            assert len(data) >= LOG_BYTES and data.find(b"it failed") >= 0 and data.find(b"Traceback") >= 0
    path.unlink()
    assert watch.found == [] and int(ended.stdout) > 1
