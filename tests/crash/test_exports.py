"""Exports and conversions are killed, stopped and starved at acts all over them: the next start goes on, and what has the
name is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast.export.copy import export
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import InUse
from holdfast_formats.rest.offline import DirectoryConversion
from tests.checkpoints import build, flip
from tests.crash import ledger
from tests.crash.job_service import stopped
from tests.daemons import wait_until
from tests.forked import Forked
from tests.in_memory import in_memory
from tests.job_requests import a_conversion
from tests.wings.convert.exports.sources import LLAMA, llama, trained, values_of

LANE = "killed in an export"
WEIGHTS = llama(hidden=16)
STEP = 2
ADAPTER = {
    f"base_model.model.layers.{n}.q.lora_{side}.weight": np.full(shape, n + 1, np.float32)
    for n in range(2)
    for side, shape in (("A", (2, 800)), ("B", (800, 2)))
}
PROGRAM = """
name = "up"
from = "hf"
to = "mine"
statements = '''
model.layers.$LAYER_ID.mlp.up_proj.weight^T -> model.layers.$LAYER_ID.UP.weight
* -> *
'''
"""


class Way(NamedTuple):
    """What is made of what."""

    run: str
    kind: str
    program: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {"as": self.kind, **({} if self.program is None else {"program": self.program})}


KINDS = ("hf", "dcp", "paddle-uc", "paddle-flex")
WAYS = {
    "peft": Way("adapter", "peft"),
    **{kind: Way("llama", kind) for kind in (*KINDS, "deepspeed-universal", "paddle-sharding-io")},
    **{f"{kind} by a program": Way("llama", kind, PROGRAM) for kind in KINDS},
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: what a kill leaves asks nothing of a disk."""
    with in_memory() as directory:
        yield directory


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A root with a model that is trained, and an adapter."""
    with in_memory() as directory:
        fill(directory / "root")
        yield directory / "root"


def fill(made: Path) -> None:
    assets = {"config.json": json.dumps(LLAMA).encode()}
    path = made / naming.checkpoint_path("llama", STEP)
    build(path, trained(WEIGHTS), run="llama", step=STEP, assets=assets, ranks=values_of(list(WEIGHTS)))
    adapter = {"adapter_config.json": json.dumps({"peft_type": "LORA", "r": 2}).encode()}
    build(made / naming.checkpoint_path("adapter", STEP), {"adapter": ADAPTER}, run="adapter", step=STEP, assets=adapter)


def manifest_of(directory: Path) -> Manifest:
    return manifests.decode((directory / naming.MANIFEST).read_bytes(), (directory / naming.COMMIT).read_bytes())


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Ended(NamedTuple):
    """How a program ended, what it said, and its acts."""

    status: int
    said: dict[str, Any]
    acts: list[str]


class Program:
    """The offline program, to which something may happen."""

    def __init__(self, directory: Path, source: Path, way: Way) -> None:
        self.place, self._log = directory / "place", directory / "acts"
        self.place.mkdir(exist_ok=True)
        self.work = DirectoryConversion(
            arguments=a_conversion(source=str(source), to=str(self.place / "out"), **way.arguments)
        )

    def run(self, at: int = 0, how: str = "KILL") -> Ended:
        """Run it, with something happening at an act if `at` is not 0."""
        self._log.write_bytes(b"")
        if at:
            Path(f"{self._log}.kill").write_text(f"{at} {how}")
        with self._begun() as process:
            assert process.stdout is not None
            text = process.stdout.read()
            status = process.wait(180)
        return Ended(status, json.loads(text) if text.strip() else {}, self._log.read_text().splitlines())

    @contextmanager
    def started(self, at: int, how: str) -> Iterator[Forked]:
        """It is killed at the end if it still runs."""
        self._log.write_bytes(b"")
        Path(f"{self._log}.kill").write_text(f"{at} {how}")
        process = self._begun()
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def _begun(self) -> Forked:
        process = Forked(["-m", "tests.crash.offline_program", self._log], kind="daemon", talks=True)
        assert process.stdin is not None
        process.stdin.write(self.work.model_dump_json(by_alias=True))
        process.stdin.close()
        return process

    def there(self) -> list[str]:
        return sorted(os.listdir(self.place))


def created(*runs: Ended) -> Counter[str]:
    """How often each file with tensors or of a plan was begun."""
    return Counter(line for run in runs for line in run.acts if line.startswith("create "))


def points(acts: int, count: int) -> list[int]:
    """So many acts all over them, the first and the last one too."""
    return sorted({1 + number * (acts - 1) // max(count - 1, 1) for number in range(count)})


def check_kills(program: Program, count: int) -> None:
    """Kill it at so many acts. At most one file is made twice, and what comes of it is what it would have been."""
    clean = program.run()
    assert clean.status == 0 and program.there() == ["out"], clean
    out = program.place / "out"
    wanted = files_of(out)
    shutil.rmtree(out)
    for at in points(len(clean.acts), count):
        ledger.tried(LANE)
        killed = program.run(at)
        assert killed.status == -9, (at, killed)
        if out.exists():  # the rest of it is to take the notes away
            assert files_of(out) == wanted
        again = program.run()
        assert again.status == 0 or (out.exists() and again.status == 4 and at == len(clean.acts)), (at, again)
        assert program.there() == ["out"] and files_of(out) == wanted, at
        repeated = created(killed, again)
        assert repeated.keys() == created(clean).keys() and sum(repeated.values()) - len(repeated) <= 1, (at, repeated)
        shutil.rmtree(out)
        ledger.survived(LANE)


FEW = [4, pytest.param(20, marks=pytest.mark.crash_slow)]


@pytest.mark.parametrize("count", FEW)
@pytest.mark.parametrize("name", WAYS)
def test_killed_offline(root: Path, tmp_path: Path, name: str, count: int) -> None:
    """`holdfast export DIR` and `holdfast convert DIR` go on where they were killed."""
    way = WAYS[name]
    check_kills(Program(tmp_path, root / naming.checkpoint_path(way.run, STEP), way), count)


@pytest.mark.parametrize("count", FEW)
@pytest.mark.parametrize("name", ["dcp", "paddle-uc by a program"])
def test_killed_in_a_conversion(root: Path, tmp_path: Path, name: str, count: int) -> None:
    """Of another program's directory as well."""
    way = WAYS[name]
    source = Program(tmp_path, root / naming.checkpoint_path(way.run, STEP), WAYS["paddle-uc"])
    assert source.run().status == 0
    (source.place / "out").rename(tmp_path / "source")
    check_kills(Program(tmp_path, tmp_path / "source", way), count)


def check_clean(program: Program, wanted: dict[str, bytes]) -> None:
    """Nothing is there, or all of it; in either case the next run ends with all of it, and nothing else."""
    out = program.place / "out"
    if out.exists():  # only the notes, and the lock, may be left beside it
        assert files_of(out) == wanted
    else:
        assert program.there() == []
    assert program.run().status == 0
    assert program.there() == ["out"] and files_of(out) == wanted
    shutil.rmtree(out)


@pytest.mark.parametrize("count", FEW)
@pytest.mark.parametrize(("how", "status"), [("INT", 6), ("ENOSPC", 6)])
def test_stopped_or_without_room(root: Path, tmp_path: Path, how: str, status: int, count: int) -> None:
    """Ctrl-C and a full disk leave nothing, at whatever act they come; the error says what to do."""
    program = Program(tmp_path, root / naming.checkpoint_path("llama", STEP), WAYS["paddle-uc by a program"])
    clean = program.run()
    wanted = files_of(program.place / "out")
    shutil.rmtree(program.place / "out")
    for at in points(len(clean.acts), count):
        ended = program.run(at, how)
        if at == len(clean.acts) and not ended.status:  # it takes the notes away, which needs no room
            shutil.rmtree(program.place / "out")
            continue
        assert ended.status == status and ended.said["hint"], (at, ended)
        check_clean(program, wanted)


def test_a_damaged_extent_is_named(root: Path, tmp_path: Path) -> None:
    """Also by a start that goes on from what was written before the damage; nothing is left."""
    broken = tmp_path / "broken"
    shutil.copytree(root / naming.checkpoint_path("llama", STEP), broken)
    program = Program(tmp_path, broken, WAYS["dcp"])
    acts = len(program.run().acts)
    shutil.rmtree(program.place / "out")
    assert program.run(acts // 2).status == -9 and program.there()
    reader_at = manifest_of(broken).tensors["optim"]["model.norm.weight/exp_avg"]
    flip(broken / reader_at.file, reader_at.start + 3)
    ended = program.run()
    assert (ended.status, ended.said["code"], ended.said["tensor"]) == (5, "corrupt-extent", "model.norm.weight/exp_avg")
    assert program.there() == []


def test_a_source_that_changed_while_nobody_looked(root: Path, tmp_path: Path) -> None:
    """A conversion that was killed begins anew, and mixes nothing of the two."""
    source = Program(tmp_path, root / naming.checkpoint_path("llama", STEP), WAYS["hf"])
    assert source.run().status == 0
    (source.place / "out").rename(tmp_path / "source")
    program = Program(tmp_path, tmp_path / "source", WAYS["dcp"])
    clean = program.run()
    shutil.rmtree(program.place / "out")
    assert program.run(len(clean.acts) // 2).status == -9 and program.there()
    first = min((tmp_path / "source").glob("*.safetensors"))
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = program.run()
    assert again.status == 0 and created(again) == created(clean)
    mixed = files_of(program.place / "out")
    shutil.rmtree(program.place / "out")
    assert program.run().status == 0 and files_of(program.place / "out") == mixed


def test_one_export_to_a_name_at_a_time(root: Path, tmp_path: Path) -> None:
    """The second one is refused by name while the first one lives, and gets it when that is killed."""
    program = Program(tmp_path, root / naming.checkpoint_path("llama", STEP), WAYS["hf"])
    acts = len(program.run().acts)
    shutil.rmtree(program.place / "out")
    with program.started(acts // 2, "STOP") as first:
        wait_until(lambda: stopped(first.pid))
        second = program.run()
        assert (second.status, second.said["code"]) == (4, "in-use") and str(first.pid) in second.said["detail"]
        reader = CheckpointReader.open(DirectorySource(root / naming.checkpoint_path("llama", STEP)))
        with pytest.raises(InUse, match="another export"):
            export(reader, program.place / "out", [], lambda count: None)
        first.kill()
        first.wait(180)
    assert program.run().status == 0 and program.there() == ["out"]
    shutil.rmtree(program.place / "out")
    export(reader, program.place / "out", [], lambda count: None)
    assert program.there() == ["out"]


# A shell starts what it puts into the background with SIGINT ignored, and so would this process be, as a test's descendant.
STARTER = """
import signal, sys
from holdfast.rest import service_jobs
from holdfast_formats.rest.offline import DirectoryConversion
signal.signal(signal.SIGINT, signal.default_int_handler)
service_jobs.command = lambda: [sys.executable, "-m", "tests.crash.offline_program", sys.argv[1]]
try:
    service_jobs.offline(DirectoryConversion.model_validate_json(sys.argv[2]), on_bytes=lambda done, total: None)
except KeyboardInterrupt:
    sys.exit(130)
"""


class StoppedHalfWay(NamedTuple):
    """A command, and the program that works for it, which stands still."""

    program: Program
    command: Forked
    worker: int
    lock: Path


@contextmanager
def stopped_half_way(root: Path, tmp_path: Path) -> Iterator[StoppedHalfWay]:
    """An export to DCP whose program stops in the middle of its acts. Neither of the two outlives the block."""
    program = Program(tmp_path, root / naming.checkpoint_path("llama", STEP), WAYS["dcp"])
    acts = len(program.run().acts)
    shutil.rmtree(program.place / "out")
    log = tmp_path / "acts"
    Path(f"{log}.kill").write_text(f"{acts // 2} STOP")
    command = Forked(["-c", STARTER, str(log), program.work.model_dump_json(by_alias=True)], kind="rank")
    lock, worker = program.place / naming.export_lock("out"), 0
    try:
        wait_until(lambda: lock.exists() and lock.read_text().endswith("\n"))
        worker = int(lock.read_text().split()[1])
        wait_until(lambda: stopped(worker))
        yield StoppedHalfWay(program, command, worker, lock)
    finally:
        command.kill()
        command.communicate()
        if worker:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def released(lock: Path) -> bool:
    """Whether no process holds it. A killed one does for a moment after its memory is gone."""
    with lock.open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_kill_of_the_command_ends_its_program(root: Path, tmp_path: Path) -> None:
    """It does not go on alone: the same command goes on from the finished files, and is not refused as a second one."""
    with stopped_half_way(root, tmp_path) as half_way:
        assert not released(half_way.lock)
        half_way.command.kill()
        half_way.command.wait(180)
        wait_until(lambda: released(half_way.lock))
    assert "out" not in half_way.program.there() and half_way.program.run().status == 0


def test_ctrl_c_waits_until_all_is_cleaned_up(root: Path, tmp_path: Path) -> None:
    """The command passes the signal on to its program, and ends when nothing is left."""
    with stopped_half_way(root, tmp_path) as half_way:
        half_way.command.send_signal(signal.SIGINT)
        os.kill(half_way.worker, signal.SIGCONT)
        assert half_way.command.wait(180) == 130 and half_way.program.there() == []
