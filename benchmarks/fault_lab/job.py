"""One job of one peer in a folder of its own: trainers, those that resume, and what lives on beside them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness import TOP, Failed
from benchmarks.processes import marked

from .dlrover_words import AGENT_DONE, AGENT_READY
from .events import END, FAILED, heard
from .judge import Digests, Loaded, Report
from .peers import DAEMON, Spec
from .resumer import REPORT
from .trainer import MARK, Task, digests_file

LIMIT_S = 180.0  # of a process of the lab
STOP_S = 60.0
POLL_S = 0.005
LOG_TAIL_CHARACTERS = 2000


class Training:
    """A trainer that runs, and what it says."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log
        self.events: list[dict[str, Any]] = []
        self._limit = threading.Timer(LIMIT_S, self._end)
        self._limit.start()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a line that it did not live to read
                pipe.close()

    def until(self, what: str, step: int | None = None) -> dict[str, Any]:
        """Its next event of this kind; raises `Failed` where it ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = heard(line)
            if event is None:
                continue
            self.events.append(event)
            if event["what"] == what and step in (None, event.get("step")):
                return event
            if event["what"] == FAILED and event["where"] == "setting up":
                break
        said = next((event["error"] for event in self.events if event["what"] == FAILED), "it ended")
        raise Failed(f"no {what} from the trainer: {said}", self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:])

    def rest(self) -> list[dict[str, Any]]:
        """All events, once it has ended."""
        with suppress(Failed):
            self.until(END)
            self.until("nothing more")
        self.process.wait()
        return self.events

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self._end()
        self.process.wait()
        self._limit.cancel()

    def _end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class Job:
    """The name is new for each job, and shared by all its starts, as a launcher's is."""

    def __init__(self, spec: Spec, python: Path, folder: Path, state_bytes: int, data: Path | None = None) -> None:
        self.spec, self._python, self.folder = spec, python, folder
        self.data = data or folder / "data"
        folder.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(exist_ok=True)
        self._task = Task(spec.name, str(self.data), str(folder), state_bytes)
        self._name, self._starts = uuid.uuid4().hex[:12], 0
        self._helper: subprocess.Popen[str] | None = None
        self.log = folder / "log"

    @contextmanager
    def running(self) -> Iterator[None]:
        """With its daemon or agent beside it, where the peer has one."""
        self._start_helper()
        try:
            yield
        finally:
            self._stop_helper()

    def train(self, **task: Any) -> Training:
        """Start a trainer; `task` are fields of `Task`."""
        return Training(self._launch("benchmarks.fault_lab.trainer", self._task._replace(**task)), self.log)

    def tell_of_death(self) -> None:
        """What a launcher does when a trainer has died, before it starts another."""
        if self._helper is not None and self.spec.helper != DAEMON:
            assert self._helper.stdin is not None
            self._helper.stdin.write("\n")
            self._helper.stdin.flush()
            self._hear_agent(AGENT_DONE)

    def begin_anew(self, beside: bool = True) -> None:
        """Nothing of the job is left but its files; with what lives `beside` its trainers started anew."""
        self._stop_helper()
        self._sweep()
        self._name, self._starts = uuid.uuid4().hex[:12], 0
        if beside:
            self._start_helper()

    def resume(self) -> tuple[Report, dict[str, str]]:
        """What a new process gets, and the versions it ran with."""
        steps = sorted(self.saved(), reverse=True)
        found = self._ask(self._task._replace(asked_for=tuple(steps)))
        if found is None:  # it died of what it read
            error = f"the process died ({self._last_status})"
            found = self._ask(self._task._replace(asked_for=tuple(steps[1:]), resumes=False)) or {"loaded": None}
            found["error"] = error
        loaded = found["loaded"]
        report = Report(Loaded(loaded["step"], loaded["digests"]) if loaded else None, found["error"])
        return report, found.get("versions", {})

    def saved(self) -> dict[int, Digests]:
        """The digests of every save that was begun."""
        found = {int(path.stem.partition("-")[2]): path for path in self.folder.glob("digests-*.json")}
        return {step: json.loads(digests_file(self.folder, step).read_text()) for step in found}

    def end(self) -> None:
        """Nothing of it is left."""
        self._sweep()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, task: Task) -> dict[str, Any] | None:
        """The report of a process that resumes; None where it died."""
        report = self.folder / REPORT
        report.unlink(missing_ok=True)
        process = self._launch("benchmarks.fault_lab.resumer", task)
        try:
            process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        status = process.returncode
        self._last_status = signal.Signals(-status).name if status < 0 else f"status {status}"
        if not report.exists():
            return None
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    def _launch(self, module: str, task: Task) -> subprocess.Popen[str]:
        path = self.folder / "task.json"
        path.write_text(json.dumps(task._asdict()))
        process = self._open([str(self._python), "-m", module, str(path)])
        self._starts += 1
        return process

    def _open(self, command: list[str], stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        ours = {name: str(value) for name, value in names.items()}
        ours |= {"TORCHELASTIC_RUN_ID": self._name, "TORCHELASTIC_RESTART_COUNT": str(self._starts)}
        ours |= {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1", MARK: str(self.folder)}
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command,
                cwd=TOP,
                env=os.environ | ours,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _start_helper(self) -> None:
        if not self.spec.helper:
            return
        if self.spec.helper != DAEMON:
            self._helper = self._open([str(self._python), "-m", "benchmarks.fault_lab.dlrover_agent"])
            self._hear_agent(AGENT_READY)
            return
        command = [str(self._python.with_name("holdfast")), "serve", "--root", str(self.data), "--listen", "none"]
        self._helper = self._open([*command, "--socket", str(self.folder / "socket")], subprocess.DEVNULL)
        limit = time.monotonic() + STOP_S
        while not self._is_served():
            if self._helper.poll() is not None or time.monotonic() > limit:
                self._stop_helper()
                raise Failed("the daemon did not come up", self.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:])
            time.sleep(POLL_S)

    def _is_served(self) -> bool:
        assert self._helper is not None
        try:
            return bool(json.loads((self.data / ".holdfast.json").read_bytes())["pid"] == self._helper.pid)
        except (OSError, ValueError, KeyError):
            return False

    def _hear_agent(self, word: str) -> None:
        assert self._helper is not None and self._helper.stdout is not None
        limit = threading.Timer(LIMIT_S, self._helper.kill)
        limit.start()
        try:
            if not any(line.strip() == word for line in self._helper.stdout):
                raise Failed("the agent ended", self.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:])
        finally:
            limit.cancel()

    def _stop_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        helper.terminate()
        try:
            helper.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(helper.pid, signal.SIGKILL)
            helper.communicate()

    def _sweep(self) -> None:
        """Processes that outlived their parents; shared memory and sockets named after the job that were not removed."""
        for pid in marked(MARK, str(self.folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in Path("/dev/shm").glob(f"*{self._name}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(Path("/tmp/ckpt_sock") / self._name, ignore_errors=True)
