"""Paddle's random streams as an entry of a state: of the CPU, of each GPU, and those that fleet's tracker has by name.

Of the named ones, some differ among the ranks of a tensor-parallel group and some do not, and only the program that seeded
them knows which. So they belong to a degree of tensor parallelism, and begin as seeded in another.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from holdfast.integrations.paddle.fleet.topology import tensor_ranks
from holdfast.state.streams import FurtherStreams, seed_of
from holdfast.tensors import json_values
from holdfast_formats.errors import StateMismatch

_CPU, _GPU, TRACKED, _TENSOR_RANKS = "cpu", "gpu.", "tracked", "tensor_ranks"
_HINT = "keep the live random states: restore(exclude=('extra/rng',))"
_TRACKER = "paddle.distributed.fleet.layers.mpu.random"


class _Read(NamedTuple):
    """A generator's state as Paddle pickles it, and its text."""

    state: tuple[Any, ...]
    text: list[Any]


class PaddleStreams(FurtherStreams):
    """The generators of this process."""

    name = "paddle"

    def __init__(self) -> None:
        self._read: dict[str, _Read] = {}

    def state_dict(self) -> dict[str, Any]:
        tracked = {
            name: [self._text(f"{name}.{number}", one) for number, one in enumerate(states)]
            for name, states in self._tracked().items()
        }
        own = {name: self._text(name, one.get_state()) for name, one in _generators().items()}
        return {**own, TRACKED: tracked, _TENSOR_RANKS: tensor_ranks()}

    def _text(self, name: str, state: Any) -> list[Any]:
        """As the function; made once as long as nothing is drawn."""
        now, known = state.__getstate__(), self._read.get(name)
        if known is None or known.state != now:
            known = self._read[name] = _Read(now, _text(state))
        return known.text

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for named streams of this degree that one side lacks, and for states of another form."""
        if not isinstance(stored, dict) or not isinstance(stored.get(TRACKED), dict):
            raise StateMismatch("the checkpoint's states of Paddle's generators are something else", hint=_HINT)
        differing = sorted(stored[TRACKED].keys() ^ self._tracked().keys())
        if differing and _of_this_degree(stored):
            raise StateMismatch(
                f"only the checkpoint, or only this process, has the random stream {differing[0]!r} of fleet's tracker",
                hint=f"seed the tracker before restore(), as the program that saved did, or {_HINT}",
            )

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        for name, generator in _generators().items():
            if name in stored:
                generator.set_state(_state(stored[name]))
        if stored[TRACKED] and _of_this_degree(stored):
            tracker = sys.modules[_TRACKER].get_rng_state_tracker()
            tracker.set_states_tracker({name: list(map(_state, states)) for name, states in stored[TRACKED].items()})

    def absent(self, stored: dict[str, Any]) -> list[str]:
        names = [name for name in stored if name not in (TRACKED, _TENSOR_RANKS, *_generators())]
        names += [] if _of_this_degree(stored) else [name for name in stored[TRACKED] if name not in self._tracked()]
        return [f"{self.name} {name}" for name in names]

    def begun(self, stored: dict[str, Any]) -> list[str]:
        return [] if _of_this_degree(stored) else [f"{self.name} {name}" for name in self._tracked()]

    def mixed(self, stored: Any, number: int) -> Any:
        """Ranks of a tensor-parallel group, which have one number, have equal streams afterwards if they had before."""
        own = {name: _mixed(stored[name], number) for name in _generators() if name in stored}
        named = {name: [_mixed(one, number) for one in states] for name, states in stored[TRACKED].items()}
        return {**stored, **own, TRACKED: named}

    def _tracked(self) -> dict[str, Any]:
        """The named streams of fleet's tracker. Nothing has seeded it before its module is imported."""
        module = sys.modules.get(_TRACKER)
        return {} if module is None else dict(module.get_rng_state_tracker().get_states_tracker())


def _generators() -> dict[str, Any]:
    import paddle
    from paddle.base import core

    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    gpus = {f"{_GPU}{number}": core.default_cuda_generator(number) for number in range(count)}
    return {_CPU: core.default_cpu_generator(), **gpus}


def _of_this_degree(stored: dict[str, Any]) -> bool:
    own = tensor_ranks()
    return bool(stored.get(_TENSOR_RANKS, own) == own)


def _mixed(stored: list[Any], number: int) -> list[Any]:
    """A stream of the same device, seeded from this one."""
    generator = _generators()[_CPU]
    before = generator.get_state()
    generator.manual_seed(seed_of(json_values.dumps(stored, TRACKED).encode(), number) % 2**63)
    made = _text(generator.get_state())
    generator.set_state(before)
    return [stored[0], *made[1:]]


def _text(state: Any) -> list[Any]:
    """Device, seed, offset and the text of the engine."""
    device, seed, offset, engine = state.__getstate__()
    return [device, seed, offset, bytes(engine).decode("ascii")]


def _state(text: list[Any]) -> Any:
    from paddle.base import core

    device, seed, offset, engine = text
    state = core.GeneratorState.__new__(core.GeneratorState)
    state.__setstate__((device, seed, offset, list(engine.encode("ascii"))))
    return state
