"""Saves and restores the random streams of this process: Python's, numpy's, torch's on the CPU and on every CUDA device.

Each stream is a tensor `ranks/<rank>/rng/<stream>` of the group `extra`; parts that are not arrays are in the JSON value
`rng`. If save and restore both know their mesh, a rank continues the streams of the rank that had its place
(`holdfast_formats.layout.successors`), otherwise those of the same rank number. If there is no such rank, it continues the
streams of another one: that with its coordinates modulo the saved sizes, or else `rank mod saved ranks`. These are mixed
with a number (`Mixing`), so that no two ranks draw the same unless they train together on the same rows: each stream is
seeded from a digest of the saved stream's bytes and the number. Streams of other frameworks are entries of the state
(`FurtherStreams`), and stored in the same JSON value.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.left_out import LeftOutNote
from holdfast.state.streams import FurtherStreams, seed_of
from holdfast.tensors import json_values
from holdfast.tensors.leaves import RANK_PREFIX, Content, OfferedLeaves, PartPlan, Selection
from holdfast.tensors.torch_dtypes import local_shape, torch_dtype
from holdfast_formats.errors import CorruptManifest, InvalidRequest
from holdfast_formats.layout.successors import Mixing, SavedRankChoice

GROUP = "extra"
KEY = "rng"
_PYTHON, _NUMPY, _TORCH, _CUDA = "python", "numpy", "torch", "cuda."


class RandomStreams(NamedTuple):
    """The state of every stream at one moment: arrays as tensors by stream name, and parts that are not arrays."""

    tensors: dict[str, torch.Tensor]
    residual: dict[str, Any]


Further = Sequence[FurtherStreams]


class _Moment(NamedTuple):
    """The streams as each library returns them: to compare two of these takes a third of the time of two `capture`s."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: dict[str, torch.Tensor]
    further: dict[str, Any]

    @property
    def streams(self) -> RandomStreams:
        version, words, gauss = self.python
        tensors, numpy_state = {_PYTHON: _words(words), **self.torch}, dict(self.numpy)
        if isinstance(numpy_state["state"].get("key"), np.ndarray):
            tensors[_NUMPY] = torch.from_numpy(numpy_state["state"]["key"].copy())
            numpy_state["state"] = {k: int(v) for k, v in numpy_state["state"].items() if k != "key"}
        residual = {"python": {"version": version, "gauss": gauss}, "numpy": numpy_state}
        return RandomStreams(tensors, {**residual, **self.further})

    def is_of(self, other: _Moment) -> bool:
        """Whether nothing was drawn between them."""
        words = [one.numpy["state"].get("key") for one in (self, other)]
        rest = [{**one.numpy, "state": {**one.numpy["state"], "key": None}} for one in (self, other)]
        return (
            self.python == other.python
            and np.array_equal(*words)
            and rest[0] == rest[1]
            and self.torch.keys() == other.torch.keys()
            and all(torch.equal(stream, other.torch[name]) for name, stream in self.torch.items())
            and self.further == other.further
        )


def capture(further: Further = ()) -> RandomStreams:
    """Copy the streams as they are now."""
    return _now(further).streams


def _now(further: Further) -> _Moment:
    of_torch = {_TORCH: torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # before that no CUDA stream has been drawn from
        of_torch |= {f"{_CUDA}{device}": torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())}
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return _Moment(random.getstate(), numpy_state, of_torch, {one.name: one.state_dict() for one in further})


def install(streams: RandomStreams, further: Further = ()) -> None:
    """Continue these streams; those that this process does not have are skipped."""
    residual = streams.residual
    if _PYTHON in streams.tensors:
        words = tuple(streams.tensors[_PYTHON].tolist())
        random.setstate((residual["python"]["version"], words, residual["python"]["gauss"]))
    if "numpy" in residual:
        state = dict(residual["numpy"])
        if _NUMPY in streams.tensors:
            state["state"] = {**state["state"], "key": streams.tensors[_NUMPY].numpy()}
        np.random.set_state(state)
    if _TORCH in streams.tensors:
        torch.set_rng_state(streams.tensors[_TORCH])
    for name, stream in streams.tensors.items():
        if name.startswith(_CUDA) and _is_here(name):
            torch.cuda.set_rng_state(stream, int(name.removeprefix(_CUDA)))
    for one in further:
        if one.name in residual:
            one.load_state_dict(residual[one.name])


def mixed(streams: RandomStreams, mixing: Mixing, further: Further = ()) -> RandomStreams:
    """Streams for a rank that has none: those with a number are seeded from it and the given stream's bytes."""
    tensors: dict[str, torch.Tensor] = {}
    residual = dict(streams.residual)
    for name, tensor in streams.tensors.items():
        number = mixing.device if name.startswith(_CUDA) else mixing.process
        if number is None:
            tensors[name] = tensor
            continue
        seed = seed_of(tensor.contiguous().numpy().tobytes(), number)
        if name == _PYTHON:
            version, words, gauss = random.Random(seed).getstate()
            tensors[name] = _words(words)
            residual["python"] = {"version": version, "gauss": gauss}
        elif name == _NUMPY:
            seeded: Any = np.random.RandomState(np.random.MT19937(seed)).get_state(legacy=False)
            tensors[name] = torch.from_numpy(seeded["state"]["key"].copy())
            residual["numpy"] = {**seeded, "state": {"pos": int(seeded["state"]["pos"])}}
        elif name == _TORCH:
            tensors[name] = torch.Generator().manual_seed(seed % 2**63).get_state()
        elif _is_here(name):
            tensors[name] = torch.Generator(f"cuda:{name.removeprefix(_CUDA)}").manual_seed(seed % 2**63).get_state()
    for one in further:
        if one.name in residual and mixing.device is not None:
            residual[one.name] = one.mixed(residual[one.name], mixing.device)
    return RandomStreams(tensors, residual)


class Random:
    """The random streams at two moments: that of a save, and that from which a restored training continues."""

    def __init__(self, further: Further = ()) -> None:
        self.further = further
        self._saved: _Moment | None = None
        self._restored: RandomStreams | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block, `now` is the moment at which the block begins; afterwards all random numbers drawn in it are put
        back.
        """
        self._saved = before = _now(self.further)
        try:
            yield
        finally:
            self._saved = None
            if not before.is_of(_now(self.further)):
                install(before.streams, self.further)

    def now(self) -> RandomStreams:
        return (self._saved or _now(self.further)).streams

    def go_on_from(self, streams: RandomStreams) -> None:
        """Continue these streams; `CorruptManifest` if they are not valid."""
        try:
            install(streams, self.further)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CorruptManifest(
                f"this process cannot load the saved random states: {error}",
                hint="keep the live random states: restore(exclude=('extra/rng',))",
            ) from error
        self._restored = streams

    def install_again(self) -> None:
        if self._restored is None:
            raise InvalidRequest("no random states were restored", hint="call restore() first, with the group 'extra'")
        install(self._restored, self.further)


class RandomState(NamedTuple):
    """The random streams as a part of the training state of one rank."""

    rank: int
    random: Random

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        streams = self.random.now()
        for name, tensor in streams.tensors.items():
            content.add(GROUP, f"{_prefix(self.rank)}{name}", tensor)
        content.add_value(GROUP, KEY, json_values.dumps(streams.residual, KEY))

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want this rank's streams, or those that it continues. A checkpoint without any is noted, not refused."""
        plan = PartPlan(claimed={(GROUP, KEY)})
        text = stored.value(GROUP, KEY)
        names = stored.specs.get(GROUP, {})
        ranks = sorted({int(n[len(RANK_PREFIX) :].split("/")[0]) for n in names if is_stream(n)})
        if not selection.takes(GROUP, KEY):
            return plan
        if text is None or not ranks:
            plan.notes.append(LeftOutNote("the checkpoint has no random states: this process keeps its own"))
            return plan
        source, _, mixing = _heir(self.rank, stored.stream, ranks)
        tensors = {}
        for name in (name for name in names if name.startswith(_prefix(source))):
            dtype, shape = names[name]
            tensors[name.removeprefix(_prefix(source))] = buffer = torch.empty(
                local_shape(torch_dtype(dtype, name), tuple(shape)), dtype=torch_dtype(dtype, name), device="cpu"
            )
            plan.want(GROUP, name, buffer)
        streams = RandomStreams(tensors, json_values.loads(text, KEY))
        plan.notes += self._unlike(streams)
        further = self.random.further
        plan.actions.append(lambda: self.random.go_on_from(mixed(streams, mixing, further)))
        if mixing != Mixing():
            of = "those of devices" if mixing.process is None else "all of them"
            what = "of its own place, which it shares with its tensor-parallel group" if stored.stream else "of its own"
            plan.notes.append(
                f"rank {self.rank} has no saved random states: it uses those of rank {source}, and mixes {of} with a number "
                f"{what}"
            )
        elif source != self.rank:
            plan.notes.append(
                f"rank {self.rank} continues the random states of rank {source}, its counterpart in the saved layout"
            )
        return plan

    def _unlike(self, stored: RandomStreams) -> list[str]:
        """Notes on streams that only one side has. Raises `StateMismatch` for those of a framework that do not fit."""
        notes: list[str] = []
        begun: list[str] = []
        further = {one.name: one for one in self.random.further}
        residual = stored.residual if isinstance(stored.residual, dict) else {}
        idle = [name for name in residual if name not in (_PYTHON, _NUMPY, *further)]
        idle += [name for name in stored.tensors if name.startswith(_CUDA) and not _is_here(name)]
        for name, one in further.items():
            if name in residual:
                one.refuse_unfit(residual[name])
                idle += one.absent(residual[name])
                begun += one.begun(residual[name])
            else:
                notes.append(LeftOutNote(f"the checkpoint has no random states of {name}: this process keeps its own"))
        if begun:
            text = f"random states of another form of parallelism: {', '.join(begun)} go on as this process seeded them"
            notes.append(LeftOutNote(text))
        if idle:
            notes.append(LeftOutNote(f"random states that this process does not have are not restored: {', '.join(idle)}"))
        return notes


def _is_here(stream: str) -> bool:
    return int(stream.removeprefix(_CUDA)) < torch.cuda.device_count()


def _heir(rank: int, known: SavedRankChoice | None, saved: Sequence[int]) -> SavedRankChoice:
    if known is not None and known.rank in saved:
        return known
    if rank in saved:
        return SavedRankChoice(rank, True)
    return SavedRankChoice(saved[rank % len(saved)], False, Mixing(rank, rank))


def _words(words: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.int64))  # a fourth of the time of torch.tensor


def _prefix(rank: int) -> str:
    return f"{RANK_PREFIX}{rank:05d}/{KEY}/"


def is_stream(name: str) -> bool:
    """Whether this is the name of a rank's random stream in the group `extra`."""
    parts = name.split("/")
    return len(parts) == 4 and name.startswith(RANK_PREFIX) and parts[1].isdecimal() and parts[2] == KEY
