"""Rounds in random order: every case in fresh processes, the machine's limits measured in every round."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import holdfast

from .environments import Prepared
from .peers import PEERS, Spec
from .rank import FIRST, MEMORY, TRAINED, WARM, Task
from .state import FULL_BYTES
from .training import PRODUCTS

TOP = Path(__file__).parents[1]
CASE_TIMEOUT_S = 420.0
POLL_S = 0.02
LIMITS = "limits"
MEMORY_EVERY = 3  # rounds
LOG_TAIL_CHARACTERS = 3000


class Options(NamedTuple):
    """What to run. `warm` is the number of warm saves in a case beside the one under training."""

    peers: tuple[str, ...] = tuple(PEERS)
    ranks: tuple[int, ...] = (1, 2)
    runs: int = 7
    state_bytes: int = FULL_BYTES
    tensors: int = 0
    measures: tuple[str, ...] = ("save", "load")
    warm: int = 2
    check_all: bool = False
    seed: int = 0
    start: int = 0  # the first round's number: what is checked and weighed turns with it
    products: int = PRODUCTS
    directory: Path = TOP / ".bench" / "data"


class Failed(Exception):
    """A case that has no result: why, and how its log ends."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def run(options: Options, environments: Mapping[str, Prepared], results: Path) -> dict[str, Any]:
    """All rounds; `results` is written anew after every case, so that nothing is lost when a run is interrupted."""
    report: dict[str, Any] = {"machine": machine(options), "options": _plain(options), "records": []}
    dice = random.Random(options.seed)
    for number in range(options.start, options.start + options.runs):
        cases = [(ranks, name) for ranks in options.ranks for name in (*options.peers, LIMITS)]
        dice.shuffle(cases)
        for ranks, name in cases:
            began = time.monotonic()
            record = _case(options, environments, number, ranks, name)
            report["records"].append(record)
            _write(results, report)
            outcome = record.get("error") or (f"WRONG: {record['wrong']}" if record.get("wrong") else "ok")
            took = f"{time.monotonic() - began:.1f} s"
            turn = f"round {number + 1}/{options.start + options.runs}"
            print(f"bench: {turn}, {ranks} rank(s), {name}: {outcome[:300]} ({took})", flush=True)
    return report


def _case(options: Options, environments: Mapping[str, Prepared], number: int, ranks: int, name: str) -> dict[str, Any]:
    record: dict[str, Any] = {"round": number, "ranks": ranks, "peer": name}
    directory = options.directory / f"{name}-{ranks}"
    _empty(directory)
    try:
        if name == LIMITS:
            return record | {"samples": {key: [value] for key, value in _limits(options, directory, ranks).items()}}
        spec = PEERS[name]
        prepared = environments[spec.environment]
        if prepared.python is None:
            raise Failed(prepared.reason)
        return record | Case(options, spec, prepared.python, number, ranks, directory).run()
    except Failed as failure:
        return record | {"error": str(failure), "log": failure.log}
    finally:
        _empty(directory)
        directory.rmdir()
        os.sync()


def _limits(options: Options, directory: Path, ranks: int) -> dict[str, float]:
    size = options.tensors * 1024 if options.tensors else options.state_bytes
    command = [sys.executable, "-m", "benchmarks.limits", str(directory), str(size * ranks), str(ranks)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=CASE_TIMEOUT_S)
    if done.returncode != 0:
        raise Failed(done.stderr.strip().splitlines()[-1])
    found: dict[str, float] = json.loads(done.stdout)
    return found


class Case:
    """One peer, one number of ranks, one round: saves, then loads in new processes, then loads on other ranks."""

    def __init__(self, options: Options, spec: Spec, python: Path, number: int, ranks: int, directory: Path) -> None:
        self._options, self._spec, self._python, self._ranks = options, spec, python, ranks
        self._number = number
        self._seed = options.seed * 1000 + number
        self._data, self._folder = directory / "data", directory / "case"
        self._data.mkdir()
        self._folder.mkdir()

    def run(self) -> dict[str, Any]:
        """What was measured; with the reason when a phase after the saves failed, and what came before it."""
        kinds, checks = self._kinds()
        with self._daemon() as about:
            task = self._task("save")._replace(kinds=kinds, checks=checks, **about)
            results = [self._launch(task, self._ranks)]
        later = []
        if "load" in self._options.measures and self._spec.loads:
            later = [("load", self._ranks), *([("reshard", 3 - self._ranks)] if self._spec.reshards else [])]
        failure: dict[str, str] = {}
        for phase, world in later:
            try:
                results.append(self._launch(self._task(phase), world))
            except Failed as failed:
                failure = {"error": str(failed), "log": failed.log}
        samples = {metric: values for result in results for metric, values in result["samples"].items()}
        samples["bytes"] = results[0]["samples"]["bytes"]
        found = {what: names for result in results for what, names in result["wrong"].items()}
        return {"samples": samples, "wrong": found, "checked": sum(result["checked"] for result in results), **failure}

    def _kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The saves of this round, and which are checked. Memory is measured before anything is loaded to be checked."""
        if "save" not in self._options.measures or not self._spec.saves:
            return (FIRST,), ()
        kinds = (FIRST, *[WARM] * self._options.warm, TRAINED)
        if self._number % MEMORY_EVERY == 0:
            return (FIRST, MEMORY, *kinds[1:]), ((WARM, TRAINED) if self._options.check_all else (TRAINED,))
        return kinds, kinds if self._options.check_all else ((FIRST, WARM, TRAINED)[self._number % 3],)

    def _task(self, phase: str) -> Task:
        return Task(
            peer=self._spec.name,
            phase=phase,
            directory=str(self._data),
            saved_world=self._ranks,
            seed=self._seed,
            state_bytes=self._options.state_bytes,
            tensors=self._options.tensors,
            products=self._options.products,
        )

    def _launch(self, task: Task, world: int) -> dict[str, Any]:
        """Run the task on `world` ranks; the slowest rank's time counts, and everybody's memory."""
        path = self._folder / "task.json"
        path.write_text(json.dumps(task._asdict()))
        for stale in self._folder.glob("result-*.json"):
            stale.unlink()
        job = f"bench{os.getpid()}x{time.monotonic_ns()}"
        log = self._folder / "log"
        with open(log, "ab") as output:
            processes = [
                subprocess.Popen(
                    [self._python, "-m", "benchmarks.rank", str(path)],
                    cwd=TOP,
                    env=os.environ | self._surroundings(rank, world, job, port),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for port in [_free_port()]
                for rank in range(world)
            ]
        try:
            _await(processes)
        except Failed as failure:
            tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
            raise Failed(f"{task.phase}: {self._reason(world, str(failure))}", tail) from None
        finally:
            for process in processes:
                _end_session(process)
            _sweep(job)
        found = [json.loads((self._folder / f"result-{rank}.json").read_text()) for rank in range(world)]
        return joined(found)

    def _surroundings(self, rank: int, world: int, job: str, port: int) -> dict[str, str]:
        ours: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        ours |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ours |= {"TORCHELASTIC_RUN_ID": job, "OMP_NUM_THREADS": 1, "RUNAI_STREAMER_CONCURRENCY": 16}
        ours["PYTHONDONTWRITEBYTECODE"] = 1
        return {name: str(value) for name, value in ours.items()}

    def _reason(self, world: int, otherwise: str) -> str:
        """What the rank that ended first says: the others fail because it is gone."""
        found = []
        for path in (self._folder / f"result-{rank}.json" for rank in range(world)):
            with suppress(OSError, ValueError, KeyError):
                found.append((path.stat().st_mtime_ns, shortened(json.loads(path.read_text())["error"])))
        return min(found)[1] if found else otherwise

    @contextmanager
    def _daemon(self) -> Iterator[dict[str, Any]]:
        """Holdfast's daemon for the saves, on the case's directory, as `holdfast serve` starts it."""
        if not self._spec.daemon:
            yield {}
            return
        command = [str(self._python.with_name("holdfast")), "serve", "--root", str(self._data)]
        command += ["--socket", str(self._folder / "socket"), "--listen", f"127.0.0.1:{_free_port()}"]
        with open(self._folder / "daemon.log", "ab") as log:
            daemon = subprocess.Popen(command, cwd=TOP, stdout=log, stderr=log, start_new_session=True)
        try:
            about = self._about(daemon)
            yield {"daemon": daemon.pid, "url": about["url"]}
        finally:
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                _end_session(daemon)

    def _about(self, daemon: subprocess.Popen[bytes]) -> dict[str, Any]:
        limit = time.monotonic() + 60
        while time.monotonic() < limit and daemon.poll() is None:
            try:
                about: dict[str, Any] = json.loads((self._data / ".holdfast.json").read_bytes())
                return about
            except (OSError, ValueError):
                time.sleep(POLL_S)
        raise Failed(
            "the daemon did not come up", (self._folder / "daemon.log").read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        )


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of all ranks: for times the slowest, for memory and bytes the sum."""
    samples: dict[str, list[float]] = {}
    for metric in ranks[0]["samples"]:
        combine = sum if metric in (MEMORY, "bytes") else max
        samples[metric] = [
            combine(values) for values in zip(*(rank["samples"].get(metric, []) for rank in ranks), strict=False)
        ]
    found: dict[str, list[str]] = {}
    for number, rank in enumerate(ranks):
        for what, names in rank["wrong"].items():
            found[f"{what}, rank {number}"] = names
    return {"samples": samples, "wrong": found, "checked": sum(rank["checked"] for rank in ranks)}


def shortened(error: str) -> str:
    """An error on one line: how it begins and, where it quotes a traceback, how that ends."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"


def machine(options: Options) -> dict[str, Any]:
    """Where and with what this was measured."""
    models = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    packages = {name: version(name) for name in ("torch", "safetensors")} | {"holdfast": holdfast.__version__}
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": packages | {name: spec.requires[0].partition("==")[2] for name, spec in PEERS.items() if spec.requires},
        "cold_reads": os.geteuid() == 0,
        "trainer_has_its_core": {str(ranks): len(os.sched_getaffinity(0)) > ranks for ranks in options.ranks},
    }


def _await(processes: list[subprocess.Popen[bytes]]) -> None:
    limit = time.monotonic() + CASE_TIMEOUT_S
    while any(process.poll() is None for process in processes):
        ended = [process.returncode for process in processes if process.poll() not in (None, 0)]
        if ended:
            time.sleep(1.0)  # the other ranks may have more to say
            raise Failed(f"ended with status {ended[0]}")
        if time.monotonic() > limit:
            raise Failed(f"no end in {CASE_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    if any(process.returncode for process in processes):
        raise Failed(f"ended with status {max(process.returncode for process in processes)}")


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """It, and the processes it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _sweep(job: str) -> None:
    """Shared memory and sockets that a peer named after the job and did not remove."""
    for path in Path("/dev/shm").glob(f"*{job}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(Path("/tmp/ckpt_sock") / job, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _plain(options: Options) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in options._asdict().items()}


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
