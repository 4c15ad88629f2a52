"""One rank of one case, in a process of its own so that the first save is a first one:

    python -m benchmarks.rank TASK.json

RANK, WORLD_SIZE and the rest stand in the environment, as torchrun would put them there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import disk
from .peers import PEERS, Load, Place, Spec, checker, holder, loaders, open_peer, resharders
from .processes import Cores, PeakMemory, pss, tree
from .state import FULL_BYTES, State, allocate, change, digests, fill, llama, small, wrong
from .training import PRODUCTS, Watch, Work, save_under_training

FIRST, WARM, TRAINED, MEMORY, HELD = "first", "warm", "trained", "memory", "held"


class Task(NamedTuple):
    """What the harness asks of all ranks of a case. Results and digests are written beside the task's file."""

    peer: str
    phase: str  # save, load or reshard
    directory: str
    saved_world: int
    seed: int
    state_bytes: int = FULL_BYTES
    tensors: int = 0  # not 0: so many small tensors instead of a Llama's
    kinds: tuple[str, ...] = (FIRST, WARM, TRAINED)
    checks: tuple[str, ...] = (TRAINED,)
    step: int = 0  # what load and reshard load
    products: int = PRODUCTS  # of matrices in a step of training
    url: str | None = None
    daemon: int | None = None


class Result:
    """Samples by metric, and what was loaded wrongly."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.wrong: dict[str, list[str]] = {}
        self.checked = 0

    def add(self, metric: str, value: float) -> None:
        self.samples[metric].append(value)

    def compare(self, what: str, expected: dict[str, str], state: State) -> None:
        found = wrong(expected, digests(state))
        self.checked += len(state.tensors)
        if found:
            self.wrong[what] = found

    def as_json(self) -> dict[str, Any]:
        return {"samples": self.samples, "wrong": self.wrong, "checked": self.checked}


class SavePhase:
    """The saves of one peer, one after the other: first, warm, under training."""

    def __init__(self, task: Task, spec: Spec, state: State, result: Result) -> None:
        self._task, self._spec, self._state, self._result = task, spec, state, result
        self._place = Place(Path(task.directory), task.saved_world, task.url)
        self._others = [task.daemon] if task.daemon is not None and state.rank == 0 else []
        self._memory_before = pss(tree(os.getpid()))
        self._peer = open_peer(spec, self._place, state)
        self.expected: dict[str, str] = {}
        self.step = 0

    def run(self) -> None:
        for kind in self._task.kinds:
            self._next()
            if kind == TRAINED:
                self._train()
            elif kind == MEMORY:
                self._measure_memory()
            else:
                self._save(kind)
            if kind in self._task.checks:
                checker(self._spec)(self._place, self._state, self.step)
                self._result.compare(f"{kind} save", self.expected, self._state)
        held = holder(self._spec)
        if held is not None:
            change(self._state)
            _meet()
            self._result.add(HELD, _timed(lambda: held(self._peer, self._state)))
            self._result.compare(HELD, self.expected, self._state)

    def _next(self) -> None:
        """The checkpoint before goes before the next is saved, and the disk comes to rest."""
        _meet()  # all have done with it
        if self.step and self._state.rank == 0:
            self._peer.clear(self.step)
        os.sync()
        self.step += 1
        self._remember()

    def _remember(self) -> None:
        self.expected = digests(self._state)
        _meet()

    def _save(self, kind: str) -> None:
        """Change everything the moment the fence is open: what was not staged then is wrong in the checkpoint."""
        began = time.perf_counter()
        self._peer.save(self.step)
        saved = time.perf_counter() - began
        if self._spec.background:
            self._peer.fence()
            staged = time.perf_counter() - began
            change(self._state)  # before anybody waits, who might do then what should have been done before
            durable = Watch(self._durable, began).seconds()
        else:
            self._durable()
            staged, durable = saved, time.perf_counter() - began
            change(self._state)
        for metric, value in (("save", saved), ("staged", staged), ("durable", durable)):
            self._result.add(f"{kind}.{metric}", value)

    def _train(self) -> None:
        cores = Cores(self._state.rank, self._state.world, self._others)
        work = Work(self._state, self._task.products)
        trained = save_under_training(self._peer, self.step, work, cores, self._durable, self._remember)
        for name, value in trained._asdict().items():
            self._result.add(f"{TRAINED}.{name.removesuffix('_s')}", value)

    def _measure_memory(self) -> None:
        with PeakMemory(os.getpid(), *self._others) as memory:
            self._peer.save(self.step)
            self._peer.fence()
            self._durable()
        self._result.add(MEMORY, memory.peak - self._memory_before)

    def _durable(self) -> None:
        self._peer.wait()
        if not self._spec.syncs:
            disk.sync_tree(self._place.directory)


def load_phase(task: Task, ways: dict[str, Load], expected: dict[str, str], state: State, result: Result) -> None:
    """Every way to load, once untimed, then cold and warm; every value is checked each time."""
    place = Place(Path(task.directory), task.saved_world, task.url)
    names = sorted(ways)
    random.Random(task.seed).shuffle(names)
    for name in names:
        for kind, prepare in (("", disk.warm), ("cold", lambda _: disk.drop_caches()), ("warm", disk.warm)):
            change(state)
            possible = prepare(place.directory) is not False if state.rank == 0 or kind != "cold" else True
            _meet()
            took = _timed(partial(ways[name], place, state, task.step))
            result.compare(f"{name}, {kind or 'untimed'}", expected, state)
            if kind and possible:
                result.add(f"{task.phase}.{name}.{kind}", took)


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _meet() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def run(task: Task, folder: Path, rank: int, world: int, specs: dict[str, Spec] | None = None) -> Result:
    """Do the task as this rank; the digests of what was saved last stay in `folder` for those who load it."""
    spec = (specs or PEERS)[task.peer]
    shapes = small(task.tensors) if task.tensors else llama(task.state_bytes)
    state = allocate(shapes, rank, world, task.saved_world)
    result = Result()
    result.add("bytes", state.nbytes)
    if task.phase == "save":
        fill(state, task.seed)
        saves = SavePhase(task, spec, state, result)
        saves.run()
        (folder / f"digests-{rank}.json").write_text(json.dumps([saves.step, saves.expected]))
        return result
    saved = [json.loads((folder / f"digests-{rank}.json").read_text()) for rank in range(task.saved_world)]
    expected = {name: digest for _, found in saved for name, digest in found.items()}
    ways = dict(resharders(spec) if task.phase == "reshard" else loaders(spec))
    load_phase(task._replace(step=saved[0][0]), ways, expected, state, result)
    return result


def read_task(path: Path) -> Task:
    given: dict[str, Any] = json.loads(path.read_text())
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Task(**given)


def main() -> None:
    faulthandler.enable()
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    status = 0
    try:
        found = run(read_task(path), path.parent, rank, world).as_json()
        _meet()  # rank 0 holds the store that the others may still ask
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
        status = 1
    (path.parent / f"result-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # peers leave threads behind, and gloo's abort now and then while an interpreter unwinds


if __name__ == "__main__":
    main()
